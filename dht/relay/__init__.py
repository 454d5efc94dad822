"""libp2p's circuit relay (version 2), through which others reach peers that cannot be dialled.

p2pd's own relay is off (`p2pd.CONFIG`): it serves any stranger, resets circuits after 128 KiB or 2 minutes, and bounds
no bandwidth. A daemon that was told to relay takes the protocol's streams (`service`), and counts and paces every byte.
The relayed peers speak libp2p's own encrypted protocol end to end: a relay sees their PeerIDs and the amounts, not the
contents.
"""
