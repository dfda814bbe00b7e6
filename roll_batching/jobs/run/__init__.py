"""What a run leaves in its folder: lock, checkpoints, metrics, saved models; and `JobContext`, shared by its phases."""
