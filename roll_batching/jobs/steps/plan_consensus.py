"""Plans that all ranks agree on, one after the other, and errors that name a model's role."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TypeVar

from roll_batching.errors import RollBatchingError
from roll_batching.strategy import MegatronInferStrategy
from roll_batching.strategy.roles import agree_on_plan

T = TypeVar("T")


def agree_on_each(strategy: MegatronInferStrategy, plans: Iterator[T]) -> Iterator[T]:
    """Yields `plans`, of equal number on all ranks, each through `agree_on_plan`."""
    while (plan := agree_on_plan(strategy, lambda: next(plans, None))) is not None:
        yield plan


@contextlib.contextmanager
def prefix_errors(role: str) -> Iterator[None]:
    """Begin errors of this package with `role`: "the model's outputs" alone could be those of any model."""
    try:
        yield
    except RollBatchingError as error:
        raise type(error)(f"{role}: {error}") from error.__cause__
