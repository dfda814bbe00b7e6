"""Errors of a model beside the policy, such as the critic's, begin with the name of its role."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from roll_batching.errors import RollBatchingError


@contextlib.contextmanager
def errors_of_role(role: str) -> Iterator[None]:
    """Prefixes errors of this package with `role`: "the model's outputs" alone could be those of any model."""
    try:
        yield
    except RollBatchingError as error:
        raise type(error)(f"{role}: {error}") from error.__cause__
