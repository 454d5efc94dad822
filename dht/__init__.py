"""The swarm: identities, addresses, records, the directory of a run, libp2p streams and direct channels.

The only package that imports hivemind, and only in the modules that need it: `identity`, `address`, `records` and
`state` are light enough for a command line. `swarm.Swarm` is what a program composes.
"""
