"""Packers: which items share a bin. They know nothing of ranks, counts or costs.

A packer is a function of `Items` that returns the bins as lists of item indices; anybody's own is named by its dotted
path, `package.module:function`:

    def tightest(items: Items) -> list[list[int]]:
        ...                       # every item in exactly one bin, no bin above items.capacity

What it returns is checked. The planner counts the bins, raises their number to a legal one and gives them to ranks.
"""

from roll_batching.planning.packers.items import Items, Packer

__all__ = ["Items", "Packer"]
