"""Memory of a recorded run: persistent bytes, peak per phase, and memory over time, by kind."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from roll_batching.tools.rehearsal.recorder import Block, Recorder
from roll_batching.tools.rehearsal.task import CRITIC, PhasePeak

_LAYER = re.compile(r"\blayers\.\d+\b")


def kinds_of(
    recorder: Recorder, trained: Mapping[str, tuple[Sequence[Any], Any]], frozen: Mapping[str, Sequence[Any]]
) -> dict[int, str]:
    """Kind of each storage that outlives a step, by its index in `recorder.blocks`.

    `trained` has chunks and optimizer of the policy, under an empty text, and of the critic, each by the beginning of
    its kinds' names; `frozen` the chunks of the reference and of the teacher, by kind.
    """
    kinds: dict[int, str] = {}

    def mark(tensors: Iterable[Any], kind: str) -> None:
        for tensor in tensors:
            if isinstance(tensor, torch.Tensor) and (index := recorder.block_of(tensor)) is not None:
                kinds.setdefault(index, kind)

    for name, (chunks, _) in trained.items():
        for chunk in chunks:
            for buffer in (*getattr(chunk, "buffers", ()), *getattr(chunk, "expert_parallel_buffers", ())):
                mark([buffer.grad_data], f"{name}gradients")
                mark([buffer.param_data], f"{name}weights")
            mark(chunk.parameters(), f"{name}weights")
            mark((getattr(p, "main_grad", None) for p in chunk.parameters()), f"{name}gradients")
    for name, chunks in frozen.items():
        for chunk in chunks:
            mark(chunk.parameters(), name)
    for name, (_, optimizer) in trained.items():
        if optimizer is not None:
            mark(_state_of(optimizer), f"{name}optimizer")
    return kinds


def _state_of(optimizer: Any) -> Iterable[Any]:
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        inner = part.optimizer
        for group in inner.param_groups:
            yield from group["params"]
        for state in inner.state.values():
            yield from state.values()


def kept_bytes(blocks: Sequence[Block], kinds: Mapping[int, str]) -> dict[str, float]:
    """Bytes that outlive a step, by kind."""
    total: dict[str, float] = {}
    for at, kind in kinds.items():
        if blocks[at].freed is None:
            total[kind] = total.get(kind, 0) + blocks[at].size
    return total


def peaks_of(blocks: Sequence[Block], kinds: Mapping[int, str], phases: Sequence[str]) -> dict[str, PhasePeak]:
    """Peak memory of each phase.

    Args:
        blocks: all storages.
        kinds: kind of each storage that outlives a step, by index; the others are inputs or activations.
        phases: phase of every tick of the recorder's clock.
    """
    if not blocks:
        return {}
    sizes = np.array([block.size for block in blocks])
    born = np.array([block.born for block in blocks])
    end = len(phases)
    freed = np.array([end if block.freed is None else block.freed for block in blocks])
    change = np.zeros(end + 2, dtype=np.int64)
    np.add.at(change, born, sizes)
    np.add.at(change, freed + 1, -sizes)  # a storage freed by an operation is still held while the operation runs
    held = np.cumsum(change)[:end]
    peaks = {}
    names = np.array(phases)
    for phase in dict.fromkeys(phases):
        moments = np.flatnonzero(names == phase)
        at = int(moments[np.argmax(held[moments])])
        alive = np.flatnonzero((born <= at) & (freed >= at))
        peaks[phase] = _peak(phase, blocks, kinds, alive, int(held[at]))
    return peaks


def timeline_of(
    blocks: Sequence[Block], kinds: Mapping[int, str], phases: Sequence[str], first: int, points: int = 1200
) -> tuple[tuple[str, dict[str, float]], ...]:
    """Phase and bytes by kind from the operation `first` on: the peak of each of `points` intervals."""
    end = len(phases)
    change: dict[str, Any] = {}
    for at, block in enumerate(blocks):
        moves = change.setdefault(_kind(at, block, kinds), np.zeros(end + 2, dtype=np.int64))
        moves[block.born] += block.size
        moves[(end if block.freed is None else block.freed) + 1] -= block.size
    held = {kind: np.cumsum(moves)[:end] for kind, moves in change.items()}
    total = np.sum(list(held.values()), axis=0)
    edges = np.linspace(first, end, min(points, end - first) + 1).astype(np.int64)
    timeline = []
    for low, high in zip(edges[:-1], edges[1:], strict=True):
        at = int(low + np.argmax(total[low : max(high, low + 1)]))
        timeline.append((phases[at], {kind: float(values[at]) for kind, values in held.items()}))
    return tuple(timeline)


def _kind(at: int, block: Block, kinds: Mapping[int, str]) -> str:
    return kinds.get(at) or ("inputs" if block.phase.removeprefix(CRITIC) == "inputs" else "activations")


def _peak(phase: str, blocks: Sequence[Block], kinds: Mapping[int, str], alive: Any, total: int) -> PhasePeak:
    by_kind: dict[str, float] = {}
    holders: dict[str, float] = {}
    for at in map(int, alive):
        block = blocks[at]
        kind = _kind(at, block, kinds)
        by_kind[kind] = by_kind.get(kind, 0) + block.size
        if kind == "activations":
            name = holder(block)
            holders[name] = holders.get(name, 0) + block.size
    return PhasePeak(phase=phase, bytes=total, kinds=by_kind, holders=holders)


def holder(block: Block) -> str:
    """Module and tensor of a storage, with one name for all layers."""
    return f"{_LAYER.sub('layers.*', block.owner) or block.phase} {block.tensor}"
