"""Objective of an RL step: advantages, their state between steps, and the loss of a configuration."""
