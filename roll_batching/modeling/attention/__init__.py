"""Attention backends, one file each (see `roll_batching.packing.attention_backend`), and the core that they share."""
