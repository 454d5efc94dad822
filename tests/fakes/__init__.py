"""Stand-ins for the world, held to the same contract tests as the real things."""
