"""Machines and mathematics of averaging; the drivers are in `aio`."""
