"""The state space of Mamba-2 over packs, in chunks that end with their sequence.

A head keeps a state S [states, channels]. A token with input x, decay g <= 0, B and C [states] makes it
S' = exp(g) S + B x and reads C S'. Heads of a group share B and C. Source: Dao, Gu 2024, arXiv 2405.21060. The state
starts at zero in every sequence of a pack.
"""

from __future__ import annotations

import torch

from roll_batching.modeling.delta_rule import CHUNK, Chunks


def state_space(
    x: torch.Tensor, decay: torch.Tensor, B: torch.Tensor, C: torch.Tensor, chunks: Chunks
) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs, of the shape of x, and the states [sequences, groups, states, heads, channels].

    x [tokens, groups, heads of a group, channels], decay [tokens, groups, heads], B and C [tokens, groups, states]; all
    of one dtype, fp32 or fp64.
    """
    x, decay, B, C = (chunks.split(one) for one in (x, decay, B, C))
    heads, channels = x.shape[3:]
    decay = decay.cumsum(2)  # [chunks, groups, CHUNK, heads]
    by_head = decay.transpose(2, 3)
    upper = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=x.device).triu(1)
    between = (by_head.unsqueeze(-1) - by_head.unsqueeze(-2)).masked_fill(upper, float("-inf")).exp()
    inside = ((C @ B.transpose(2, 3)).unsqueeze(2) * between) @ x.transpose(2, 3)
    total = decay[:, :, -1:]
    kept = x * (total - decay).exp().unsqueeze(-1)
    terms = (B.transpose(2, 3) @ kept.flatten(3)).unflatten(-1, (heads, channels))
    before, after = _scan((total.exp() * chunks.continues).unsqueeze(-1), terms)
    before = before * chunks.continues.unsqueeze(-1)
    carried = (C @ before.flatten(3)).unflatten(-1, (heads, channels)) * decay.exp().unsqueeze(-1)
    out = chunks.join((inside.transpose(2, 3) + carried).flatten(3))
    return out.unflatten(-1, (heads, channels)), after[chunks.last]


def _scan(factors: torch.Tensor, terms: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """States before and after each chunk, for state' = factor * state + term."""
    states = [torch.zeros_like(terms[0])]
    for factor, term in zip(factors.unbind(), terms.unbind(), strict=True):
        states.append(torch.addcmul(term, factor, states[-1]))
    stacked = torch.stack(states)
    return stacked[:-1], stacked[1:]


def state_space_step(
    x: torch.Tensor, decay: torch.Tensor, B: torch.Tensor, C: torch.Tensor, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and state of one more token per row; shapes as in `state_space`, with rows in place of tokens."""
    state = decay.exp()[:, :, None, :, None] * state + B[..., None, None] * x.unsqueeze(2)
    return (C.unsqueeze(2) @ state.flatten(3)).view_as(x), state
