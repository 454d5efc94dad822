"""libp2p's circuit relay (version 2), through which peers are reached that cannot be dialled.

p2pd's own relay service is replaced. It cannot be turned off: whatever its options say, p2pd installs a relay that
serves any stranger and resets circuits after 128 KiB or 2 minutes, and which one answers when another was asked for
is a race within p2pd's start. It knows no bound on bandwidth either. So a daemon takes over the protocol's streams
(`service`), refuses unless it was asked to relay, and counts and paces every byte if it was. The relayed peers talk
libp2p's own encrypted protocol end to end: a relay sees who talks to whom and how much, not what.
"""
