"""Supervised phases: the warm-up of a GRPO job, SFT and DPO."""
