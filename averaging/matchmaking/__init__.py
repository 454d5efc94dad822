"""Forming groups: the machine (`machine.Matchmaking`) and its parts."""
