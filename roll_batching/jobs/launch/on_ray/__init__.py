"""A job's ranks as actors of Ray, on one machine or many: what torchrun does, where Ray runs already."""
