"""Recurrences over packs, in chunks that end with their sequence: the gated delta rule and Mamba-2's state space.

The state of a head starts at zero in every sequence of a pack. Where samples share prefixes, the sequences are the runs
of the pack (`packing.pack_layout.Runs`), and a run starts from the state in which its parent ends. Context-parallel
ranks that divide the sequence hold pieces of runs, whose parents lie on other ranks. With decay g <= 0, a token turns
the state S into S':

- gated delta rule, S [key channels, value channels], key k, value v, rate b: S' = exp(g) S + k (b (v - k exp(g) S)),
  and reads q S'. Yang, Kautz, Hatamizadeh 2024, arXiv 2412.06464; chunks as in Yang et al. 2024, arXiv 2406.06484;
- state space, S [states, channels], input x, B and C [states], which heads of a group share: S' = exp(g) S + B x, and
  reads C S'. Dao, Gu 2024, arXiv 2405.21060.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region

CHUNK = 64
"""Tokens whose products are computed together."""


@dataclass(frozen=True)
class Borders:
    """Tokens on both sides of the start of each run or piece, as far as a convolution reaches."""

    after: torch.Tensor
    """[runs, reach] int64: the first tokens of each run; the number of tokens where it has fewer."""
    before: torch.Tensor
    """[runs, reach] int64: rows of the tokens before each run in its sample, the nearest first, among the tokens or,
    with an exchange, its `last_tokens`; the number of rows where the sample begins."""


@dataclass(frozen=True)
class Exchange:
    """How context-parallel ranks that hold pieces of runs hand over states, by one all-gather.

    A piece turns the state S before it into A S + b, so that maps (A, b) of all ranks, applied one after the other,
    give every state: a prefix scan (Blelloch 1990, CMU-CS-90-190) over pieces, whose depth is that of the tree.
    """

    sent: torch.Tensor
    """[maps] int64: pieces of this rank that others follow; as many on each rank, which repeats one to fill up."""
    tails: torch.Tensor
    """[maps, reach] int64: the last tokens of these pieces, the nearest to the end first, for convolutions."""
    levels: tuple[tuple[torch.Tensor, torch.Tensor], ...]
    """By depth, rows of the gathered maps, [pieces] int64, and their parents' places in the level before."""
    entries: torch.Tensor
    """[pieces of this rank] int64: the state before each, among zeros and the states behind the pieces of `levels`."""
    group: Any = None
    """The ranks that share the pack, which the layer sets."""

    def last_tokens(self, x: torch.Tensor) -> torch.Tensor:
        """Rows of x [tokens, channels] that `Borders.before` counts, of all ranks."""
        return self._gather(x[self.tails].flatten(0, 1))

    def states(
        self, maps: torch.Tensor, size: int, apply: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:
        """States before this rank's pieces, whose `maps` are [pieces, ..., A and b]; A has `size` channels."""
        A, b = self._gather(maps[self.sent]).tensor_split([size], -1)
        states = [torch.zeros_like(b[:1])]
        for rows, parents in self.levels:
            before = states[-1][parents]
            states.append(b[rows] if len(states) == 1 else apply(A[rows], before) + b[rows])
        return torch.cat(states)[self.entries]

    def _gather(self, x: torch.Tensor) -> torch.Tensor:
        """Rows of all ranks; their gradients are added."""
        gathered: torch.Tensor = gather_from_sequence_parallel_region(x.contiguous(), group=self.group)
        return gathered


@dataclass(frozen=True)
class Chunks:
    """Chunks of sequences, runs or pieces. Computed without reading their lengths: their number is an upper bound."""

    tokens: torch.Tensor
    """[chunks * CHUNK] int64: the token of each place; the number of tokens for places without one."""
    place: torch.Tensor
    """[tokens] int64: the place of each token."""
    continues: torch.Tensor
    """[chunks] bool: whether the chunk before belongs to the same sequence."""
    positions: torch.Tensor
    """[tokens] int64: position of each token in its sequence."""
    last: torch.Tensor
    """[sequences] int64: the last chunk of each sequence."""
    sequences: torch.Tensor
    """[chunks] int64: the sequence of each chunk."""
    starts: torch.Tensor
    """[sequences + 1] int64: first token of each sequence, and the end of the last."""
    parents: tuple[int, ...] | None = None
    """The chunk in whose last state each chunk starts, -1: none. None: the chunk before it, if it `continues`."""
    borders: Borders | None = None
    """Where the convolution crosses from run to run; None: nowhere."""
    levels: tuple[tuple[torch.Tensor, torch.Tensor, torch.Tensor], ...] | None = None
    """Of runs that have parents, by their depth: tokens [tokens of the level], starts [runs + 1] among these, and the
    places of the parents in the level before [runs]; int64."""
    exchange: Exchange | None = None
    """Where the states of pieces come from; None: this rank holds whole sequences."""

    @classmethod
    def of(cls, cu_seqlens: torch.Tensor, tokens: int) -> Chunks:
        """The chunks of sequences that begin at `cu_seqlens` [sequences + 1] and fill `tokens` tokens."""
        device, count = cu_seqlens.device, tokens // CHUNK + len(cu_seqlens) - 1
        starts, ends = cu_seqlens[:-1].long(), cu_seqlens[1:].long()
        chunks = (ends - starts + CHUNK - 1) // CHUNK
        after = chunks.cumsum(0)
        first = after - chunks
        every = torch.arange(tokens, device=device)
        sequence = torch.searchsorted(ends, every, right=True).clamp(max=len(ends) - 1)
        positions = every - starts[sequence]
        place = (first[sequence] + positions // CHUNK) * CHUNK + positions % CHUNK
        chunk = torch.arange(count, device=device)
        owner = torch.searchsorted(after, chunk, right=True).clamp(max=len(ends) - 1)
        token = starts[owner] + (chunk - first[owner]) * CHUNK
        token = token[:, None] + torch.arange(CHUNK, device=device)
        token = torch.where(token < ends[owner][:, None], token, tokens)
        return cls(token.reshape(-1), place, chunk > first[owner], positions, after - 1, owner, cu_seqlens.long())

    def split(self, x: torch.Tensor) -> torch.Tensor:
        """[tokens, heads, ...] -> [chunks, heads, CHUNK, ...]; zeros in places without a token."""
        padded = torch.cat([x, x.new_zeros(1, *x.shape[1:])])
        return padded[self.tokens].view(-1, CHUNK, *x.shape[1:]).transpose(1, 2)

    def join(self, x: torch.Tensor) -> torch.Tensor:
        """[chunks, heads, CHUNK, channels] -> [tokens, heads, channels]."""
        return x.transpose(1, 2).reshape(-1, x.shape[1], x.shape[3])[self.place]


def _scan(
    step: Callable[..., torch.Tensor], factors: torch.Tensor, terms: torch.Tensor, chunks: Chunks,
    *, unit: torch.Tensor, apply: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """States before each chunk and after each sequence, for state' = step(term, factor, state).

    Of pieces that follow those of other ranks, the scan finds the map (A, b) that `apply` joins with a state. It starts
    at `unit`, the map that changes nothing.
    """
    exchange, size, zeros = chunks.exchange, unit.shape[-1], torch.zeros_like(terms[0])
    if exchange is not None:
        zeros, terms = torch.cat([unit, zeros], -1), F.pad(terms, (size, 0))
    states = [zeros]
    if chunks.parents is not None:  # on the host: the states of several children are read from one parent
        for parent, factor, term in zip(chunks.parents, factors.unbind(), terms.unbind(), strict=True):
            states.append(step(term, factor, states[parent + 1]))
        before, after = torch.stack([states[parent + 1] for parent in chunks.parents]), torch.stack(states[1:])
    else:
        continues = chunks.continues.view(-1, *[1] * (terms.dim() - 1))
        for factor, term in zip((factors * continues).unbind(), terms.unbind(), strict=True):
            states.append(step(term, factor, states[-1]))
        stacked = torch.stack(states)
        before, after = stacked[:-1] * continues, stacked[1:]
    after = after[chunks.last]
    if exchange is None:
        return before, after
    entering = exchange.states(after, size, apply)
    of_chunks = ((before, entering[chunks.sequences]), (after, entering))
    before, after = (apply(maps[..., :size], state) + maps[..., size:] for maps, state in of_chunks)
    return before, after


def gated_delta_rule(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, decay: torch.Tensor, rate: torch.Tensor, chunks: Chunks
) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs [tokens, heads, value channels], and the states [sequences, heads, key channels, value channels].

    query, key [tokens, heads, key channels], value [tokens, heads, value channels], decay and rate [tokens, heads]; all
    of one dtype, fp32 or fp64. Queries are scaled, and queries and keys normalised, by the caller.
    """
    query, key, value = (chunks.split(x) for x in (query, key, value))
    decay, rate = (chunks.split(x).unsqueeze(-1) for x in (decay, rate))
    decay = decay.cumsum(2)
    upper = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=query.device).triu(1)
    between = (decay - decay.transpose(2, 3)).masked_fill(upper, float("-inf")).exp()
    # What tokens add to the state depends on the tokens of the chunk before them: a triangular system.
    system = rate * (key @ key.transpose(2, 3)) * between
    right = torch.cat([rate * value, rate * decay.exp() * key], -1)
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    added, read = solved.split([value.shape[-1], key.shape[-1]], -1)
    total = decay[:, :, -1:]
    keys_to_end = (key * (total - decay).exp()).transpose(2, 3)
    # The state after a chunk is linear in that before it.
    unit = torch.eye(key.shape[-1], dtype=key.dtype, device=key.device).expand(key.shape[1], -1, -1)
    factors = unit * total.exp() - keys_to_end @ read
    before, after = _scan(torch.baddbmm, factors, keys_to_end @ added, chunks, unit=unit, apply=torch.matmul)
    out = (query * decay.exp()) @ before + ((query @ key.transpose(2, 3)) * between) @ (added - read @ before)
    return chunks.join(out), after


def delta_step(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, decay: torch.Tensor, rate: torch.Tensor,
    state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Output [rows, heads, value channels] and state of one more token per row; shapes as in `gated_delta_rule`."""
    state = state * decay.exp()[..., None, None]
    added = rate.unsqueeze(-1) * (value - (key.unsqueeze(-2) @ state).squeeze(-2))
    state = state + key.unsqueeze(-1) * added.unsqueeze(-2)
    return (query.unsqueeze(-2) @ state).squeeze(-2), state


def state_space(
    x: torch.Tensor, decay: torch.Tensor, B: torch.Tensor, C: torch.Tensor, chunks: Chunks
) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs, of the shape of x, and the states [sequences, groups, states, heads, channels].

    x [tokens, groups, heads of a group, channels], decay [tokens, groups, heads], B and C [tokens, groups, states]; all
    of one dtype, fp32 or fp64.
    """
    x, decay, B, C = (chunks.split(values) for values in (x, decay, B, C))
    heads, channels = x.shape[3:]
    decay = decay.cumsum(2)  # [chunks, groups, CHUNK, heads]
    by_head = decay.transpose(2, 3)
    upper = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=x.device).triu(1)
    between = (by_head.unsqueeze(-1) - by_head.unsqueeze(-2)).masked_fill(upper, float("-inf")).exp()
    inside = ((C @ B.transpose(2, 3)).unsqueeze(2) * between) @ x.transpose(2, 3)
    total = decay[:, :, -1:]
    inputs_to_end = x * (total - decay).exp().unsqueeze(-1)
    terms = (B.transpose(2, 3) @ inputs_to_end.flatten(3)).unflatten(-1, (heads, channels))
    unit = torch.ones_like(terms[0, ..., :1])
    before, after = _scan(torch.addcmul, total.exp().unsqueeze(-1), terms, chunks, unit=unit, apply=torch.mul)
    carried = (C @ before.flatten(3)).unflatten(-1, (heads, channels)) * decay.exp().unsqueeze(-1)
    out = chunks.join((inside.transpose(2, 3) + carried).flatten(3))
    return out.unflatten(-1, (heads, channels)), after


def state_space_step(
    x: torch.Tensor, decay: torch.Tensor, B: torch.Tensor, C: torch.Tensor, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and state of one more token per row; shapes as in `state_space`, with rows in place of tokens."""
    state = decay.exp()[:, :, None, :, None] * state + B[..., None, None] * x.unsqueeze(2)
    return (C.unsqueeze(2) @ state.flatten(3)).view_as(x), state


def causal_convolution(
    x: torch.Tensor,
    weight: torch.Tensor,
    chunks: Chunks,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """SiLU of a convolution over each channel of x [tokens, channels] that stays inside samples.

    weight [channels, 1, width], the last entry for the token itself; bias [channels].
    """
    width = weight.shape[-1]
    padded, out = F.pad(x, (0, 0, width - 1, 0)), x * weight[:, 0, -1]
    for back in range(1, width):
        shifted = padded[width - 1 - back : width - 1 - back + len(x)]
        out = out + shifted * weight[:, 0, -1 - back] * (chunks.positions >= back).unsqueeze(-1)
    if (borders := chunks.borders) is not None:
        rows = x if chunks.exchange is None else chunks.exchange.last_tokens(x)
        terms = _across(rows, weight, borders.before) * (borders.after < len(x)).unsqueeze(-1)
        out = out.index_add(0, borders.after.clamp(max=len(x) - 1).flatten(), terms.flatten(0, 1))
    return F.silu(out if bias is None else out + bias)


def _across(rows: torch.Tensor, weight: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
    """Terms of the tokens `before` each border in the convolution of the tokens after it, [runs, reach, channels]."""
    runs, reach = before.shape
    inputs = rows.index_select(0, before.clamp(max=len(rows) - 1).flatten()).view(runs, reach, -1)
    inputs = inputs * (before < len(rows)).unsqueeze(-1)
    terms: list[torch.Tensor] = []
    for place in range(reach):  # token `back` before the one at `place` is number back - place before the border
        taps = range(place + 1, reach + 1)
        terms.append(torch.stack([inputs[:, back - place - 1] * weight[:, 0, -1 - back] for back in taps]).sum(0))
    return torch.stack(terms, 1)


def inputs_before(x: torch.Tensor, lengths: torch.Tensor, count: int) -> torch.Tensor:
    """The last `count` of the first `lengths` [rows] entries of x [rows, positions, channels]; zeros where fewer."""
    positions = lengths[:, None] - count + torch.arange(count, device=x.device)
    values = x.gather(1, positions.clamp(min=0).unsqueeze(-1).expand(-1, -1, x.shape[-1]))
    return values * (positions >= 0).unsqueeze(-1)


def unit_length(x: torch.Tensor) -> torch.Tensor:
    """Vectors [..., channels] of length 1 in the direction of x. The epsilon is that of fla's kernels."""
    inverse: torch.Tensor = torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)
    return x * inverse
