"""What tests of bad calls share: a loss with any attributes, and every call's error with its seconds."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

SECONDS = 10.0
"""The longest a call may take until its error."""


class Loss:
    """A loss whose attributes are replaced."""

    needs, masks = {"log_probs"}, ("response_mask",)

    def __init__(self, **attributes: Any) -> None:
        self.__dict__.update(attributes)

    def metrics(self, tokens: Any) -> Any:
        return {}

    def token_loss(self, tokens: Any) -> Any:
        from roll_batching.losses import LossOutput

        return LossOutput(-tokens.mean(tokens.log_probs), self.metrics(tokens))


def errors_of(calls: Iterable[Callable[[Any], Any]], scene: Any) -> Iterator[tuple[str, str, float]]:
    """Of each call with `scene`: error class ("bare" where it is none of ours), message, seconds."""
    import torch.distributed as dist

    from roll_batching.errors import RollBatchingError

    for call in calls:
        dist.barrier()
        started = time.monotonic()
        try:
            call(scene)
            kind, message = "nothing", ""
        except RollBatchingError as error:
            kind, message = type(error).__name__, str(error)
        except Exception as error:
            kind, message = f"bare {type(error).__name__}", str(error)
        yield kind, message, time.monotonic() - started
