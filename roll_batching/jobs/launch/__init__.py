"""Launchers: they start one process per rank, on this machine or on Ray, and end all ranks together."""
