"""What a run leaves behind and shows: metrics, progress, the learning curve, the closing table."""
