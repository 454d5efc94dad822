"""Messages between the scripts of two peers: numbered, bounded, each delivered once, and lost only with a word."""
