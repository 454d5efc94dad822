"""Direct channels: TCP connections of the peers' own, mutually authenticated, encrypted, for members of a group only.

A channel begins with TLS 1.3 between certificates that are bound to PeerIDs by `credential`; `preface` and
`handshake` say how. What follows is records of TLS itself (`tls`) or larger ones of our own (`aead`).
`transport.DirectTransport` is what a swarm hands out.
"""
