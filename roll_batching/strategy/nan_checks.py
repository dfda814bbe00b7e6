"""Checks for NaN and infinities in outputs and weights; errors name the sample, the token and the weights."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from roll_batching.errors import LossError, RollBatchingError
from roll_batching.modeling.head import gpt_of
from roll_batching.samples import SampleBatch
from roll_batching.strategy.model_state import ModelState


def require_finite_outputs(state: ModelState, batch: SampleBatch) -> SampleBatch:
    """`batch`, the outputs of a pass, if all its values are finite. Collective.

    Raises:
        RankError: on all ranks, where a floating field holds NaN or an infinity on any.
    """
    try:
        with state.layout.team.agree("the model's outputs"):
            _require_finite(batch)
    except RollBatchingError as error:
        raise type(error)(f"{error}. {describe_weights(state)}") from None
    return batch


def _require_finite(batch: SampleBatch) -> None:
    for name in batch.schema:
        values = batch[name]
        if not values.is_floating_point() or bool(torch.isfinite(values).all()):
            continue
        first = (~torch.isfinite(values)).nonzero()[0]
        position = int(first[0])
        sample = int(torch.searchsorted(batch.lengths.cumsum(0), position, right=True))
        token = position - int(batch.lengths[:sample].sum())
        raise LossError(f"{name} is {float(values[tuple(first)])} for sample {int(batch.ids[sample])} at token {token}")


def describe_weights(state: ModelState) -> str:
    """Non-finite weights of all ranks, else the largest weight, as a sentence for an error. Collective."""
    local = _non_finite_and_largest(state)
    per_rank: list[Any] = [None] * dist.get_world_size(state.layout.host_group)
    dist.all_gather_object(per_rank, local, group=state.layout.host_group)
    broken = [(name, count) for non_finite, _ in per_rank for name, count in non_finite]
    if broken:
        tensors = len({name for name, _ in broken})
        more = f", and those of {tensors - 1:,} more tensors" if tensors > 1 else ""
        return (
            f"{broken[0][1]:,} values of the weight {broken[0][0]} are not finite{more}: restart from an earlier "
            "checkpoint or model directory, or lower learning_rate if training produced them"
        )
    size, name = max(largest for _, largest in per_rank)
    return f"All weights are finite, the largest ({size:.3g}) in {name}: lower learning_rate if training produced it"


def _non_finite_and_largest(state: ModelState) -> tuple[list[tuple[str, int]], tuple[float, str]]:
    """([(name, number of non-finite values)], (largest absolute value, name)) of this rank's parameters."""
    # Reads the device for every parameter, which is why it runs after an error only.
    non_finite, largest = [], (0.0, "")
    for chunk in state.chunks:
        for name, parameter in gpt_of(chunk).named_parameters():
            value = parameter.detach()
            if count := int((~torch.isfinite(value)).sum()):
                non_finite.append((name, count))
            elif value.numel():
                largest = max(largest, (float(value.abs().max()), name))
    return non_finite, largest
