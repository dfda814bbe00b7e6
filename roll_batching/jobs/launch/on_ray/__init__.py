"""Ranks of a job as Ray actors, on one machine or many."""
