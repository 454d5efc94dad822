"""Asyncio drivers of the machines in `equipoise.averaging`."""
