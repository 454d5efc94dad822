"""What to average, with whom, and how: machines and mathematics. Drivers are in `aio`."""
