"""Any random re-partition of a mini-batch changes loss and gradients by rounding only; through the real strategy."""

from __future__ import annotations

import random
from typing import Any

import pytest

from tests.losses.steps import CAP, gap, make_strategy, step
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.loss

HERE = "tests.losses.test_partitions:"
PARTITIONS = 4
SAMPLES = 11


class Both:
    """The sum of two losses that read the same."""

    needs, masks = frozenset({"log_probs", "entropy"}), ("response_mask",)

    def __init__(self, first: Any, second: Any) -> None:
        self.first, self.second = first, second

    def token_loss(self, tokens: Any) -> Any:
        from roll_batching.losses import LossOutput

        first, second = self.first.token_loss(tokens), self.second.token_loss(tokens)
        return LossOutput(first.loss + second.loss, {**first.metrics, **second.metrics})


def losses() -> dict[str, Any]:
    from roll_batching.losses import (
        CISPOLoss,
        ClipCovLoss,
        DPOLoss,
        GMPOLoss,
        GPGLoss,
        IPOLoss,
        KlCovLoss,
        KTOLoss,
        PolicyLoss,
        SAPOLoss,
        SFTLoss,
        TOPRLoss,
        constant_mean,
        constant_sum,
    )

    icepop = {"engine_correction": "mask", "engine_ratio_min": 0.8, "engine_ratio_cap": 1.2}
    narrow = {"engine_correction": "mask_sequences", "engine_ratio_min": 0.95, "engine_ratio_cap": 1.05}

    return {
        "token-mean": PolicyLoss(kl_coef=0.05, entropy_coef=0.02),
        "seq-mean-token-mean": PolicyLoss(aggregation="sequence_mean"),
        "seq-mean-token-sum": PolicyLoss(aggregation="sequence_sum", dual_clip=2.0),
        "Dr. GRPO": PolicyLoss(aggregation=constant_mean(40), engine_ratio_cap=1.5),
        "token-sum": PolicyLoss(aggregation=constant_sum(40), entropy_coef=0.02),
        "a user's own": PolicyLoss(aggregation=lambda view, x: view.sample_mean(view.segment_sum(x).tanh())),
        "GSPO, weighted": PolicyLoss(ratio="sequence", aggregation="sequence_mean", sample_weights="weights"),
        "CISPO, IcePop, Clip-Cov, KL-Cov": Both(
            CISPOLoss(**icepop, kl_coef=0.1, kl_gradient="straight_through"),
            Both(ClipCovLoss(dual_clip=2.0), KlCovLoss()),
        ),
        "SAPO, masked, GMPO": Both(
            SAPOLoss(**narrow, aggregation="sequence_mean"),
            GMPOLoss(aggregation="sequence_mean", kl_coef=0.1, kl_estimator="abs", kl_gradient="importance"),
        ),
        "GPG, TOPR": Both(GPGLoss(), TOPRLoss(negative_weight=0.5)),
        "rollout-mean": PolicyLoss(aggregation="rollout_mean"),
        "rollout-token-mean": SFTLoss(aggregation="rollout_token_mean"),
        "SFT": SFTLoss(),
        "KTO": KTOLoss(undesirable_weight=1.5),
        "DPO": DPOLoss(),
        "IPO, SFT": IPOLoss(average_log_probs=True, sft_coef=0.1),
    }


def batch() -> Any:
    import torch

    from tests.support.models import random_batch

    data = random_batch(17, SAMPLES + 1, 30)
    data = data.select([i for i, n in enumerate(data.lengths.tolist()) if n > 1][: SAMPLES - 1])
    g = torch.Generator().manual_seed(1)
    mask = data["response_mask"].clone()
    mask[data.offsets[:-1] + 1] = True  # every response has a token
    extra = {
        "weights": torch.rand(len(data), generator=g) + 0.1,
        "rewards": torch.rand(len(data), generator=g) - 0.5,
        "held_back": torch.rand(data.num_tokens, generator=g) < 0.2,
        "pair": torch.arange(len(data)) // 2,
        "chosen": torch.arange(len(data)) % 2 == 0,
        "rollout_ids": torch.arange(len(data)) ** 2 % 7,
        "desirable": torch.arange(len(data)) % 3 == 0,
        "reference_point": torch.full((len(data),), 0.7),
        "rollout_log_probs": data["old_log_probs"] + 0.2 * torch.randn(data.num_tokens, generator=g),
        "train_infer_is_weight": 0.9 + 0.2 * torch.rand(data.num_tokens, generator=g),
    }
    samples, predictions = (
        ("weights", "rewards", "pair", "chosen", "desirable", "reference_point", "rollout_ids"),
        ("rollout_log_probs", "held_back", "train_infer_is_weight"),
    )
    kinds = dict.fromkeys(samples, "sample") | dict.fromkeys(predictions, "next_token")
    return data.with_fields(extra | {"response_mask": mask}, kinds | {"response_mask": "token"})


def random_plan(strategy: Any, data: Any, seed: int, pairs: bool) -> Any:
    """Random bins under the cap for every data-parallel rank, some left empty, in random order."""
    from roll_batching.planning import Plan
    from roll_batching.samples import gather_lengths
    from tests.losses.steps import mine

    table = gather_lengths(mine(strategy, data))
    r = random.Random(seed)
    at = {sample: i for i, sample in enumerate(table.ids.tolist())}
    ids = data.ids.tolist()
    units = [[at[a], at[b]] for a, b in zip(ids[::2], ids[1::2], strict=True)] if pairs else [[at[i]] for i in ids]
    for unit in units:
        r.shuffle(unit)
    r.shuffle(units)
    bins: list[list[list[int]]] = [[[], []] for _ in range(strategy.layout.dp_size)]

    def tokens(samples: list[int]) -> int:  # with room for any layout's alignment
        return sum(-(-int(table.lengths[i]) // 4) * 4 for i in samples)

    for unit in units:
        room = [b for rank in bins for b in rank if tokens(b) + tokens(unit) <= CAP]
        if not room or r.random() < 0.2:
            room = [[] for _ in bins]
            for rank, new in zip(bins, room, strict=True):
                rank.insert(r.randint(0, len(rank)), new)
        r.choice(room).extend(unit)
    constraints = strategy.plan(table).constraints
    return Plan.from_bins(bins, table.lengths, constraints, ids=table.ids, location=table.location)


def repartition(megatron: dict[str, Any]) -> dict[str, tuple[float, float]]:
    strategy = make_strategy(megatron=megatron)
    data, worst = batch(), {}
    for name, loss in losses().items():
        plans = [random_plan(strategy, data, seed, hasattr(loss, "per_pair")) for seed in range(PARTITIONS)]
        assert len({plan.fingerprint for plan in plans}) == PARTITIONS
        first, *others = [step(strategy, data, loss, plan) for plan in plans]
        for other in others:
            for key, value in first[0].metrics.items():
                assert abs(other[0].metrics[key] - value) < 1e-4 * max(1.0, abs(value)), (name, key)
        gaps = [gap(other, first) for other in others]
        worst[name] = (max(g[0] for g in gaps), max(g[1] for g in gaps), first[0].loss)
    return worst


LAYOUTS = {
    "one rank": (1, {}),
    "data 2": (2, {}),
    "context 2, micro-batch mean": (2, {"context_parallel_size": 2, "calculate_per_token_loss": False}),
    "pipeline 2": (2, {"pipeline_model_parallel_size": 2}),
}
found: dict[str, dict[str, tuple[float, float, float]]] = {}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_random_partition_changes_rounding_only(layout: str, report) -> None:
    ranks, megatron = LAYOUTS[layout]
    found[layout] = run_ranks(ranks, HERE + "repartition", megatron)[0]
    for name, (loss, gradient, _) in found[layout].items():
        report(f"{name:20} {layout:28} {PARTITIONS} partitions: loss {loss:.1e}, gradient {gradient:.1e}")
    assert max(loss for loss, _, _ in found[layout].values()) < 1e-5
    assert max(gradient for _, gradient, _ in found[layout].values()) < 1e-5


def test_and_so_does_the_layout() -> None:
    missing = [layout for layout in LAYOUTS if layout not in found]
    if missing:
        pytest.skip(f"runs after the partitions of {', '.join(missing)}")
    for name in losses():
        values = [found[layout][name][2] for layout in LAYOUTS]
        assert max(values) - min(values) < 1e-5 * max(abs(values[0]), 1e-2), name
