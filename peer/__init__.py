"""The program: daemon, control socket, client API and command line."""
