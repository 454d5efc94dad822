"""Holes through NATs: two peers that no peer can dial open a direct channel to each other.

Both peers learn from public peers where their connections come from, and tell each other over their relayed stream.
Then they open one TCP connection from both ends at once, so that each router takes the other's packets for answers
(Ford, Srisuresh and Kegel 2005, "Peer-to-Peer Communication Across Network Address Translators", section 4). They agree
on the moment as in libp2p's DCUtR (libp2p specs, relay/DCUtR.md). `candidates` judges places; `puncher` acts, schedules
the attempts, and remembers their results. The hole is a TCP connection like any other: the ordinary handshake of direct
channels follows, with the smaller PeerID as the side that has dialled.
"""
