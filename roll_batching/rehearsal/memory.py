"""From recorded storages to what a device holds: by kind, by phase, at its peak."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from roll_batching.rehearsal.recorder import Block, Recorder
from roll_batching.rehearsal.task import PhasePeak

_LAYER = re.compile(r"\blayers\.\d+\b")


def kinds_of(recorder: Recorder, chunks: Sequence[Any], optimizer: Any, reference: Sequence[Any]) -> dict[int, str]:
    """What each storage that outlives a step is, by its index in `recorder.blocks`."""
    found: dict[int, str] = {}

    def mark(tensors: Iterable[Any], kind: str) -> None:
        for tensor in tensors:
            if isinstance(tensor, torch.Tensor) and (at := recorder.block_of(tensor)) is not None:
                found.setdefault(at, kind)

    for chunk in chunks:
        for buffer in (*getattr(chunk, "buffers", ()), *getattr(chunk, "expert_parallel_buffers", ())):
            mark([buffer.grad_data], "gradients")
            mark([buffer.param_data], "weights")
        mark(chunk.parameters(), "weights")
        mark((getattr(p, "main_grad", None) for p in chunk.parameters()), "gradients")
    for chunk in reference:
        mark(chunk.parameters(), "reference")
    if optimizer is not None:
        mark(_state_of(optimizer), "optimizer")
    return found


def _state_of(optimizer: Any) -> Iterable[Any]:
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        inner = part.optimizer
        for group in inner.param_groups:
            yield from group["params"]
        for state in inner.state.values():
            yield from state.values()


def kept_bytes(blocks: Sequence[Block], kinds: Mapping[int, str]) -> dict[str, float]:
    """Bytes of what outlives a step, by kind."""
    total: dict[str, float] = {}
    for at, kind in kinds.items():
        if blocks[at].freed is None:
            total[kind] = total.get(kind, 0) + blocks[at].size
    return total


def peaks_of(blocks: Sequence[Block], kinds: Mapping[int, str], phases: Sequence[str]) -> dict[str, PhasePeak]:
    """Where memory is highest in each phase.

    Args:
        blocks: all storages.
        kinds: of those that outlive a step; others are inputs, or activations.
        phases: the phase of every moment of the recorder's clock.
    """
    if not blocks:
        return {}
    sizes = np.array([block.size for block in blocks])
    born = np.array([block.born for block in blocks])
    end = len(phases)
    freed = np.array([end if block.freed is None else block.freed for block in blocks])
    change = np.zeros(end + 2, dtype=np.int64)
    np.add.at(change, born, sizes)
    np.add.at(change, freed + 1, -sizes)  # what is freed by an operation was there while it ran
    held = np.cumsum(change)[:end]
    found = {}
    names = np.array(phases)
    for phase in dict.fromkeys(phases):
        moments = np.flatnonzero(names == phase)
        at = int(moments[np.argmax(held[moments])])
        alive = np.flatnonzero((born <= at) & (freed >= at))
        found[phase] = _peak(phase, blocks, kinds, alive, int(held[at]))
    return found


def timeline_of(
    blocks: Sequence[Block], kinds: Mapping[int, str], phases: Sequence[str], first: int, points: int = 1200
) -> tuple[tuple[str, dict[str, float]], ...]:
    """What is held from the operation `first` on, by kind, at so many moments; a moment shows the most of its share."""
    end = len(phases)
    change: dict[str, Any] = {}
    for at, block in enumerate(blocks):
        moves = change.setdefault(_kind(at, block, kinds), np.zeros(end + 2, dtype=np.int64))
        moves[block.born] += block.size
        moves[(end if block.freed is None else block.freed) + 1] -= block.size
    held = {kind: np.cumsum(moves)[:end] for kind, moves in change.items()}
    total = np.sum(list(held.values()), axis=0)
    edges = np.linspace(first, end, min(points, end - first) + 1).astype(np.int64)
    found = []
    for low, high in zip(edges[:-1], edges[1:], strict=True):
        at = int(low + np.argmax(total[low : max(high, low + 1)]))
        found.append((phases[at], {kind: float(values[at]) for kind, values in held.items()}))
    return tuple(found)


def _kind(at: int, block: Block, kinds: Mapping[int, str]) -> str:
    return kinds.get(at) or ("inputs" if block.phase == "inputs" else "activations")


def _peak(phase: str, blocks: Sequence[Block], kinds: Mapping[int, str], alive: Any, total: int) -> PhasePeak:
    by_kind: dict[str, float] = {}
    holders: dict[str, float] = {}
    for at in map(int, alive):
        block = blocks[at]
        kind = _kind(at, block, kinds)
        by_kind[kind] = by_kind.get(kind, 0) + block.size
        if kind == "activations":
            words = holder(block)
            holders[words] = holders.get(words, 0) + block.size
    return PhasePeak(phase=phase, bytes=total, kinds=by_kind, holders=holders)


def holder(block: Block) -> str:
    """Module and tensor, the same for all layers."""
    return f"{_LAYER.sub('layers.*', block.owner) or block.phase} {block.words}"
