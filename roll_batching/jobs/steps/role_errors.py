"""Name the role of a model beside the policy, such as the critic, in its errors."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from roll_batching.errors import RollBatchingError


@contextlib.contextmanager
def prefix_errors(role: str) -> Iterator[None]:
    """Begin errors of this package with `role`: "the model's outputs" alone could be those of any model."""
    try:
        yield
    except RollBatchingError as error:
        raise type(error)(f"{role}: {error}") from error.__cause__
