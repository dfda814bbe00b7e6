"""Planning that fails on all ranks together: a user's packing algorithm may fail or hang on one rank alone.

Ranks with different plans are found where a plan is first used (`distribute`, and every pass).
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import TypeVar

from roll_batching.errors import PlanError, RollBatchingError
from roll_batching.strategy import MegatronInferStrategy

T = TypeVar("T")
_SHARE_OF_TIMEOUT = 0.8
"""Of `backend_timeout`: a rank whose planning hangs must report it before the others stop waiting."""


def agree_on_plan(strategy: MegatronInferStrategy, make_plan: Callable[[], T]) -> T:
    """The result of `make_plan`. Collective; raises RankError, the same on all ranks, when it fails or hangs on one."""
    with strategy.layout.team.agree("planning"):
        plan = _plan_with_timeout(strategy, make_plan)
    return plan


def agree_on_each(strategy: MegatronInferStrategy, plans: Iterator[T]) -> Iterator[T]:
    """Yields `plans`, of equal number on all ranks, each through `agree_on_plan`."""
    while (plan := agree_on_plan(strategy, lambda: next(plans, None))) is not None:
        yield plan


def _plan_with_timeout(strategy: MegatronInferStrategy, make_plan: Callable[[], T]) -> T:
    """The result of `make_plan`. Raises PlanError at the timeout, and abandons the thread that plans."""
    if strategy.config is None:
        return make_plan()
    planned: Future[T] = Future()

    def plan() -> None:
        try:
            planned.set_result(make_plan())
        except BaseException as error:  # of any kind: raised on the rank's own thread
            planned.set_exception(error)

    threading.Thread(target=plan, name="planning", daemon=True).start()
    minutes = strategy.config.backend_timeout
    try:
        return planned.result(_SHARE_OF_TIMEOUT * 60 * minutes)
    except TimeoutError:
        if planned.done():  # raised by the planning itself
            raise
        raise PlanError(
            f"the packing algorithm {strategy.batching.train.algorithm!r} has not returned after "
            f"{_SHARE_OF_TIMEOUT * minutes:.3g} minutes, {_SHARE_OF_TIMEOUT:.0%} of backend_timeout: fix it, or raise "
            "backend_timeout"
        ) from None


# ---- role errors


@contextlib.contextmanager
def prefix_errors(role: str) -> Iterator[None]:
    """Begin errors of this package with `role`: "the model's outputs" alone could be those of any model."""
    try:
        yield
    except RollBatchingError as error:
        raise type(error)(f"{role}: {error}") from error.__cause__
