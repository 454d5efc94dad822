"""Direct channels: TCP connections of the peers' own, mutually authenticated, encrypted, for peers that were admitted.

A peer is admitted by PeerID when a round or a transfer with it begins (`credential.Allowlist`). The rounds judge its
messages: they ignore a peer that is no member.

A channel begins with TLS 1.3 (`handshake`), in which both peers prove their identity keys (`tls`). Records of TLS
itself follow, or larger records of our own (`aead`). A swarm hands out a `transport.DirectTransport`.
"""
