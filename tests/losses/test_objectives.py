"""Every objective against its formula, written per sequence in plain torch; values, gradients and metrics.

The views are made from real packs of several micro-batches, with log-probs as leaves instead of a model.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

pytestmark = pytest.mark.loss

LENGTHS = (7, 1, 12, 5, 9, 3, 8, 6)


def batch(seed: int = 0) -> Any:
    from roll_batching.data import SampleBatch

    g = torch.Generator().manual_seed(seed)

    def rows(make: Callable[[int], torch.Tensor]) -> list[torch.Tensor]:
        return [make(n) for n in LENGTHS]

    def log_probs(n: int) -> torch.Tensor:
        return -2 + 0.5 * torch.randn(n, generator=g, dtype=torch.float64)

    masks = rows(lambda n: torch.rand(n, generator=g) < 0.7)
    masks[4][:] = False  # a sequence without counted tokens
    count = len(LENGTHS)
    return SampleBatch.from_lists(
        {
            "input_ids": rows(lambda n: torch.randint(0, 50, (n,), generator=g)),
            "response_mask": masks,
            "advantages": torch.randn(count, generator=g, dtype=torch.float64),
            "token_advantages": rows(lambda n: torch.randn(n, generator=g, dtype=torch.float64)),
            "old_log_probs": rows(log_probs),
            "ref_log_probs": rows(log_probs),
            "rollout_log_probs": rows(log_probs),
            "weights": torch.rand(count, generator=g, dtype=torch.float64),
            "pair": torch.tensor([3, 1, 2, 2, 0, 3, 0, 1]),
            "chosen": torch.tensor([True, True, False, True, True, False, False, False]),
        },
        {
            "input_ids": "token",
            "response_mask": "token",
            "token_advantages": "token",
            "old_log_probs": "next_token",
            "ref_log_probs": "next_token",
            "rollout_log_probs": "next_token",
            **dict.fromkeys(("advantages", "weights", "pair", "chosen"), "sample"),
        },
        ids=[10 * i for i in range(count)],
    )


BINS = [[2, 0, 5], [7, 4, 6], [1], [3]]
PAIRED = [[4, 2, 1, 0], [], [3, 5]]


def run(
    loss: Any, data: Any, bins: list[list[int]] = BINS, dtype: torch.dtype = torch.float64
) -> tuple[float, torch.Tensor, dict[str, float]]:
    """(loss, gradient by the flat log-probs and entropies, metrics) over the micro-batches `bins`."""
    from roll_batching.losses.contract import loss_spec
    from roll_batching.losses.denominators import local_counts
    from roll_batching.losses.metric_kinds import as_numbers, join_parts, to_host
    from roll_batching.losses.views import TokenView
    from roll_batching.packing.batch import pack_step
    from roll_batching.planning import Plan, PlanConstraints

    spec = loss_spec(loss)
    plan = Plan.from_bins([bins], data.lengths.numpy(), PlanConstraints(dp_size=1, max_tokens=64), ids=data.ids.numpy())
    packs = pack_step(data, plan, dp_rank=0, device=torch.device("cpu"), masks=spec.masks)
    if spec.check:
        spec.check(data, [data.rows_of(pack.ids).numpy() for pack in packs if pack.samples])
    counts = local_counts(data, spec.masks, spec.sums)
    leaf = leaves(data).detach().to(dtype).requires_grad_()
    total, metrics = torch.zeros((), dtype=torch.float64), []
    for pack in packs:
        if not pack.samples:
            continue
        counted = torch.stack(list(pack.masks.values())).any(0)
        both = torch.where(counted[:, None], leaf[pack.source], 0.0)
        output = loss.token_loss(TokenView(pack, counts, log_probs=both[:, 0], entropy=both[:, 1]))
        total = total + output.loss
        metrics.append(output.metrics)
    (gradient,) = torch.autograd.grad(total, leaf)
    return float(total), gradient, as_numbers(join_parts([to_host([], metrics)[1]]))


def leaves(data: Any) -> torch.Tensor:
    """[tokens, 2]: log-probs and entropies of every row."""
    g = torch.Generator().manual_seed(99)
    values = torch.stack([-2 + torch.randn(data.num_tokens, generator=g), torch.rand(data.num_tokens, generator=g)], -1)
    return values.double().requires_grad_()


def formula(data: Any, of_sequence: Callable[..., Any], join: Callable[[list[Any]], Any]) -> tuple[float, torch.Tensor]:
    """A loss from `join` over what `of_sequence(fields, lp, entropy)` says of each sequence's counted rows."""
    leaf = leaves(data)
    parts = []
    for i, (start, length) in enumerate(zip(data.offsets.tolist(), data.lengths.tolist(), strict=False)):
        fields: dict[str, Any] = {}
        keep = data.to_lists("response_mask")[i][1:].bool()
        for name, spec in data.schema.items():
            values = data.to_lists(name)[i] if spec.per_token else data[name][i]
            if spec.per_token:
                values = (values[1:] if spec.kind == "token" else values[:-1])[keep]
            fields[name] = values
        rows = leaf[start : start + length - 1][keep]
        parts.append(of_sequence(fields, rows[:, 0], rows[:, 1]))
    total = join(parts)
    (gradient,) = torch.autograd.grad(total, leaf)
    return float(total), gradient


def token_mean(parts: list[Any]) -> Any:
    return torch.cat(parts).sum() / sum(len(p) for p in parts)


def sequence_mean(parts: list[Any]) -> Any:
    return sum(p.mean() for p in parts if len(p)) / sum(len(p) > 0 for p in parts)


def sequence_sum(parts: list[Any]) -> Any:
    return sum(p.sum() for p in parts) / sum(len(p) > 0 for p in parts)


def constant(parts: list[Any]) -> Any:
    return sequence_sum(parts) / 16


def own(parts: list[Any]) -> Any:
    """Mean over tokens of sequences weighted by the square root of their length."""
    return sum(p.sum() / max(len(p), 1) ** 0.5 for p in parts) / sum(len(p) for p in parts)


def own_of_view(view: Any, x: torch.Tensor) -> torch.Tensor:
    return (view.segment_sum(x) / view.segment_count().double().clamp(min=1) ** 0.5).sum() / view.num_tokens()


def ppo(f: dict[str, Any], lp: Any, low: float = 0.2, high: float = 0.2) -> Any:
    ratio = torch.exp(lp - f["old_log_probs"])
    a = f["advantages"]
    return -torch.min(ratio * a, torch.clip(ratio, 1 - low, 1 + high) * a)


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
    from roll_batching.losses import constant_mean

    p = lambda f, lp, h: ppo(f, lp)  # noqa: E731
    return {
        "token_mean": ({}, p, token_mean),
        "sequence_mean": ({"aggregation": "sequence_mean"}, p, sequence_mean),
        "sequence_sum": ({"aggregation": "sequence_sum"}, p, sequence_sum),
        "Dr. GRPO": ({"aggregation": constant_mean(16)}, p, constant),
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
    "token_mean", "sequence_mean", "sequence_sum", "Dr. GRPO", "a user's own", "clip-higher", "dual clip", "KL k1",
    "KL k2", "KL k3", "KL k3, unbounded", "entropy bonus", "GSPO", "truncated importance sampling", "sample weights",
]  # fmt: skip


def close(found: tuple[Any, ...], expected: tuple[Any, ...]) -> None:
    assert found[0] == pytest.approx(expected[0], rel=1e-12)
    assert float((found[1] - expected[1]).norm() / expected[1].norm()) < 1e-12


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


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_dpo_equals_its_formula_wherever_the_pairs_lie(smoothing: float) -> None:
    from roll_batching.losses import DPOLoss

    data = whole_pairs()
    found = run(DPOLoss(beta=0.2, label_smoothing=smoothing), data, PAIRED)

    def join(rewards: list[Any]) -> Any:
        pairs = {}
        for i, reward in enumerate(rewards):
            pairs.setdefault(int(data["pair"][i]), {})[bool(data["chosen"][i])] = reward
        margins = torch.stack([p[True] - p[False] for p in pairs.values()])
        right, wrong = torch.log(torch.sigmoid(margins)), torch.log(torch.sigmoid(-margins))
        return -((1 - smoothing) * right + smoothing * wrong).mean()

    close(found, formula(data, lambda f, lp, h: 0.2 * (lp - f["ref_log_probs"]).sum(), join))
    again = run(DPOLoss(beta=0.2, label_smoothing=smoothing), data, [[0, 4], [5, 3], [1, 2]])
    close(again, found)


def test_dpos_metrics_say_which_response_is_preferred_and_by_how_much() -> None:
    from roll_batching.losses import DPOLoss

    data = whole_pairs()
    metrics = run(DPOLoss(beta=0.2), data, PAIRED)[2]
    rewards: list[Any] = []
    formula(
        data, lambda f, lp, h: 0.2 * (lp - f["ref_log_probs"]).sum(), lambda parts: rewards.extend(parts) or sum(parts)
    )
    values, chosen, pair = torch.stack(rewards).detach(), data["chosen"], data["pair"]
    order = torch.argsort(pair[chosen])
    liked, other = values[chosen][order], values[~chosen][torch.argsort(pair[~chosen])]
    assert metrics["chosen_reward"] == pytest.approx(float(liked.mean()))
    assert metrics["reward_margin"] == pytest.approx(float((liked - other).mean()))
    assert metrics["reward_accuracy"] == pytest.approx(float((liked > other).double().mean()))


def whole_pairs() -> Any:
    """Three pairs, every response with counted tokens."""
    data = batch().select([0, 2, 3, 4, 5, 6])
    every = torch.ones(data.num_tokens, dtype=torch.bool)
    return data.with_fields({"response_mask": every}, {"response_mask": "token"})


def test_dpo_refuses_half_a_pair_before_the_step() -> None:
    from roll_batching.errors import DataError
    from roll_batching.losses import DPOLoss

    with pytest.raises(DataError, match="whole pairs.*group_ids="):
        run(DPOLoss(), whole_pairs(), [[0, 1, 2], [3, 4, 5]])
    with pytest.raises(DataError, match=r"samples \[10, 40\] have no counted response token"):
        run(DPOLoss(), batch(), [[0, 5, 1, 7], [2, 3, 4, 6]])
    with pytest.raises(DataError, match="sample field 'pair'"):
        run(DPOLoss(), batch().without(["pair"]), BINS)


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
    assert first.keys() == second.keys() and len(first) == 10
    assert all(first[name] == pytest.approx(second[name], rel=1e-12) for name in first)


@pytest.mark.parametrize(
    "options, said",
    [
        ({"clip_low": 0.0}, "clip range"),
        ({"clip_low": 1.5}, "clip range"),
        ({"clip_high": 0.0}, "clip range"),
        ({"dual_clip": 0.9}, "dual_clip is 0.9"),
        ({"dual_clip": 1.0}, "dual_clip is 1.0"),
        ({"engine_ratio_cap": 0.0}, "engine_ratio_cap"),
        ({"kl_coef": -1.0}, "kl_coef"),
        ({"kl_bound": 0.0}, "kl_bound is 0.0"),
        ({"kl_estimator": "k4"}, "k1, k2, k3"),
        ({"ratio": "word"}, "token or sequence"),
        ({"aggregation": "token-mean"}, "token_mean, sequence_mean, sequence_sum"),
    ],
)
def test_wrong_settings_are_refused_at_construction(options: dict[str, Any], said: str) -> None:
    from roll_batching.errors import LossError
    from roll_batching.losses import PolicyLoss

    with pytest.raises(LossError, match=said):
        PolicyLoss(**options)


@pytest.mark.parametrize("length", [0, -3])
def test_a_constant_mean_is_over_a_positive_length(length: int) -> None:
    from roll_batching.errors import LossError
    from roll_batching.losses import constant_mean

    with pytest.raises(LossError, match=rf"constant_mean\({length}\): give a positive length"):
        constant_mean(length)


def test_metrics_join_by_their_kind_in_any_order() -> None:
    from roll_batching.errors import LossError
    from roll_batching.losses import Max, Mean, Min, Sum
    from roll_batching.losses.metric_kinds import HostMetric, as_numbers, join_parts, to_host

    def part(value: float, tokens: float) -> dict[str, HostMetric]:
        x = torch.tensor(value)
        kinds = {"sum": Sum(x), "mean": Mean(x * tokens, torch.tensor(tokens)), "max": Max(x), "min": Min(x)}
        return to_host([], [kinds])[1]

    parts = [part(2.0, 3.0), part(-1.0, 1.0), part(5.0, 4.0)]
    for order in ([0, 1, 2], [2, 0, 1], [1, 2, 0]):
        joined = join_parts([parts[i] for i in order])
        assert as_numbers(joined) == {"sum": 6.0, "mean": 25 / 8, "max": 5.0, "min": -1.0}
    assert as_numbers(join_parts([part(7.0, 0.0)]))["mean"] == 0.0, "a mean over nothing"
    with pytest.raises(LossError, match="'x' is a sum in one part and a max in another"):
        join_parts([{"x": parts[0]["sum"]}, {"x": parts[0]["max"]}])


def far(data: Any, name: str, value: float, places: tuple[int, ...] = (3, 20)) -> Any:
    """`data` in fp32 with counted rows at `places`, of advantage -1, where the field `name` reads `value`."""
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
    """One sequence, advantage -1, whose field `name` lies `apart` from the log-probs that `run` will give it."""
    from roll_batching.data import SampleBatch

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
    """Far outside the range on either side: what cannot move the policy is not counted as clipped."""
    from roll_batching.losses import PolicyLoss

    for apart in (2.0, -2.0):
        data = leaves_of([5], apart)
        for advantage, clipped in ((0.0, 0.0), (1.0, float(apart < 0)), (-1.0, float(apart > 0))):
            rows = data.with_fields({"advantages": torch.full((1,), advantage)}, {"advantages": "sample"})
            loss, gradient, metrics = run(PolicyLoss(), rows, [[0]])
            assert metrics["clip_fraction"] == clipped
            assert bool(gradient.any()) is (advantage != 0 and not clipped)


def test_a_total_covers_what_the_first_mask_counts() -> None:
    from roll_batching.losses.denominators import local_counts

    data = batch()
    everything = torch.ones(data.num_tokens)
    data = data.with_fields({"everything": everything}, {"everything": "token"})
    counts = local_counts(data, ("response_mask", "everything"), ("weights", "token_advantages"))
    assert counts.tokens["everything"] == int(data.lengths.sum()) - len(data)
    masks = [m[1:].bool() for m in data.to_lists("response_mask")]
    present = np.array([bool(m.any()) for m in masks])
    assert counts.sums["weights"] == pytest.approx(float(data["weights"][present].sum()))
    expected = sum(float(a[1:][m].sum()) for a, m in zip(data.to_lists("token_advantages"), masks, strict=True))
    assert counts.sums["token_advantages"] == pytest.approx(expected)
