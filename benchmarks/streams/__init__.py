"""The streams' benchmark: balance, speed and resuming."""
