"""Distant log-probs: all numbers stay finite, with the bounds of verl, ROLL and NeMo-RL."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tests.losses.formulas import batch, leaves, run

pytestmark = pytest.mark.loss


def far(data: Any, name: str, value: float, places: tuple[int, ...] = (3, 20)) -> Any:
    """`data` in fp32 with counted rows at `places`, with advantage -1 and the field `name` at `value`."""
    single = {n: v.float() for n, v in data.fields.items() if v.dtype is torch.float64}
    data = data.with_fields(single, {n: data.schema[n] for n in single})
    values, mask = data[name].clone(), data["response_mask"].clone()
    for place in places:
        values[place], mask[place + 1] = value, True
    advantages = -torch.ones(len(data))
    return data.with_fields(
        {name: values, "response_mask": mask, "advantages": advantages},
        {name: "next_token", "response_mask": "token", "advantages": "sample"},
    )


@pytest.mark.parametrize("value", [-60.0, -120.0, float("-inf"), 150.0])
@pytest.mark.parametrize("ratio", ["token", "sequence"])
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("old_log_probs", {}),
        ("old_log_probs", {"dual_clip": 3.0}),
        ("rollout_log_probs", {"engine_ratio_cap": 2.0}),
        ("old_log_probs", {"engine_ratio_cap": 2.0}),
        ("ref_log_probs", {"kl_coef": 0.1}),
        ("ref_log_probs", {"kl_coef": 0.1, "kl_bound": None}),
    ],
)
def test_log_probs_far_apart_leave_everything_finite(name: str, options: Any, ratio: str, value: float) -> None:
    """In fp32 exp(89) is infinite; a gradient through it is NaN wherever a clip follows."""
    from roll_batching.losses import PolicyLoss

    data = far(batch(), name, value)
    loss, gradient, metrics = run(PolicyLoss(ratio=ratio, **options), data, dtype=torch.float32)
    assert np.isfinite(loss) and bool(torch.isfinite(gradient).all())
    assert all(np.isfinite(number) for number in metrics.values()), metrics
    assert float(gradient.abs().max()) < 10, "what is bounded has no gradient, the rest its own"
    assert bool((gradient[:, 0] != 0).any())


OBJECTIVES = {
    "CISPOLoss": {"kl_gradient": "straight_through"},
    "ClipCovLoss": {"dual_clip": 3.0},
    "GMPOLoss": {"kl_gradient": "score_function"},
    "GPGLoss": {},
    "KlCovLoss": {},
    "PolicyLoss": {"ratio": "sequence_token", "engine_correction": "mask_sequences"},
    "SAPOLoss": {"kl_gradient": "importance", "engine_correction": "mask"},
    "TOPRLoss": {"engine_ratio_min": 0.5},
}


@pytest.mark.parametrize("value", [-120.0, float("-inf"), 150.0])
@pytest.mark.parametrize("name", ["old_log_probs", "rollout_log_probs", "ref_log_probs"])
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_every_objective_stays_finite(objective: str, name: str, value: float) -> None:
    import roll_batching.losses

    data = far(batch(), name, value)
    held = torch.arange(data.num_tokens) % 2 == 0
    data = data.with_fields(
        {"rewards": data["advantages"] + 0.5, "held_back": held}, {"rewards": "sample", "held_back": "next_token"}
    )
    options = OBJECTIVES[objective] | {"kl_coef": 0.1, "engine_ratio_cap": 2.0}
    loss = getattr(roll_batching.losses, objective)(**options)
    found, gradient, metrics = run(loss, data, dtype=torch.float32)
    assert np.isfinite(found) and bool(torch.isfinite(gradient).all()) and bool(gradient.any())
    assert all(np.isfinite(number) for number in metrics.values()), metrics


@pytest.mark.parametrize(("options", "bound"), [({}, 20.0), ({"ratio": "sequence"}, 10.0)])
def test_the_log_ratio_is_bounded_where_peers_bound_it(options: dict[str, Any], bound: float) -> None:
    """verl clamps a token's log-ratio at 20 and a sequence's at 10; the gradient ends there."""
    from roll_batching.losses import PolicyLoss

    for beyond in (False, True):
        lengths, off = [5], bound + (0.5 if beyond else -0.5)
        rows = leaves_of(lengths, -off)
        ratio, gradient, metrics = run(PolicyLoss(**options), rows, [[0]], torch.float32)
        assert ratio == pytest.approx(float(np.exp(bound if beyond else off)), rel=1e-5)
        assert bool((gradient[:, 0] == 0).all()) is beyond
        assert metrics["ratio_bounded"] == (1.0 if beyond else 0.0)
        assert metrics["ratio_max"] == pytest.approx(ratio, rel=1e-5)


def leaves_of(lengths: list[int], apart: float, name: str = "old_log_probs") -> Any:
    """One sequence with advantage -1, whose field `name` differs by `apart` from the log-probs of `run`."""
    from roll_batching.samples import SampleBatch

    tokens = sum(lengths)
    data = SampleBatch(
        [0],
        lengths,
        {
            "input_ids": torch.zeros(tokens, dtype=torch.int64),
            "response_mask": torch.ones(tokens, dtype=torch.bool),
            "advantages": -torch.ones(1),
        },
        {"input_ids": "token", "response_mask": "token", "advantages": "sample"},
    )
    return data.with_fields({name: leaves(data).detach()[:, 0].float() + apart}, {name: "next_token"})


def test_the_log_ratio_to_the_engine_is_bounded_and_counted() -> None:
    from roll_batching.losses import PolicyLoss

    data = leaves_of([5], -300.0, "rollout_log_probs")
    _, _, metrics = run(PolicyLoss(engine_ratio_cap=2.0), data, [[0]], torch.float32)
    assert metrics["engine_ratio"] == pytest.approx(float(np.exp(20)), rel=1e-5)
    assert metrics["engine_ratio_bounded"] == 1.0 and metrics["ratio_bounded"] == 0.0


@pytest.mark.parametrize(
    ("options", "apart", "value", "gradient"),
    [
        ({}, 2.0, np.exp(2) - 3, 1 - np.exp(2)),
        ({}, 6.0, 10.0, 0.0),
        ({}, -15.0, 10.0, 0.0),
        ({"kl_bound": 3.0}, 2.0, 3.0, 0.0),
        ({"kl_bound": 500.0}, 6.0, np.exp(6) - 7, 1 - np.exp(6)),
        ({"kl_bound": None}, 6.0, np.exp(6) - 7, 1 - np.exp(6)),
        ({"kl_bound": None}, 25.0, np.exp(20) - 21, 0.0),
    ],
)
def test_k3_is_bounded_by_default_as_verl_and_roll_bound_it(
    options: dict[str, Any], apart: float, value: float, gradient: float
) -> None:
    from roll_batching.losses import PolicyLoss

    data = leaves_of([5], apart, "ref_log_probs").with_fields({"advantages": torch.zeros(1)}, {"advantages": "sample"})
    found, slope, metrics = run(PolicyLoss(kl_coef=0.5, **options), data, [[0]], torch.float32)
    assert found == pytest.approx(0.5 * value, rel=1e-4) and metrics["ref_kl"] == pytest.approx(value, rel=1e-4)
    assert slope[:-1, 0].tolist() == pytest.approx([0.5 * gradient / 4] * 4, rel=1e-4)
    assert metrics["ref_kl_bounded"] == (0.0 if gradient else 1.0)


def test_an_advantage_of_zero_is_neither_clipped_nor_bounded_away() -> None:
    """Far outside the range on either side: a token without effect is not counted as clipped."""
    from roll_batching.losses import PolicyLoss

    for apart in (2.0, -2.0):
        data = leaves_of([5], apart)
        for advantage, clipped in ((0.0, 0.0), (1.0, float(apart < 0)), (-1.0, float(apart > 0))):
            rows = data.with_fields({"advantages": torch.full((1,), advantage)}, {"advantages": "sample"})
            loss, gradient, metrics = run(PolicyLoss(), rows, [[0]])
            assert metrics["clip_fraction"] == clipped
            assert bool(gradient.any()) is (advantage != 0 and not clipped)
