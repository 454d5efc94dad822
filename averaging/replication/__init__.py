"""The replicated state of a training: snapshots, and the log of the means since. See `follower`, `client`, `server`."""
