"""Rehearsal: one rank of a pretended cluster, at real sizes, without a GPU."""
