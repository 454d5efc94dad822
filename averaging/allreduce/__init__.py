"""One all-reduce round of a group: the machine (`machine.AllReduce`), what it is told and asks for, its paxos."""
