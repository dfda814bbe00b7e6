"""Recurrences over packs, in chunks that end with their sequence: the gated delta rule and Mamba-2's state space.

The state of a head starts at zero in every sequence of a pack. With decay g <= 0, a token turns the state S into S':

- gated delta rule, S [key channels, value channels], key k, value v, rate b: S' = exp(g) S + k (b (v - k exp(g) S)),
  and reads q S'. Yang, Kautz, Hatamizadeh 2024, arXiv 2412.06464; chunks as in Yang et al. 2024, arXiv 2406.06484;
- state space, S [states, channels], input x, B and C [states], which heads of a group share: S' = exp(g) S + B x, and
  reads C S'. Dao, Gu 2024, arXiv 2405.21060.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

CHUNK = 64
"""Tokens whose products are computed together."""


@dataclass(frozen=True)
class Chunks:
    """Chunks of a pack's sequences. Computed on the device, without waiting for it: their number is an upper bound."""

    tokens: torch.Tensor
    """[chunks * CHUNK] int64: the token of each place; the number of tokens for places without one."""
    place: torch.Tensor
    """[tokens] int64: the place of each token."""
    continues: torch.Tensor
    """[chunks, 1, 1, 1] bool: whether the chunk before belongs to the same sequence."""
    positions: torch.Tensor
    """[tokens] int64: position of each token in its sequence."""
    last: torch.Tensor
    """[sequences] int64: the last chunk of each sequence."""

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
        continues = (chunk > first[owner])[:, None, None, None]
        return cls(token.reshape(-1), place, continues, positions, after - 1)

    def split(self, x: torch.Tensor) -> torch.Tensor:
        """[tokens, heads, ...] -> [chunks, heads, CHUNK, ...]; zeros in places without a token."""
        padded = torch.cat([x, x.new_zeros(1, *x.shape[1:])])
        return padded[self.tokens].view(-1, CHUNK, *x.shape[1:]).transpose(1, 2)

    def join(self, x: torch.Tensor) -> torch.Tensor:
        """[chunks, heads, CHUNK, channels] -> [tokens, heads, channels]."""
        return x.transpose(1, 2).reshape(-1, x.shape[1], x.shape[3])[self.place]


def _scan(
    step: Callable[..., torch.Tensor], factors: torch.Tensor, terms: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """States before and after each chunk, for state' = step(term, factor, state)."""
    states = [torch.zeros_like(terms[0])]
    for factor, term in zip(factors.unbind(), terms.unbind(), strict=True):
        states.append(step(term, factor, states[-1]))
    stacked = torch.stack(states)
    return stacked[:-1], stacked[1:]


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
    decayed = torch.eye(key.shape[-1], dtype=key.dtype, device=key.device) * total.exp()
    before, after = _scan(torch.baddbmm, (decayed - keys_to_end @ read) * chunks.continues, keys_to_end @ added)
    before = before * chunks.continues
    out = (query * decay.exp()) @ before + ((query @ key.transpose(2, 3)) * between) @ (added - read @ before)
    return chunks.join(out), after[chunks.last]


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
    before, after = _scan(torch.addcmul, (total.exp() * chunks.continues).unsqueeze(-1), terms)
    before = before * chunks.continues.unsqueeze(-1)
    carried = (C @ before.flatten(3)).unflatten(-1, (heads, channels)) * decay.exp().unsqueeze(-1)
    out = chunks.join((inside.transpose(2, 3) + carried).flatten(3))
    return out.unflatten(-1, (heads, channels)), after[chunks.last]


def state_space_step(
    x: torch.Tensor, decay: torch.Tensor, B: torch.Tensor, C: torch.Tensor, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and state of one more token per row; shapes as in `state_space`, with rows in place of tokens."""
    state = decay.exp()[:, :, None, :, None] * state + B[..., None, None] * x.unsqueeze(2)
    return (C.unsqueeze(2) @ state.flatten(3)).view_as(x), state


def causal_convolution(
    x: torch.Tensor, weight: torch.Tensor, positions: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """SiLU of a convolution over each channel of x [tokens, channels] that stays inside sequences.

    weight [channels, 1, width], the last entry for the token itself; positions [tokens] in the sequences; bias
    [channels].
    """
    width = weight.shape[-1]
    padded, out = F.pad(x, (0, 0, width - 1, 0)), x * weight[:, 0, -1]
    for back in range(1, width):
        shifted = padded[width - 1 - back : width - 1 - back + len(x)]
        out = out + shifted * weight[:, 0, -1 - back] * (positions >= back).unsqueeze(-1)
    return F.silu(out if bias is None else out + bias)


def inputs_before(x: torch.Tensor, lengths: torch.Tensor, count: int) -> torch.Tensor:
    """The last `count` of the first `lengths` [rows] entries of x [rows, positions, channels]; zeros where fewer."""
    positions = lengths[:, None] - count + torch.arange(count, device=x.device)
    values = x.gather(1, positions.clamp(min=0).unsqueeze(-1).expand(-1, -1, x.shape[-1]))
    return values * (positions >= 0).unsqueeze(-1)


def unit_length(x: torch.Tensor) -> torch.Tensor:
    """Vectors [..., channels] of length 1 in the direction of x. The epsilon is that of fla's kernels."""
    inverse: torch.Tensor = torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)
    return x * inverse
