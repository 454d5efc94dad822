"""Who is out there and how to reach them: identity, addresses, records, the directory of a run, libp2p streams.

The only package that imports hivemind, and only in the modules that need it: `identity`, `address`, `records` and
`state` are light enough for a command line. `swarm.Swarm` is what a program composes.
"""
