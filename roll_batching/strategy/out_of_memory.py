"""A device that runs out of memory inside a step: what it was computing, and which key to lower."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from roll_batching.errors import DeviceMemoryError
from roll_batching.packing.batch import PackedBatch
from roll_batching.planning import Plan

_KEYS = {
    "packed": ("sequence_packing_args.max_packed_sequence_length_train", "...max_packed_sequence_length_forward"),
    "dynamic": ("max_tokens_per_microbatch_in_train", "max_tokens_per_microbatch_in_infer"),
    "padded": ("training_args.per_device_train_batch_size", "infer_batch_size"),
}
"""By mode, the role's keys that bound micro-batches: with a backward pass, and without."""
_OTHERWISE = (
    "recompute more (strategy_config.recompute_granularity: full), or spread the model over more devices "
    "(tensor_model_parallel_size, pipeline_model_parallel_size, use_distributed_optimizer). `roll-batching rehearse` "
    "finds without a GPU what fits"
)


class InFlight:
    """What a rank's schedule is computing: the micro-batch, and in which direction."""

    def __init__(self, plan: Plan, *, train: bool) -> None:
        self._plan, self._train = plan, train
        self._begun: dict[int, int] = {}
        self._words = "before its first micro-batch"

    def forward(self, pack: PackedBatch, chunk: Any) -> int:
        """A forward pass begins; returns which micro-batch of `chunk` it is, from 1."""
        number = self._begun[id(chunk)] = self._begun.get(id(chunk), 0) + 1
        self._at("forward", number, pack)
        return number

    def watch(self, output: Any, pack: PackedBatch, number: int) -> None:
        """From now on the beginning of the backward pass that starts at `output` is heard of."""
        if isinstance(output, torch.Tensor) and output.requires_grad:
            output.register_hook(lambda _: self._at("backward", number, pack))

    @contextlib.contextmanager
    def named(self) -> Iterator[None]:
        """Around the schedule: running out of memory becomes a `DeviceMemoryError` that says what to lower."""
        try:
            yield
        except torch.OutOfMemoryError as error:
            constraints = self._plan.constraints
            train, forward = _KEYS[constraints.mode]
            now = constraints.rows if constraints.mode == "padded" else constraints.max_tokens
            key = train if self._train else f"{forward} (or {train}, where the passes share plans)"
            raise out_of_memory(error, self._words, f"Lower {key}, now {now:,}; or {_OTHERWISE}") from error

    def _at(self, direction: str, number: int, pack: PackedBatch) -> None:
        ids = ", ".join(map(str, pack.ids[:8])) + (", ..." if pack.samples > 8 else "")
        self._words = (
            f"in the {direction} pass of micro-batch {number} of {self._plan.num_micro_batches} "
            f"({pack.layout.tokens:,} tokens{f', samples {ids}' if ids else ''})"
        )


@contextlib.contextmanager
def named_in_update() -> Iterator[None]:
    """Around an optimizer's step, whose memory does not depend on micro-batches."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        cure = (
            "Set strategy_config.use_distributed_optimizer: true, or spread the model over more devices "
            "(tensor_model_parallel_size, pipeline_model_parallel_size)"
        )
        raise out_of_memory(error, "in the optimizer's step", cure) from error


def out_of_memory(error: torch.OutOfMemoryError, where: str, cure: str) -> DeviceMemoryError:
    """The error to raise, with the first sentences of what torch says."""
    said = str(error).split(" If reserved", maxsplit=1)[0].strip().rstrip(".")
    return DeviceMemoryError(f"rank {dist.get_rank()} ran out of device memory {where}: {said}. {cure}")
