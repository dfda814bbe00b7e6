"""Errors that name their cause: outputs that are not finite, and memory that ran out."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from roll_batching.distributed.groups import gather_objects
from roll_batching.errors import DeviceMemoryError, LossError, RollBatchingError
from roll_batching.modeling.head import gpt_of
from roll_batching.packing.batch import PackedBatch
from roll_batching.planning import Plan
from roll_batching.samples import SampleBatch
from roll_batching.samples.token_fields import token_place
from roll_batching.strategy.model_state import ModelState


def require_finite_outputs(state: ModelState, batch: SampleBatch) -> SampleBatch:
    """`batch`, the outputs of a pass, if all its values are finite. Collective.

    Raises `RankError` on all ranks, where a floating field holds NaN or an infinity on any.
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
        sample, token = token_place(batch, int(first[0]))
        raise LossError(f"{name} is {float(values[tuple(first)])} for sample {sample} at token {token}")


def describe_weights(state: ModelState) -> str:
    """Non-finite weights of all ranks, else the largest weight, as a sentence for an error. Collective."""
    per_rank = gather_objects(_non_finite_and_largest(state), state.layout.host_group)
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


# ---- memory that ran out


_KEYS = {
    "packed": ("sequence_packing_args.max_packed_sequence_length_train", "...max_packed_sequence_length_forward"),
    "dynamic": ("max_tokens_per_microbatch_in_train", "max_tokens_per_microbatch_in_infer"),
    "padded": ("training_args.per_device_train_batch_size", "infer_batch_size"),
}
"""The role's keys that bound micro-batches with and without a backward pass, by mode."""
_OTHER_CURES = (
    "recompute more (strategy_config.recompute_granularity: full), or spread the model over more devices "
    "(tensor_model_parallel_size, pipeline_model_parallel_size, use_distributed_optimizer). `roll-batching rehearse` "
    "finds without a GPU what fits"
)


class MicroBatchTracker:
    """The micro-batch and the direction (forward or backward) that this rank's schedule is computing."""

    def __init__(self, plan: Plan, count: int, *, train: bool) -> None:
        self._plan, self._count, self._train = plan, count, train
        self._started: dict[int, int] = {}
        """Micro-batches that each chunk has started, by id of the chunk."""
        self._where = "before its first micro-batch"

    def start_forward(self, pack: PackedBatch, chunk: Any) -> int:
        """Records the start of a forward pass; returns the number of the micro-batch on `chunk`, from 1."""
        number = self._started[id(chunk)] = self._started.get(id(chunk), 0) + 1
        self._record("forward", number, pack)
        return number

    def watch_backward(self, output: Any, pack: PackedBatch, number: int) -> None:
        """Records the start of the backward pass from `output`, by a hook on its gradient."""
        if isinstance(output, torch.Tensor) and output.requires_grad:
            output.register_hook(lambda _: self._record("backward", number, pack))

    @contextlib.contextmanager
    def explain_out_of_memory(self) -> Iterator[None]:
        """Around the schedule: turns an out-of-memory error into a `DeviceMemoryError` with the key to lower."""
        try:
            yield
        except torch.OutOfMemoryError as error:
            constraints = self._plan.constraints
            train, forward = _KEYS[constraints.mode]
            limit = constraints.rows if constraints.mode == "padded" else constraints.max_tokens
            key = train if self._train else f"{forward} (or {train}, where the passes share plans)"
            raise device_memory_error(error, self._where, f"Lower {key}, now {limit:,}; or {_OTHER_CURES}") from error

    def _record(self, direction: str, number: int, pack: PackedBatch) -> None:
        ids = ", ".join(map(str, pack.ids[:8])) + (", ..." if pack.samples > 8 else "")
        self._where = (
            f"in the {direction} pass of micro-batch {number} of {self._count} "
            f"({pack.layout.tokens:,} tokens{f', samples {ids}' if ids else ''})"
        )


@contextlib.contextmanager
def explain_optimizer_out_of_memory() -> Iterator[None]:
    """Around an optimizer step, whose memory does not depend on micro-batches."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        cure = (
            "Set strategy_config.use_distributed_optimizer: true, or spread the model over more devices "
            "(tensor_model_parallel_size, pipeline_model_parallel_size)"
        )
        raise device_memory_error(error, "in the optimizer's step", cure) from error


def device_memory_error(error: torch.OutOfMemoryError, where: str, cure: str) -> DeviceMemoryError:
    """The error to raise, with the first sentences of torch's message."""
    # From "If reserved" on torch advises on its allocator, which would hide our advice.
    message = str(error).split(" If reserved", maxsplit=1)[0].strip().rstrip(".")
    return DeviceMemoryError(f"rank {dist.get_rank()} ran out of device memory {where}: {message}. {cure}")
