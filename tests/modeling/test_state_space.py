"""Chunks of Mamba-2's state space against its recurrence, token by token and sequence by sequence."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from roll_batching.modeling.recurrences import Chunks, causal_convolution, state_space, state_space_step
from tests.modeling.scans import LENGTHS, bounds, largest_gap, recurrence

GROUPS, HEADS, CHANNELS, STATES = 2, 3, 5, 4


@pytest.fixture
def inputs() -> list[torch.Tensor]:
    """Inputs, decays, B and C of 2 groups of 3 heads, fp64."""
    draw, tokens = torch.Generator().manual_seed(3), sum(LENGTHS)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(tokens, GROUPS, *shape, dtype=torch.float64, generator=draw)

    x, decay, B, C = normal(HEADS, CHANNELS), -normal(HEADS).abs() * 0.3, normal(STATES), normal(STATES)
    return [one.requires_grad_() for one in (x, decay, B, C)]


def test_chunks_equal_the_recurrence_and_every_sequence_starts_anew(
    inputs: list[torch.Tensor], report: Callable[[str], None]
) -> None:
    chunks = Chunks.of(torch.tensor(bounds(), dtype=torch.int32), sum(LENGTHS))
    expected = recurrence(state_space_step, inputs, GROUPS, STATES, HEADS, CHANNELS)
    gap = largest_gap(state_space(*inputs, chunks), expected, inputs)
    report(f"state space in chunks, fp64: outputs, states and gradients within {gap:.1e}")
    assert gap < 1e-12


def test_heads_of_a_group_share_B_and_C() -> None:
    """One token: the output is (C B) x, whatever the decay."""
    draw = torch.Generator().manual_seed(5)
    x, B, C = (torch.randn(1, GROUPS, *shape, generator=draw) for shape in ((HEADS, CHANNELS), (STATES,), (STATES,)))
    out, state = state_space(x, -torch.ones(1, GROUPS, HEADS), B, C, Chunks.of(torch.tensor([0, 1]), 1))
    torch.testing.assert_close(out, (C * B).sum(-1)[..., None, None] * x)
    torch.testing.assert_close(state[0, 1, :, 2], torch.outer(B[0, 1], x[0, 1, 2]))


def test_the_convolution_has_a_bias() -> None:
    draw = torch.Generator().manual_seed(5)
    x, weight, bias = (torch.randn(*shape, generator=draw) for shape in ((9, 5), (5, 1, 4), (5,)))
    expected = F.silu(F.conv1d(F.pad(x.t()[None], (3, 0)), weight, bias, groups=5)[0].t())
    torch.testing.assert_close(causal_convolution(x, weight, Chunks.of(torch.tensor([0, 9]), 9), bias), expected)
