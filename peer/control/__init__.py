"""The control socket, by which training scripts and the command line reach the daemon of their machine."""
