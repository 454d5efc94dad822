"""One all-reduce round of a group: the machine (`machine.AllReduce`), its events and actions, its paxos."""
