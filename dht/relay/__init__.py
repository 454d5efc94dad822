"""libp2p's circuit relay (version 2), through which others reach peers that cannot be dialled.

This package replaces p2pd's own relay service, which cannot be turned off. With any options, p2pd installs a relay that
serves any stranger and resets circuits after 128 KiB or 2 minutes. If another relay is configured, a race within p2pd's
start decides which one answers. p2pd's relay does not bound bandwidth either. So a daemon takes over the protocol's
streams (`service`), refuses unless it was told to relay, and counts and paces every byte if it was. The relayed peers
speak libp2p's own encrypted protocol end to end: a relay sees their PeerIDs and the amounts, not the contents.
"""
