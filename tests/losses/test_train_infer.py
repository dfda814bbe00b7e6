"""Correction for the mismatch of sampler and trainer: against loops, peers' functions, and over ranks.

The peers' numbers were made once by running their own functions in float64 on `waves.batch()`, padded: ROLL 8eb27cc
(roll/utils/train_infer_corrections.py), verl b178a3c (verl/trainer/ppo/rollout_corr_helper.py), NeMo-RL 7ea279a
(compute_and_apply_seq_logprob_error_masking). A number is the product of the weights, or of the mask, with a wave.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.losses.formulas import BINS, close, formula, run
from tests.losses.waves import batch, wave
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.loss

HERE = "tests.losses.test_train_infer:"
ALONE: Any = SimpleNamespace(host_group=None, is_replica_leader=True)
"""The layout of a single process."""


def corrected(data: Any = None, layout: Any = ALONE, **settings: Any) -> tuple[Any, dict[str, float]]:
    from roll_batching.losses.train_infer import with_correction
    from roll_batching.settings.train_infer import TrainInferCorrection

    return with_correction(batch() if data is None else data, TrainInferCorrection.model_validate(settings), layout)


def by_wave(values: torch.Tensor) -> float:
    return float(values.double() @ wave(0.37))


WEIGHTS = {
    "ROLL token": ({"weight_type": "token"}, -1.235747016),
    "ROLL segment": ({"weight_type": "segment"}, -0.228256353),
    "ROLL geometric": ({"weight_type": "geometric"}, 0.95635018),
    "ROLL sequence": ({"weight_type": "sequence"}, 0.672970956),
    "verl token": ({"weight_type": "token", "upper_bound": 1.5}, -2.239082221),
    "verl token, normalised": ({"weight_type": "token", "upper_bound": 1.5, "batch_normalize": True}, -2.152520009),
    "verl sequence": ({"weight_type": "sequence", "upper_bound": 1.5}, 1.090499397),
    "verl sequence, normalised": (
        {"weight_type": "sequence", "upper_bound": 1.5, "batch_normalize": True},
        1.010723809,
    ),
}


@pytest.mark.parametrize("name", WEIGHTS)
def test_weights_equal_those_of_peers(name: str) -> None:
    settings, expected = WEIGHTS[name]
    result, metrics = corrected(is_weight=settings)
    assert by_wave(result["train_infer_is_weight"]) == pytest.approx(expected, rel=2e-6)
    assert torch.equal(result["response_mask"], batch()["response_mask"])
    assert metrics["train_infer_masked"] == 0 < metrics["train_infer_kl"]


RATIO, DIFF = {"ratio_low": 0.75, "ratio_high": 1.3}, {"diff_low": -0.05, "diff_high": 0.06}
FILTERS: dict[str, tuple[list[dict[str, Any]], int, float]] = {
    "ROLL token ratio": ([{"agg_type": "token", **RATIO}], 13, 2.202130691),
    "ROLL token diff": ([{"agg_type": "token", **DIFF}], 18, 0.928576129),
    "ROLL segment ratio": ([{"agg_type": "segment", **RATIO}], 12, 2.975508583),
    "ROLL segment diff": ([{"agg_type": "segment", **DIFF}], 23, 4.716640285),
    "ROLL geometric ratio": ([{"agg_type": "geometric", **RATIO}], 31, 1.01363339),
    "ROLL sequence ratio": ([{"agg_type": "sequence", **RATIO}], 12, -1.886472288),
    "ROLL sequence diff": ([{"agg_type": "sequence", **DIFF}], 8, -1.7406452),
    "NeMo-RL 1.3": ([{"agg_type": "geometric", "error_high": 1.3}], 2, 1.95445402),
    "NeMo-RL 1.5": ([{"agg_type": "geometric", "error_high": 1.5}], 12, 1.856843063),
}
VERL: dict[str, tuple[str, int, float]] = {
    "token_k1": ("0.6_1.5", 20, -0.074165897),
    "token_k2": ("0.1", 19, 1.61781939),
    "token_k3": ("0.1", 19, 1.61781939),
    "seq_sum_k1": ("0.5_1.8", 23, -0.420336673),
    "seq_sum_k2": ("0.8", 27, 2.907490599),
    "seq_sum_k3": ("0.9", 27, 2.907490599),
    "seq_mean_k1": ("0.8_1.2", 29, -0.940820631),
    "seq_mean_k2": ("0.12", 12, 1.856843063),
    "seq_mean_k3": ("0.13", 12, 1.856843063),
    "seq_max_k2": ("0.3", 8, 2.002670151),
    "seq_max_k3": ("0.4", 15, -0.342820592),
    "token_k1,seq_mean_k3": ("0.5_1.9,0.15", 17, -0.076322314),
}


@pytest.mark.parametrize("name", [*FILTERS, *VERL])
def test_filters_keep_what_peers_keep(name: str) -> None:
    """verl's through the translation of its two keys."""
    from roll_batching.samples.token_fields import counted_positions
    from roll_batching.tools.conversion.train_infer import verl_filters

    if name in VERL:
        bounds, count, expected = VERL[name]
        filters = verl_filters(name, bounds)
    else:
        filters, count, expected = FILTERS[name]
    result, metrics = corrected(filters=filters)
    kept = counted_positions(result)
    assert int(kept.sum()) == count and by_wave(kept) == pytest.approx(expected, abs=1e-8)
    assert metrics["train_infer_masked"] == pytest.approx(1 - count / 33)
    assert "train_infer_is_weight" not in result.schema


def test_zeroed_tokens_stay_in_the_mask() -> None:
    """IcePop: weights of tokens outside the range are 0, and means still count them."""
    outside = {"ratio_low": 0.75, "ratio_high": 1.3, "effect": "zero"}
    result, metrics = corrected(is_weight={"upper_bound": None}, filters=[outside])
    assert torch.equal(result["response_mask"], batch()["response_mask"])
    assert int((result["train_infer_is_weight"] > 0).sum()) == 13
    assert metrics["train_infer_zeroed"] == pytest.approx(20 / 33) and metrics["train_infer_clipped"] == 0


def test_turns_are_runs_of_counted_tokens() -> None:
    from roll_batching.losses.train_infer import Mismatch

    data = batch()
    mismatch = Mismatch.of(data)
    position = 0
    for row, (mask, old, infer) in enumerate(
        zip(*(data.to_lists(name) for name in ("response_mask", "old_log_probs", "rollout_log_probs")), strict=True)
    ):
        counted = [bool(value) for value in mask[1:]]
        differences = [float(a - b) for a, b in zip(old, infer, strict=True)][: len(counted)]
        own = [d for d, is_in in zip(differences, counted, strict=True) if is_in]
        for place, is_in in enumerate(counted):
            if not is_in:
                continue
            first = last = place
            while first > 0 and counted[first - 1]:
                first -= 1
            while last + 1 < len(counted) and counted[last + 1]:
                last += 1
            turn = differences[first : last + 1]
            at = position + place
            expected = {
                "token": differences[place],
                "segment": sum(turn) / len(turn),
                "geometric": sum(own) / len(own),
                "sequence": sum(own),
                "max": max(own),
            }
            for level, value in expected.items():
                found = float(mismatch.spread(mismatch.log_ratio, level)[at])
                assert found == pytest.approx(value), (row, place, level)
        position += len(mask)


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_normalised_weights_have_the_mean_1_with_those_that_are_zeroed(level: str) -> None:
    """verl's IcePop: weights outside of two bounds are 0, and count in the mean that the others are divided by."""
    from roll_batching.samples.token_fields import counted_positions, sample_of

    filters = [{"agg_type": level, "ratio_low": 0.8, "ratio_high": 1.4, "effect": "zero"}]
    weight = {"weight_type": level, "upper_bound": None, "batch_normalize": True}
    data, _ = corrected(is_weight=weight, filters=filters)
    weights, counted = data["train_infer_is_weight"].double(), counted_positions(data)
    assert (weights[counted] == 0).any() and (weights[counted] > 0).any()
    owner = sample_of(data)[counted]
    of_samples = {int(row): weights[counted][owner == row] for row in owner.unique()}
    mean = (
        weights[counted].mean() if level == "token" else torch.stack([one.mean() for one in of_samples.values()]).mean()
    )
    assert float(mean) == pytest.approx(1.0, abs=1e-6)


def test_the_loss_is_weighted_for_any_placement_of_samples() -> None:
    """The surrogate has the weights; the KL penalty and the entropy bonus have not."""
    from roll_batching.losses import PolicyLoss

    data, _ = corrected(is_weight={"weight_type": "sequence", "upper_bound": 1.5})
    loss = PolicyLoss(kl_coef=0.1, entropy_coef=0.2)

    def of_one(f: Any, lp: Any, h: Any) -> Any:
        ratio = (lp - f["old_log_probs"]).exp()
        weight = (f["old_log_probs"] - f["rollout_log_probs"]).sum().exp().clamp(max=1.5).float()
        surrogate = -torch.minimum(ratio * f["advantages"], ratio.clamp(0.8, 1.2) * f["advantages"])
        d = f["ref_log_probs"] - lp
        return (weight * surrogate + 0.1 * (d.exp() - 1 - d).clamp(max=10) - 0.2 * h).sum(), len(lp)

    expected = formula(data, of_one, lambda parts: sum(p for p, _ in parts) / sum(n for _, n in parts))
    close(run(loss, data), expected)
    close(run(loss, data, BINS[::-1]), expected)


def on_ranks(_: Any) -> tuple[dict[str, float], float, float]:
    """Metrics, and products of this rank's weights and mask, with samples divided over two ranks."""
    from tests.losses.steps import make_strategy, mine

    layout = make_strategy().layout
    local = mine(SimpleNamespace(layout=layout), batch())
    if layout.dp_rank == 1:  # a rank whose samples are all kept has the same fields
        assert len(local)
    filters = [{"agg_type": "geometric", "k2_high": 0.15}, {"agg_type": "sequence", "ratio_high": 2.0}]
    weight = {"weight_type": "sequence", "upper_bound": 1.5, "batch_normalize": True}
    result, metrics = corrected(local, layout, is_weight=weight, filters=filters)
    at = torch.cat([torch.arange(a, b) for a, b in zip(*_bounds(result), strict=True)])
    waves = wave(0.37)[at]
    weights, mask = result["train_infer_is_weight"].double(), result["response_mask"].double()
    return metrics, float(weights @ waves), float(mask @ waves)


def _bounds(local: Any) -> tuple[list[int], list[int]]:
    """First and last place of each local sample's tokens in the whole batch."""
    whole = batch()
    rows = whole.find(local.ids)[0]
    return whole.offsets[:-1][rows].tolist(), whole.offsets[1:][rows].tolist()


def test_two_ranks_have_the_mean_and_the_metrics_of_one() -> None:
    results = run_ranks(2, f"{HERE}on_ranks", None)
    filters = [{"agg_type": "geometric", "k2_high": 0.15}, {"agg_type": "sequence", "ratio_high": 2.0}]
    weight = {"weight_type": "sequence", "upper_bound": 1.5, "batch_normalize": True}
    alone, metrics = corrected(is_weight=weight, filters=filters)
    for found, _, _ in results:
        assert found == pytest.approx(metrics)
    assert sum(one[1] for one in results) == pytest.approx(by_wave(alone["train_infer_is_weight"]), rel=1e-6)
    assert sum(one[2] for one in results) == pytest.approx(by_wave(alone["response_mask"]), rel=1e-6)


@pytest.mark.parametrize("name", ["old_log_probs", "rollout_log_probs"])
def test_missing_and_infinite_log_probs_are_errors(name: str) -> None:
    from roll_batching.errors import DataError

    with pytest.raises(DataError, match=f"needs the next_token field '{name}'"):
        corrected(batch().without(name), is_weight={})
    broken = batch()[name].clone()
    broken[batch().offsets[2] + 3] = float("nan")
    data = batch().with_fields({name: broken}, {name: "next_token"})
    with pytest.raises(DataError, match=f"{name} of sample 20 are not finite at 1 counted"):
        corrected(data, is_weight={})
    two = torch.stack([batch()[name]] * 2, dim=1)
    with pytest.raises(DataError, match=f"{name} has the shape .*, 2.: give one number per token"):
        corrected(batch().with_fields({name: two}, {name: "next_token"}), is_weight={})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "corrects nothing"),
        ({"filters": [{}]}, "filters.0.agg_type has no bound"),
        ({"filters": [{"ratio_low": 2.0, "ratio_high": 1.0}]}, "filters.0.ratio_low is 2.0, above ratio_high"),
        ({"filters": [{"agg_type": "max", "ratio_high": 1.0}]}, "filters.0.ratio_high has no largest"),
        ({"is_weight": {"lower_bound": 2.0}}, "is_weight.lower_bound is 2.0, above upper_bound"),
    ],
)
def test_contradictory_settings_are_errors(settings: Any, message: str) -> None:
    from roll_batching.errors import LossError

    with pytest.raises(LossError, match=message):
        corrected(**settings)


def step_on_ranks(megatron: dict[str, Any]) -> tuple[dict[str, float], Any, dict[str, Any]]:
    """Metrics, result and gradients of a step with weights and filters."""
    from roll_batching.losses import PolicyLoss
    from tests.losses.steps import make_strategy, step

    strategy = make_strategy(megatron=megatron)
    filters = [{"agg_type": "geometric", "k2_high": 0.15}, {"agg_type": "token", "ratio_high": 2.0, "effect": "zero"}]
    weight = {"weight_type": "token", "upper_bound": 1.5, "batch_normalize": True}
    whole, metrics = corrected(batch(), strategy.layout, is_weight=weight, filters=filters)
    result, gradients = step(strategy, whole, PolicyLoss(clip_low=0.2, clip_high=0.28))
    return metrics, result.loss, gradients


@pytest.mark.parametrize("megatron", [{"context_parallel_size": 2}, {"pipeline_model_parallel_size": 2}], ids=str)
def test_weights_and_filters_under_context_parallelism_and_in_stages(megatron: dict[str, Any]) -> None:
    """They give metrics, loss and gradients of one rank."""
    from tests.losses.steps import gap

    ((metrics, *expected),) = run_ranks(1, f"{HERE}step_on_ranks", {})
    for found, *result in run_ranks(2, f"{HERE}step_on_ranks", megatron):
        assert found == pytest.approx(metrics)
        assert max(gap((result[0], result[1]), (expected[0], expected[1]))) < 1e-5
