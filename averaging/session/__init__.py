"""Sessions between two daemons, without a channel: numbers and acknowledgements, and what waits to be sent."""
