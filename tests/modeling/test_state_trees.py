"""States of a prefix forest: runs between branch points, against the recurrence token by token along each sample."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from roll_batching.modeling.recurrences import (
    Chunks,
    causal_convolution,
    delta_step,
    gated_delta_rule,
    state_space,
    state_space_step,
    unit_length,
)
from roll_batching.modeling.recurrent_packs import RecurrentPacks, whole_pack
from roll_batching.packing.pack_layout import PackLayout
from roll_batching.planning.recurrent_exchange import Divided, RecurrentExchange

CPU = torch.device("cpu")
FORESTS: dict[str, tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]] = {
    "three levels": ((150, 40, 33, 9, 70, 12), (0, 100, 120, 140, 30, 0), ()),
    "branches at ends and starts of chunks": ((200, 64, 65, 1, 63), (0, 64, 128, 129, 1), ()),
    "children of one token": ((40, 1, 1, 1, 20), (0, 39, 39, 12, 12), ()),
    "parents shorter than the convolution": ((1, 2, 5, 1, 3, 9), (0, 1, 2, 3, 1, 2), ()),
    "many children of one token": ((70, 5, 5, 5, 5, 5), (0, 69, 69, 69, 69, 69), ()),
    "slot padding, trees apart and tail filler": ((30, 7, 20, 3, 8), (0, 22, 0, 17, 18), (32, 8, 24, 4, 8, 64, 6)),
}
"""Tokens that each sample computes, its shared prefix, and segments where they are longer or more."""


def layout_of(forest: str) -> PackLayout:
    lengths, prefixes, segments = (np.array(values, np.int64) for values in FORESTS[forest])
    return PackLayout(
        lengths=lengths, segments=segments if len(segments) else lengths, cp_size=1, prefix_lengths=prefixes
    )


def previous_tokens(layout: PackLayout) -> list[int]:
    """The token before each token in its sample, -1 for the first; from the paths of the samples alone."""
    previous = [token - 1 if position else -1 for token, position in enumerate(layout.position_ids.tolist())]
    starts = layout.unshared.cu_seqlens
    for sample in range(layout.samples):
        path = layout.computed_tokens[starts[sample] : starts[sample + 1]].tolist()
        for before, token in zip(path, path[1:], strict=False):
            previous[token] = before
    return previous


def chunks_of(layout: PackLayout, reach: int = 3) -> Chunks:
    return whole_pack(layout, reach, CPU)


def along_samples(
    step: Callable[..., Any], inputs: list[torch.Tensor], previous: list[int], *state_shape: int
) -> torch.Tensor:
    """Outputs of `step(*inputs of a token, state behind the token before it in its sample)`."""
    outputs, states = [], [torch.zeros(1, *state_shape, dtype=torch.float64)]
    for token, before in enumerate(previous):
        out, state = step(*(values[token : token + 1] for values in inputs), states[before + 1])
        outputs.append(out)
        states.append(state)
    return torch.cat(outputs)


def largest_gap(found: torch.Tensor, expected: torch.Tensor, inputs: list[torch.Tensor]) -> float:
    """Of the outputs, and of the gradients of their weighted sum, whose weights differ from token to token."""
    weights = torch.randn(found.shape, dtype=found.dtype, generator=torch.Generator().manual_seed(4)).to(found.device)
    gradients = (torch.autograd.grad((values * weights).sum(), inputs) for values in (found, expected))
    pairs = [(found, expected), *zip(*gradients, strict=True)]
    return max(float((one - other).detach().abs().max()) for one, other in pairs)


def random_inputs(tokens: int, kind: str, channels: int = 8) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(3)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(tokens, *shape, dtype=torch.float64, generator=draw)

    if kind == "delta rule":
        values = [unit_length(normal(3, channels)), unit_length(normal(3, channels)), normal(3, channels - 2)]
        values += [-normal(3).abs() * 0.03, normal(3).sigmoid()]
    else:
        values = [normal(2, 3, 5), -normal(2, 3).abs() * 0.03, normal(2, 4), normal(2, 4)]
    return [x.requires_grad_() for x in values]


RULES: dict[str, tuple[Callable[..., Any], Callable[..., Any], tuple[int, ...]]] = {
    "delta rule": (gated_delta_rule, delta_step, (3, 8, 6)),
    "state space": (state_space, state_space_step, (2, 4, 3, 5)),
}


@pytest.mark.parametrize("kind", RULES)
@pytest.mark.parametrize("forest", FORESTS)
def test_runs_start_from_the_state_of_their_parent(kind: str, forest: str, report: Callable[[str], None]) -> None:
    layout, (rule, step, state) = layout_of(forest), RULES[kind]
    inputs = random_inputs(layout.tokens, kind)
    expected = along_samples(step, inputs, previous_tokens(layout), *state)
    gap = largest_gap(rule(*inputs, chunks_of(layout))[0], expected, inputs)
    report(f"{kind} over {forest}, fp64: outputs and gradients within {gap:.1e}")
    assert gap < 1e-11


@pytest.mark.parametrize("width", [2, 4, 7])
@pytest.mark.parametrize("forest", FORESTS)
def test_the_convolution_reads_the_path_of_a_sample(forest: str, width: int) -> None:
    layout = layout_of(forest)
    draw = torch.Generator().manual_seed(5)
    x, weight, bias = (
        torch.randn(*shape, dtype=torch.float64, generator=draw).requires_grad_()
        for shape in ((layout.tokens, 5), (5, 1, width), (5,))
    )
    chunks = chunks_of(layout, width - 1)
    found = causal_convolution(x, weight, chunks, bias)
    previous, rows = previous_tokens(layout), []
    for token in range(layout.tokens):
        total, back = bias, 0
        while token >= 0 and back < width:
            total, token, back = total + x[token] * weight[:, 0, -1 - back], previous[token], back + 1
        rows.append(F.silu(total))
    assert largest_gap(found, torch.stack(rows), [x, weight, bias]) < 1e-12


def test_runs_of_a_forest() -> None:
    runs = layout_of("three levels").runs
    assert runs.lengths.tolist() == [30, 70, 50, 20, 20, 20, 13, 9, 70, 12]
    assert runs.parents.tolist() == [-1, 0, 1, 1, 3, 3, 5, 5, 0, -1]


def divided(lengths: list[int], divide: Divided, cp_size: int = 4) -> str:
    """What ranks of a pack divide: four heads of 64 sent channels, or the sequence by states of 128 elements."""
    exchange = RecurrentExchange(layers=1, units=4, channels=64, map_elements=128, divide=divide)
    values = np.array(lengths, np.int64)
    layout = PackLayout(lengths=values, segments=values, cp_size=cp_size)
    chunks = RecurrentPacks(exchange, 3).chunks(layout, cp_size - 1, CPU)
    return "heads" if chunks.exchange is None else "sequence"


def test_what_ranks_divide() -> None:
    # A rank receives 64 x 2 bytes of 3/16 of the tokens, or 3 x 2 states of each sequence.
    limit = 3 * 2 * 128 * 4 * 16 // (3 * 64 * 2)
    assert divided([limit], "auto") == "heads" and divided([limit + 8], "auto") == "sequence"
    assert divided([limit] * 3, "auto") == "heads" and divided([limit + 8] * 3, "auto") == "sequence"
    assert divided([limit + 8], "heads") == "heads" and divided([8], "sequence") == "sequence"
    assert divided([16], "auto", cp_size=8) == "sequence"
    assert divided([64], "sequence", cp_size=1) == "heads"  # one rank has all of both
