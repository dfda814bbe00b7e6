"""Chunks of the gated delta rule against its recurrence, token by token and sequence by sequence."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from roll_batching.modeling.recurrences import (
    Chunks,
    causal_convolution,
    delta_step,
    gated_delta_rule,
    inputs_before,
    unit_length,
)
from tests.modeling.scans import LENGTHS, bounds, largest_gap, recurrence


@pytest.fixture
def inputs() -> list[torch.Tensor]:
    """Queries, keys, values, decays and rates of 3 heads, fp64."""
    draw, tokens = torch.Generator().manual_seed(3), sum(LENGTHS)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=draw)

    query, key, value = unit_length(normal(tokens, 3, 8)), unit_length(normal(tokens, 3, 8)), normal(tokens, 3, 6)
    decay, rate = -normal(tokens, 3).abs() * 0.3, normal(tokens, 3).sigmoid()
    return [x.requires_grad_() for x in (query, key, value, decay, rate)]


def test_chunks_equal_the_recurrence_and_every_sequence_starts_anew(
    inputs: list[torch.Tensor], report: Callable[[str], None]
) -> None:
    chunks = Chunks.of(torch.tensor(bounds(), dtype=torch.int32), sum(LENGTHS))
    expected = recurrence(delta_step, inputs, 3, 8, 6)
    gap = largest_gap(gated_delta_rule(*inputs, chunks), expected, inputs)
    report(f"gated delta rule in chunks, fp64: outputs, states and gradients within {gap:.1e}")
    assert gap < 1e-12


def test_the_convolution_stays_inside_sequences() -> None:
    draw = torch.Generator().manual_seed(5)
    x, weight = torch.randn(sum(LENGTHS), 5, generator=draw), torch.randn(5, 1, 4, generator=draw)
    chunks = Chunks.of(torch.tensor(bounds()), sum(LENGTHS))
    rows = [F.silu(F.conv1d(F.pad(row.t()[None], (3, 0)), weight, groups=5)[0].t()) for row in x.split(list(LENGTHS))]
    torch.testing.assert_close(causal_convolution(x, weight, chunks), torch.cat(rows))


def test_inputs_before_are_zero_where_a_row_is_shorter() -> None:
    x = torch.arange(1.0, 11.0).view(2, 5, 1)
    assert inputs_before(x, torch.tensor([2, 5]), 3)[..., 0].tolist() == [[0.0, 1.0, 2.0], [8.0, 9.0, 10.0]]
