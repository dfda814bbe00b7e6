"""Megatron's keys for a context-parallel size per pack, in files of the frameworks that pass them on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from roll_batching.tools.conversion.foreign_file import ForeignFile

LAYOUT = ("actor_train", "strategy_args", "strategy_config")
PACKING = ("actor_train", "sequence_packing_args")
_SWITCHES = ("dynamic_context_parallel", "hybrid_context_parallel")
_CAP, _SMALLEST, _SCHEDULER = (
    "max_seqlen_per_dp_cp_rank",
    "min_dynamic_context_parallel_size",
    "sequence_packing_scheduler",
)


@dataclass(frozen=True)
class ContextSizes:
    """A file's context-parallel sizes per pack."""

    size: int
    """Its `context_parallel_size`."""
    cap: int | None
    """Most tokens of a pack on one rank; None: not given."""
    cap_key: str


def convert_context_sizes(file: ForeignFile, key_of: Callable[[str], str]) -> ContextSizes | None:
    """Converts the keys to `context_parallel_size: auto`; None where the file has one size for all packs.

    `key_of` gives the file's key for one of Megatron's. The caller sets the cap, which frameworks count differently.
    """
    given = [key_of(name) for name in _SWITCHES if file.peek(key_of(name)) is True]
    scheduler = file.take(key_of(_SCHEDULER))
    if scheduler is not None:
        file.draft.leave_out(key_of(_SCHEDULER), "idle", "packs are planned here, whatever Megatron's scheduler")
    smallest, cap = file.take(key_of(_SMALLEST)), file.take(key_of(_CAP))
    if not given:
        for name, value in ((_SMALLEST, smallest), (_CAP, cap)):
            if value is not None:
                file.draft.leave_out(key_of(name), "idle", "it is read with dynamic context parallelism only")
        return None
    for key in given:
        file.take(key)
    if smallest not in (None, 1):
        file.draft.leave_out(key_of(_SMALLEST), "refused", "packs may have every size from 1 on")
    size = file.take(key_of("context_parallel_size"))
    if size not in (None, 1):
        text = "blocks form among all ranks that share the data; max_context_parallel_size bounds them"
        file.draft.leave_out(key_of("context_parallel_size"), "idle", text)
    text = "each pack has its own size, by predicted times"
    file.draft.put((*LAYOUT, "context_parallel_size"), "auto", given[0], text)
    return ContextSizes(size=size or 1, cap=cap, cap_key=key_of(_CAP))


def put_rank_cap(file: ForeignFile, sizes: ContextSizes, otherwise: int | None, key: str) -> None:
    """Sets the cap of one rank: the file's, else `otherwise` tokens, from its `key`, which has no effect beside it."""
    path, text = (*PACKING, "max_packed_sequence_length_train"), "the tokens of a pack on one rank"
    if sizes.cap is not None:
        file.draft.put(path, sizes.cap, sizes.cap_key, text)
        if otherwise is not None:
            file.draft.leave_out(key, "idle", f"{sizes.cap_key} is the cap")
    elif otherwise is not None:
        file.draft.put(path, otherwise, key, text)
