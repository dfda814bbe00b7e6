"""Optimizer steps: mini-batches, their plans, and the updates."""
