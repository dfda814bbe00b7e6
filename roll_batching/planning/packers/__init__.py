"""Packers: functions that put items into bins, without regard to ranks, counts or costs.

A packer is a function of `Items` that returns the bins as lists of item indices. A packer that is not registered is
named by its dotted path, `package.module:function`:

    def tightest(items: Items) -> list[list[int]]:
        ...                       # each item in exactly one bin, no bin above items.capacity

The planner checks the bins, raises their number to a legal one and assigns them to ranks.
"""

from roll_batching.planning.packers.items import Items, Packer

__all__ = ["Items", "Packer"]
