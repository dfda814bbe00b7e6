"""A run: what its phases share, its checkpoints, its saved models, its figures."""
