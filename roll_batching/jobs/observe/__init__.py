"""Metrics of a run: files, trackers, progress, learning curve, closing tables."""
