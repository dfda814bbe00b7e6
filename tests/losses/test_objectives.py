"""The policy's and the supervised loss against their formulas, written per sequence; values, gradients and metrics.

The views are made from real packs of several micro-batches, with log-probs as leaves instead of a model.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.losses.formulas import (
    BINS,
    LENGTHS,
    batch,
    by_rollout,
    close,
    formula,
    ppo,
    run,
    sequence_mean,
    sequence_sum,
    token_mean,
)

pytestmark = pytest.mark.loss


def constant(parts: list[Any]) -> Any:
    return sequence_sum(parts) / 16


def own(parts: list[Any]) -> Any:
    """Mean over tokens of sequences weighted by the square root of their length."""
    return sum(p.sum() / max(len(p), 1) ** 0.5 for p in parts) / sum(len(p) for p in parts)


def own_of_view(view: Any, x: torch.Tensor) -> torch.Tensor:
    return (view.segment_sum(x) / view.segment_count().double().clamp(min=1) ** 0.5).sum() / view.num_tokens()


def dual(f: dict[str, Any], lp: Any) -> Any:
    a, gain = f["advantages"], -ppo(f, lp)
    return -gain if a >= 0 else -torch.max(gain, 1.5 * a)


def gspo(f: dict[str, Any], lp: Any) -> Any:
    if not len(lp):
        return lp
    s = torch.exp((lp - f["old_log_probs"]).sum() / len(lp))
    a = f["advantages"]
    return -torch.min(s * a, torch.clip(s, 0.9, 1.3) * a)[None]


def gspo_mean(parts: list[Any]) -> Any:
    present = [p for p in parts if len(p)]
    return torch.cat(present).sum() / len(present)


def truncated(f: dict[str, Any], lp: Any) -> Any:
    weight = torch.clip(torch.exp(f["old_log_probs"] - f["rollout_log_probs"]), max=1.2)
    return weight * ppo(f, lp)


def ref(f: dict[str, Any], lp: Any) -> Any:
    return f["ref_log_probs"] - lp


def weighted(data: Any) -> Callable[[list[Any]], Any]:
    def join(parts: list[Any]) -> Any:
        present = [i for i, p in enumerate(parts) if len(p)]
        w = data["weights"][present] / data["weights"][present].mean()
        return sum(w[k] * parts[i].sum() for k, i in enumerate(present)) / sum(len(p) for p in parts)

    return join


def cases() -> dict[str, tuple[dict[str, Any], Callable[..., Any], Callable[[list[Any]], Any]]]:
    from roll_batching.losses import constant_mean, constant_sum, rollout_token_mean

    p = lambda f, lp, h: ppo(f, lp)  # noqa: E731
    return {
        "token_mean": ({}, p, token_mean),
        "sequence_mean": ({"aggregation": "sequence_mean"}, p, sequence_mean),
        "sequence_sum": ({"aggregation": "sequence_sum"}, p, sequence_sum),
        "rollout_mean": ({"aggregation": "rollout_mean"}, p, by_rollout(sequence_mean)),
        "rollout_token_mean": ({"aggregation": rollout_token_mean}, p, by_rollout(token_mean)),
        "Dr. GRPO": ({"aggregation": constant_mean(16)}, p, constant),
        "token sum": ({"aggregation": constant_sum(16)}, p, lambda parts: sum(part.sum() for part in parts) / 16),
        "a user's own": ({"aggregation": own_of_view}, p, own),
        "clip-higher": (
            {"clip_low": 0.1, "clip_high": 0.4},
            lambda f, lp, h: ppo(f, lp, 0.1, 0.4),
            token_mean,
        ),
        "dual clip": ({"dual_clip": 1.5}, lambda f, lp, h: dual(f, lp), token_mean),
        "KL k1": ({"kl_coef": 0.3, "kl_estimator": "k1"}, lambda f, lp, h: ppo(f, lp) - 0.3 * ref(f, lp), token_mean),
        "KL k2": (
            {"kl_coef": 0.3, "kl_estimator": "k2"},
            lambda f, lp, h: ppo(f, lp) + 0.15 * ref(f, lp) ** 2,
            token_mean,
        ),
        "KL k3": (
            {"kl_coef": 0.3},
            lambda f, lp, h: ppo(f, lp) + 0.3 * torch.clip(torch.exp(ref(f, lp)) - ref(f, lp) - 1, max=10),
            token_mean,
        ),
        "KL k3, unbounded": (
            {"kl_coef": 0.3, "kl_bound": None},
            lambda f, lp, h: ppo(f, lp) + 0.3 * (torch.exp(ref(f, lp)) - ref(f, lp) - 1),
            token_mean,
        ),
        "entropy bonus": ({"entropy_coef": 0.05}, lambda f, lp, h: ppo(f, lp) - 0.05 * h, token_mean),
        "GSPO": (
            {"ratio": "sequence", "clip_low": 0.1, "clip_high": 0.3, "aggregation": "sequence_mean"},
            lambda f, lp, h: gspo(f, lp),
            gspo_mean,
        ),
        "truncated importance sampling": (
            {"engine_ratio_cap": 1.2},
            lambda f, lp, h: truncated(f, lp),
            token_mean,
        ),
        "sample weights": ({"sample_weights": "weights"}, p, weighted(batch())),
    }


NAMES = [
    "token_mean", "sequence_mean", "sequence_sum", "rollout_mean", "rollout_token_mean", "Dr. GRPO", "token sum",
    "a user's own", "clip-higher", "dual clip", "KL k1", "KL k2", "KL k3", "KL k3, unbounded", "entropy bonus", "GSPO",
    "truncated importance sampling", "sample weights",
]  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_policy_losses_equal_their_formulas(name: str) -> None:
    from roll_batching.losses import PolicyLoss

    assert list(cases()) == NAMES
    options, of_sequence, join = cases()[name]
    found = run(PolicyLoss(**options), batch())
    close(found, formula(batch(), of_sequence, join))


def test_supervised_loss_equals_its_formula() -> None:
    from roll_batching.losses import SFTLoss

    found = run(SFTLoss(), batch())
    close(found, formula(batch(), lambda f, lp, h: -lp, token_mean))
    assert found[2]["nll"] == pytest.approx(found[0])


def test_token_advantages_are_read_at_the_token_that_they_speak_of() -> None:
    from roll_batching.losses import PolicyLoss

    data = batch()
    per_token = data.with_fields({"advantages": data["token_advantages"]}, {"advantages": "token"})
    close(run(PolicyLoss(), per_token), formula(per_token, lambda f, lp, h: ppo(f, lp), token_mean))


def test_without_old_log_probs_the_current_ones_are_taken() -> None:
    from roll_batching.losses import PolicyLoss

    data = batch().without(["old_log_probs"])
    found = run(PolicyLoss(), data)
    close(found, formula(data, lambda f, lp, h: -torch.exp(lp - lp.detach()) * f["advantages"], token_mean))
    assert found[2]["ratio_max"] == 1.0 and found[2]["clip_fraction"] == 0.0


def test_overlong_responses_count_nowhere() -> None:
    from roll_batching.losses import PolicyLoss, mask_overlong

    data = batch()
    overlong = torch.tensor([False, False, True, False, False, False, True, False])
    left_out = {2, 6}
    found = run(PolicyLoss(), mask_overlong(data, overlong))

    def join(parts: list[Any]) -> Any:
        return token_mean([p for i, p in enumerate(parts) if i not in left_out])

    close(found, formula(data, lambda f, lp, h: ppo(f, lp), join))


def test_a_mean_over_samples_leaves_out_those_without_a_counted_row() -> None:
    from roll_batching.losses import PolicyLoss, mask_overlong

    overlong = torch.tensor([False, False, True, False, False, False, True, False])
    loss = PolicyLoss(aggregation=lambda view, x: view.sample_mean(1.0 + 0.0 * view.segment_sum(x)))
    assert run(loss, mask_overlong(batch(), overlong))[0] == pytest.approx(1.0)


def test_weights_are_normalised_over_the_mini_batch_not_the_micro_batch() -> None:
    """One sample per micro-batch: within a micro-batch every weight would be 1."""
    from roll_batching.losses import PolicyLoss

    loss = PolicyLoss(sample_weights="weights")
    close(run(loss, batch(), [[i] for i in range(len(LENGTHS))]), run(loss, batch(), BINS))


def test_metrics_do_not_depend_on_the_partition() -> None:
    from roll_batching.losses import PolicyLoss

    loss = PolicyLoss(kl_coef=0.1, dual_clip=1.5, engine_ratio_cap=1.2)
    first, second = run(loss, batch())[2], run(loss, batch(), [list(range(len(LENGTHS)))])[2]
    assert first.keys() == second.keys() and len(first) == 11
    assert all(first[name] == pytest.approx(second[name], rel=1e-12) for name in first)


@pytest.mark.parametrize(
    "options, said",
    [
        ({"clip_low": 0.0}, "clip_low is 0.0; .* above 0 and at most 1"),
        ({"clip_low": 1.5}, "clip_low is 1.5"),
        ({"clip_high": 0.0}, "clip_high is 0.0"),
        ({"dual_clip": 0.9}, "dual_clip is 0.9"),
        ({"dual_clip": 1.0}, "dual_clip is 1.0"),
        ({"engine_ratio_cap": 0.0}, "engine_ratio_cap"),
        ({"kl_coef": -1.0}, "kl_coef"),
        ({"kl_bound": 0.0}, "kl_bound is 0.0"),
        ({"kl_estimator": "k4"}, "k1, k2, k3, abs"),
        ({"kl_gradient": "both"}, "value, straight_through, score_function, importance"),
        ({"engine_correction": "drop"}, "truncate, mask, mask_sequences"),
        ({"engine_ratio_cap": 2.0, "engine_ratio_min": 3.0}, "engine_ratio_min is 3.0"),
        ({"ratio": "word"}, "one of token, sequence, sequence_token"),
        ({"aggregation": "token-mean"}, "token_mean, sequence_mean, sequence_sum"),
    ],
)
def test_wrong_settings_are_refused_at_construction(options: dict[str, Any], said: str) -> None:
    from roll_batching.errors import LossError
    from roll_batching.losses import PolicyLoss

    with pytest.raises(LossError, match=said):
        PolicyLoss(**options)


@pytest.mark.parametrize("name", ["constant_mean", "constant_sum"])
@pytest.mark.parametrize("length", [0, -3, float("nan"), float("inf")])
def test_a_constant_divisor_is_positive_and_finite(name: str, length: float) -> None:
    from roll_batching import losses
    from roll_batching.errors import LossError

    with pytest.raises(LossError, match=rf"{name}\({length}\): give a positive number"):
        getattr(losses, name)(length)
