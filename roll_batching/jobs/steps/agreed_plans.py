"""Plans that all ranks have, or none: a packer of anybody's own may fail on one rank alone.

Ranks that got different plans hear of it where a plan is first used (`distribute`, and every pass).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import TypeVar

from roll_batching.errors import PlanError
from roll_batching.strategy import MegatronInferStrategy

T = TypeVar("T")
_SHARE = 0.8
"""Of the time that ranks wait for each other: one that plans for longer must still be heard."""


def agreed(strategy: MegatronInferStrategy, make: Callable[[], T]) -> T:
    """What `make` plans. Collective; raises RankError, the same on all ranks, when it fails or never ends on any."""
    with strategy.layout.team.agree("planning"):
        made = _in_time(strategy, make)
    return made


def _in_time(strategy: MegatronInferStrategy, make: Callable[[], T]) -> T:
    """What `make` returns. Raises PlanError when it takes too long; its thread is left behind then."""
    if strategy.config is None:
        return make()
    planned: Future[T] = Future()

    def plan() -> None:
        try:
            planned.set_result(make())
        except BaseException as error:  # whatever it is, the rank that waits raises it
            planned.set_exception(error)

    threading.Thread(target=plan, name="planning", daemon=True).start()
    minutes = strategy.config.backend_timeout
    try:
        return planned.result(_SHARE * 60 * minutes)
    except TimeoutError:
        if planned.done():  # its own
            raise
        raise PlanError(
            f"the packing algorithm {strategy.batching.train.algorithm!r} has not returned after "
            f"{_SHARE * minutes:.3g} minutes, {_SHARE:.0%} of backend_timeout: mend it, or raise backend_timeout"
        ) from None


def agreed_one_by_one(strategy: MegatronInferStrategy, plans: Iterator[T]) -> Iterator[T]:
    """`plans`, as many on every rank, each `agreed` as it is asked for."""
    while (plan := agreed(strategy, lambda: next(plans, None))) is not None:
        yield plan
