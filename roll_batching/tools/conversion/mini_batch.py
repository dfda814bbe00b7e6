"""A mini-batch of another framework as our rows, gradient accumulation and data-parallel ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from roll_batching.tools.conversion.draft import Draft

_TRAIN = ("actor_train", "training_args")


def data_parallel_ranks(layout: Mapping[str, Any], devices: int) -> int:
    """Data-parallel ranks of `devices` devices in a layout with the sizes of Megatron; at least 1."""
    tp, pp = (layout.get(f"{name}_parallel_size") or 1 for name in ("tensor_model", "pipeline_model"))
    return max(1, devices // max(1, tp * pp * context_ranks(layout)))


def context_ranks(layout: Mapping[str, Any]) -> int:
    """Context-parallel ranks of a replica; 1 where each pack has its own size."""
    size = layout.get("context_parallel_size") or 1
    return 1 if size == "auto" else int(size)


def put_mini_batch(draft: Draft, size: tuple[Any, str], rows: tuple[Any, str], ranks: int, text: str = "") -> None:
    """Sets the sequences of a micro-batch and of an optimizer step; `size` and `rows` have a number and its key."""
    (total, total_key), (each, rows_key) = size, rows
    draft.put((*_TRAIN, "per_device_train_batch_size"), each, rows_key, text)
    if isinstance(total, int) and isinstance(each, int):
        steps, rest = divmod(total, each * ranks)
        text = f"{total} sequences per optimizer step are {each} x this x {ranks} data-parallel ranks"
        if rest or not steps:
            text = f"{total} sequences per step do not divide by {each} x {ranks} ranks: {max(1, steps)} is near"
        draft.put((*_TRAIN, "gradient_accumulation_steps"), max(1, steps), total_key, text)


# ---- counts


def optimizer_steps(count: Any, each: int, unit: str) -> tuple[Any, str]:
    """`count` of a framework's units as optimizer steps, of which each unit has `each`; and a text that says so.

    A value that is no whole number is returned as it is: the loader reports it.
    """
    if not isinstance(count, int) or isinstance(count, bool) or each == 1:
        return count, ""
    text = f"{count} x {each} optimizer steps of {unit}"
    return count * each, text if count else ""
