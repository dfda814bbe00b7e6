"""Scans of sequences in chunks, which the tests of all recurrent layers compare with their recurrence."""

from __future__ import annotations

from collections.abc import Callable

import torch

LENGTHS = (1, 64, 65, 130, 7, 200)
"""Around the size of a chunk, and several chunks."""

Results = tuple[torch.Tensor, torch.Tensor]
"""Outputs of all tokens, and the last state of each sequence."""


def bounds() -> list[int]:
    """Where sequences begin and end."""
    return [0, *torch.tensor(LENGTHS).cumsum(0).tolist()]


def recurrence(step: Callable[..., Results], inputs: list[torch.Tensor], *state_shape: int) -> Results:
    """`step(*inputs of a token, state)` token by token, each sequence from a state of zeros."""
    outputs, states = [], []
    for start, end in zip(bounds()[:-1], bounds()[1:], strict=True):
        state = torch.zeros(1, *state_shape, dtype=torch.float64)
        for token in range(start, end):
            out, state = step(*(one[token : token + 1] for one in inputs), state)
            outputs.append(out)
        states.append(state)
    return torch.cat(outputs), torch.cat(states)


def largest_gap(found: Results, expected: Results, inputs: list[torch.Tensor]) -> float:
    """Of outputs, states and the gradients of a weighted sum of both by `inputs`."""
    weights = [torch.randn(one.shape, dtype=one.dtype, generator=torch.Generator().manual_seed(4)) for one in expected]

    def gradients(results: Results) -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(sum((one * w).sum() for one, w in zip(results, weights, strict=True)), inputs)

    pairs = zip((*found, *gradients(found)), (*expected, *gradients(expected)), strict=True)
    return max(float((one - other).detach().abs().max()) for one, other in pairs)
