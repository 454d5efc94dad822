"""Holes through NATs: two peers that nobody can dial open a direct channel to each other.

Both learn from public peers where their connections come from, tell each other over the relayed stream that
they have, and open one TCP connection from both ends at once, so that each router takes the other's packets for answers
(Ford, Srisuresh and Kegel 2005, "Peer-to-Peer Communication Across Network Address Translators", section 4). When to
begin is agreed as in libp2p's DCUtR (libp2p specs, relay/DCUtR.md): `machine` decides, `puncher` acts. What
comes through the hole is a connection like any other: the ordinary handshake of direct channels follows, with the
smaller PeerID as the side that has dialled. `puncher` also says when it is tried, and remembers what came of it.
"""
