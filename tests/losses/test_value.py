"""The loss of a critic: beside formulas written out in float64, verl's and ROLL's numbers, and what it refuses.

The numbers were made once by running verl's compute_value_loss, and the lines of ROLL's CriticWorker.loss_func, in
float64, padded, on `waves.batch()` with values `wave(0.2)`, returns `wave(0.41)` and old values `wave(0.29)`.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from roll_batching.errors import LossError
from roll_batching.losses import ValueLoss, constant_mean
from roll_batching.losses.contract import loss_spec
from tests.losses import waves
from tests.losses.formulas import batch, close, formula, run, sequence_mean, sequence_sum, token_mean

pytestmark = pytest.mark.loss

PEER = {"token_mean": 0.7441304972171456, "sequence_mean": 0.7526871237900976, "sequence_sum": 3.069538301020726}
"""verl's by loss_agg_mode; ROLL's is that of sequence_mean, whatever loss_agg_mode says."""
PEER_CLIPPED = 0.3333333332323232


def with_returns(data: Any, returns: torch.Tensor, old: torch.Tensor) -> Any:
    fields = {"returns": returns, "old_values": old}
    return data.with_fields(fields, dict.fromkeys(fields, "next_token"))


def random_returns() -> Any:
    data = batch()
    g = torch.Generator().manual_seed(5)
    returns, old = (-2 + torch.randn(data.num_tokens, generator=g, dtype=torch.float64) for _ in range(2))
    return with_returns(data, returns, old)


JOINS = {"token_mean": token_mean, "sequence_mean": sequence_mean, "sequence_sum": sequence_sum}


@pytest.mark.parametrize("aggregation", JOINS)
@pytest.mark.parametrize("clip", [None, 0.3])
def test_the_loss_and_its_gradient_are_the_formula_s(clip: float | None, aggregation: str) -> None:
    def of_sequence(f: dict[str, Any], values: Any, _: Any) -> Any:
        square = (values - f["returns"]) ** 2
        if clip is None:
            return square / 2
        bounded = torch.min(torch.max(values, f["old_values"] - clip), f["old_values"] + clip)
        return torch.max(square, (bounded - f["returns"]) ** 2) / 2

    data = random_returns()
    close(run(ValueLoss(clip=clip, aggregation=aggregation), data), formula(data, of_sequence, JOINS[aggregation]))


@pytest.mark.parametrize("aggregation", PEER)
def test_the_loss_is_verls_and_rolls(aggregation: str) -> None:
    data = with_returns(waves.batch(), waves.wave(0.41), waves.wave(0.29))
    rows = waves.wave(0.2)[:, None].expand(-1, 2)
    value, _, metrics = run(ValueLoss(clip=0.3, aggregation=aggregation), data, rows=rows)
    assert value == pytest.approx(PEER[aggregation], rel=1e-7)  # their means have an epsilon
    assert metrics["clip_share"] == pytest.approx(PEER_CLIPPED, rel=1e-7)
    counted = waves.wave(0.2)[counted_rows(data)]
    assert metrics["value"] == pytest.approx(float(counted.mean()), rel=1e-12)
    assert metrics["return"] == pytest.approx(float(waves.wave(0.41)[counted_rows(data)].mean()), rel=1e-12)


def counted_rows(data: Any) -> torch.Tensor:
    from roll_batching.samples.token_fields import counted_positions

    return counted_positions(data)


def test_a_constant_length_divides_as_in_dr_grpo() -> None:
    data = random_returns()
    total = run(ValueLoss(aggregation="sequence_sum"), data)[0]
    assert run(ValueLoss(aggregation=constant_mean(40)), data)[0] == pytest.approx(total / 40, rel=1e-12)


@pytest.mark.bad_input
@pytest.mark.parametrize("clip", [0.0, -1.0, float("nan"), float("inf")])
def test_a_clip_range_that_is_none_is_refused(clip: float) -> None:
    with pytest.raises(LossError, match="clip is .*; it must be a finite number, above 0, or None"):
        ValueLoss(clip=clip)


@pytest.mark.bad_input
def test_values_stand_alone_in_what_a_loss_needs() -> None:
    class Both(ValueLoss):
        needs = frozenset({"values", "entropy"})  # type: ignore[misc]

    class BySequence:
        needs = frozenset({"values"})

        def sequence_loss(self, sequence: Any) -> Any: ...

    for loss in (Both(), BySequence()):
        with pytest.raises(LossError, match="a critic has values alone"):
            loss_spec(loss)
