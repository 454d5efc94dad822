"""The replicated state of a training: a snapshot, and the log of the means since; see `follower`."""
