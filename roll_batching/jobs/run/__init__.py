"""The run folder: lock, checkpoints, metrics, saved models; and `JobContext`, which the phases share."""
