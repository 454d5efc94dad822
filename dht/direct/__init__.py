"""Direct channels: TCP connections of the peers' own, mutually authenticated, encrypted, for peers that were admitted.

A peer is admitted by name, with its one certificate, when a round or a transfer with it begins (`allowlist`). What it
may say then is for the rounds to judge: they ignore a peer that is no member.

A channel begins with TLS 1.3 between certificates that are bound to PeerIDs by `credential`; `handshake`
says how. What follows is records of TLS itself (`tls`) or larger ones of our own (`aead`).
`transport.DirectTransport` is what a swarm hands out.
"""
