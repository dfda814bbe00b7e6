"""Plans that all ranks have, or none: a packer of anybody's own may fail on one rank alone.

Ranks that got different plans hear of it where a plan is first used (`distribute`, and every pass).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeVar

from roll_batching.strategy import MegatronInferStrategy

T = TypeVar("T")


def agreed(strategy: MegatronInferStrategy, make: Callable[[], T]) -> T:
    """What `make` plans. Collective; raises RankError, the same on all ranks, when it fails on any."""
    with strategy.layout.team.agree("planning"):
        made = make()
    return made


def agreed_one_by_one(strategy: MegatronInferStrategy, plans: Iterator[T]) -> Iterator[T]:
    """`plans`, as many on every rank, each `agreed` as it is asked for."""
    while (plan := agreed(strategy, lambda: next(plans, None))) is not None:
        yield plan
