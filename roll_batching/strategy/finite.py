"""Outputs that are not finite: the sample and token where they begin, and the weights that they come from."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from roll_batching.errors import LossError, RollBatchingError
from roll_batching.modeling.head import gpt_of
from roll_batching.samples import SampleBatch
from roll_batching.strategy.state import ModelState


class ChecksOutputs:
    """What of a strategy looks at the outputs of its passes."""

    state: Any

    def _finite(self, batch: SampleBatch) -> SampleBatch:
        """`batch`, which a pass has made. Collective.

        Raises RankError on all ranks where a floating field holds NaN or an infinity.
        """
        try:
            with self.state.layout.team.agree("the model's outputs"):
                _check(batch)
        except RollBatchingError as error:
            raise type(error)(f"{error}. {describe_weights(self.state)}") from None
        return batch


def _check(batch: SampleBatch) -> None:
    for name in batch.schema:
        values = batch[name]
        if not values.is_floating_point() or bool(torch.isfinite(values).all()):
            continue
        row = int((~torch.isfinite(values)).nonzero()[0, 0])
        sample = int(torch.searchsorted(batch.lengths.cumsum(0), row, right=True))
        token = row - int(batch.lengths[:sample].sum())
        raise LossError(f"{name} is {float(values[row])} for sample {int(batch.ids[sample])} at token {token}")


def describe_weights(state: ModelState) -> str:
    """Which weights are not finite, else which is the largest, over all ranks. Collective."""
    found = _look(state)
    everyone: list[Any] = [None] * dist.get_world_size(state.layout.host_group)
    dist.all_gather_object(everyone, found, group=state.layout.host_group)
    broken = [(name, count) for one, _ in everyone for name, count in one]
    if broken:
        tensors = len({name for name, _ in broken})
        more = f", and those of {tensors - 1:,} more tensors" if tensors > 1 else ""
        return (
            f"{broken[0][1]:,} of its weights {broken[0][0]} are not finite{more}: go on from a whole checkpoint or "
            "model directory, or lower learning_rate where training made them"
        )
    size, name = max(largest for _, largest in everyone)
    return f"All its weights are finite, the largest ({size:.3g}) in {name}: lower learning_rate where training made it"


def _look(state: ModelState) -> tuple[list[tuple[str, int]], tuple[float, str]]:
    """This rank's tensors with values that are not finite, each with their number; and its largest absolute value."""
    broken, largest = [], (0.0, "")
    for chunk in state.chunks:
        for name, parameter in gpt_of(chunk).named_parameters():
            value = parameter.detach()
            if missing := int((~torch.isfinite(value)).sum()):
                broken.append((name, missing))
            elif value.numel():
                largest = max(largest, (float(value.abs().max()), name))
    return broken, largest
