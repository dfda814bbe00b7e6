"""What recurrent layers need to know of a pack: the runs that a rank computes, and where their states begin.

Under context parallelism, ranks divide the heads, and each computes all tokens of its heads, or they divide the
sequence as attention does, and each computes its tokens of all heads and hands over states (`recurrences.Exchange`).
What ranks send for heads grows with the tokens, and for states with the runs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from roll_batching.modeling.layers import recurrent_layers
from roll_batching.modeling.recurrences import Borders, Chunks, Exchange
from roll_batching.packing.pack_layout import IntArray, PackLayout, Runs
from roll_batching.packing.prefetch import map_tensors
from roll_batching.planning.recurrent_exchange import Divided, RecurrentExchange
from roll_batching.settings.model_cost import config_exchange


@dataclass(frozen=True)
class RecurrentPacks:
    """Prepares packs for the recurrent layers of a model."""

    exchange: RecurrentExchange
    reach: int
    """Tokens before each that its convolutions read."""

    def chunks(self, layout: PackLayout, cp_rank: int, device: torch.device) -> Chunks:
        """Chunks of the pack for all layers of one rank."""
        if layout.cp_size > 1 and self.exchange.divide != "heads":
            pieces = _Pieces.of(layout)
            if not self.exchange.divides_heads(layout.tokens, pieces.most_maps, layout.cp_size):
                return pieces_of_rank(pieces, layout, cp_rank, self.reach, device)
        return whole_pack(layout, self.reach, device)


def recurrent_packs(config: Any, divide: Divided = "auto") -> RecurrentPacks | None:
    """That of a model with this TransformerConfig; None without recurrent layers."""
    kind = recurrent_layers(config)
    if kind is None:
        return None
    kernel = config.linear_conv_kernel_dim if kind == "gated_delta_net" else config.mamba_conv_kernel_dim
    return RecurrentPacks(config_exchange(config, divide)["recurrent"], kernel - 1)


class _Pieces(NamedTuple):
    """Runs of a pack, cut where its tokens change from rank to rank; all arrays are [pieces], in the pack's order."""

    lengths: IntArray
    parents: IntArray
    """The piece before each in its sample, -1: none."""
    owner: IntArray
    """The rank that holds it."""
    level: IntArray
    """Its depth among the pieces that others follow; -1: none follows it."""
    row: IntArray
    """Its row among the gathered maps, if others follow."""
    most_maps: int
    """Rows of each rank."""

    @classmethod
    def of(cls, layout: PackLayout) -> _Pieces:
        """The pieces of a whole pack; those of filler have no parents."""
        runs, size = layout.runs, layout.cp_size
        starts, part = layout.cu_seqlens[:-1], layout.segments // (2 * size)
        # Two neighbouring chunks of a segment lie on the last rank.
        cuts = [starts + number * part for number in range(2 * size) if number != size]
        edges = np.unique(np.concatenate([runs.starts, *cuts]))
        run = np.searchsorted(runs.starts, edges[:-1], side="right") - 1
        segment = np.searchsorted(layout.cu_seqlens, edges[:-1], side="right") - 1
        last = np.searchsorted(run, np.arange(len(runs.lengths)), side="right") - 1
        parents = np.arange(-1, len(run) - 1)
        first = np.flatnonzero(np.diff(run, prepend=-1))
        parents[first] = np.where(runs.parents < 0, -1, last[runs.parents])
        parents[segment >= layout.samples] = -1
        number = (edges[:-1] - starts[segment]) // part[segment]
        owner = np.minimum(number, 2 * size - 1 - number)
        level = np.full(len(run), -1)
        for piece in np.unique(parents[parents >= 0]).tolist():
            level[piece] = level[parents[piece]] + 1 if parents[piece] >= 0 else 0
        counts = (level >= 0) & (owner == np.arange(size)[:, None])
        most = max(1, int(counts.sum(1).max()))  # one, of no use, in a pack of filler
        row = owner * most + (counts.cumsum(1) - 1)[owner, np.arange(len(run))]
        return cls(np.diff(edges), parents, owner, level, row, most)


def pieces_of_rank(pieces: _Pieces, layout: PackLayout, rank: int, reach: int, device: torch.device) -> Chunks:
    """The chunks of the pieces that a rank holds."""
    mine = np.flatnonzero(pieces.owner == rank)
    starts = np.concatenate([[0], np.cumsum(pieces.lengths[mine])])
    local = np.flatnonzero(pieces.level[mine] >= 0)
    sent = np.concatenate([local, np.zeros(pieces.most_maps - len(local), np.int64)])
    # Places of states among zeros and those of one level after the other; the last entry: of a piece without parent.
    place, levels, first = np.zeros(len(pieces.level) + 1, np.int64), [], 0
    for depth in range(int(pieces.level.max()) + 1):
        members = np.flatnonzero(pieces.level == depth)
        levels.append((pieces.row[members], place[pieces.parents[members]] - first))
        first = 1 if depth == 0 else first + len(levels[-2][0])
        place[members] = first + np.arange(len(members))
    rows = layout.cp_size * pieces.most_maps * reach
    before = _tokens_before(pieces, mine, reach, lambda piece, back: pieces.row[piece] * reach + back, rows)
    tails = np.maximum(starts[sent + 1][:, None] - 1 - np.arange(reach), 0)
    exchange = Exchange(
        sent=_to(device, sent),
        tails=_to(device, tails),
        levels=tuple((_to(device, maps), _to(device, parents)) for maps, parents in levels),
        entries=_to(device, place[pieces.parents[mine]]),
    )
    chunks, parents = _chunks_of(starts, device)
    return dataclasses.replace(
        chunks, parents=tuple(parents.tolist()), borders=_borders(starts, before, device), exchange=exchange
    )


def whole_pack(layout: PackLayout, reach: int, device: torch.device) -> Chunks:
    """The chunks of all runs of a pack."""
    runs = layout.runs
    starts = runs.starts
    chunks, parents = _chunks_of(starts, device)
    if layout.prefix_lengths is None:
        return chunks
    last = chunks.last.numpy(force=True)
    first = np.concatenate([[0], last[:-1] + 1])
    parents[first] = np.where(runs.parents < 0, -1, last[runs.parents])
    every = np.arange(len(runs.lengths))
    before = _tokens_before(runs, every, reach, lambda run, back: starts[run + 1] - 1 - back, layout.tokens)
    levels = tuple((_to(device, tokens), _to(device, begins), _to(device, of)) for tokens, begins, of in _levels(runs))
    borders = _borders(starts, before, device)
    return dataclasses.replace(chunks, parents=tuple(parents.tolist()), borders=borders, levels=levels)


def _levels(runs: Runs) -> Iterator[tuple[IntArray, IntArray, IntArray]]:
    """`Chunks.levels` of a tree."""
    depth, place = np.zeros(len(runs.lengths), np.int64), np.zeros(len(runs.lengths), np.int64)
    for run in np.flatnonzero(runs.parents >= 0).tolist():
        depth[run] = depth[runs.parents[run]] + 1
    run_of_token = np.repeat(np.arange(len(runs.lengths)), runs.lengths)
    for level in range(int(depth.max()) + 1):
        members = np.flatnonzero(depth == level)
        place[members] = np.arange(len(members))
        starts = np.concatenate([[0], np.cumsum(runs.lengths[members])])
        yield np.flatnonzero(depth[run_of_token] == level), starts, place[runs.parents[members]]


def _chunks_of(starts: IntArray, device: torch.device) -> tuple[Chunks, IntArray]:
    """The chunks of sequences that begin at `starts`, and the chunk before each in its sequence, -1: none."""
    chunks = Chunks.of(torch.from_numpy(starts), int(starts[-1]))
    parents = np.where(chunks.continues.numpy(), np.arange(len(chunks.continues)) - 1, -1)
    return map_tensors(chunks, lambda tensor: tensor.to(device)), parents


def _to(device: torch.device, array: IntArray) -> torch.Tensor:
    return torch.from_numpy(array).to(device)


def _borders(starts: IntArray, before: IntArray, device: torch.device) -> Borders:
    after = starts[:-1, None] + np.arange(before.shape[1])
    after = np.where(after < starts[1:, None], after, starts[-1])
    return Borders(_to(device, after), _to(device, before))


def _tokens_before(
    runs: Runs | _Pieces, members: IntArray, reach: int, row: Callable[[IntArray, IntArray], IntArray], none: int
) -> IntArray:
    """Rows of the tokens before some runs in their samples, the nearest first, [members, reach]; `none`: no token.

    `row(run, back)` is that of the token `back` before the last of a run.
    """
    run, back, rows = runs.parents[members], np.zeros(len(members), np.int64), []
    for _ in range(reach):  # a parent may be shorter than the reach
        rows.append(np.where(run < 0, none, row(run, back)))
        ends = back + 1 >= runs.lengths[run]
        run, back = np.where(ends & (run >= 0), runs.parents[run], run), np.where(ends, 0, back + 1)
    return np.stack(rows, 1)
