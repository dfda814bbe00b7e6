"""One batch, one set of weights: padded, dynamic and packed agree with each other and with a reference.

The reference shares no code with the package: see `tests/support/reference.py`.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support.exact import limit_of
from tests.support.models import MODES
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.equality

FEW, ALL = 14, 50
"""Batches; the first 14 have all sizes."""
CAP = 48


def _sizes(seed: int) -> int:
    return 1 + (seed * 5) % 14


def write_references(payload: tuple[str, int]) -> None:
    """Loss and gradients of every batch in fp64, one process, stock attention; and their rounding in fp32.

    Losses are compared relative to the mean absolute value of their terms, which is returned too: positive and negative
    terms cancel, and what is left may be far below their rounding.
    """
    from roll_batching.distributed.parallel_layout import make_layout, start_processes
    from roll_batching.planning import ParallelDims
    from tests.support.models import random_batch, worst_difference
    from tests.support.reference import gradients, policy_loss, stock_model

    folder, count = payload
    make_layout(ParallelDims(), start_processes())
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    model_parallel_cuda_manual_seed(0)
    model, exact = stock_model(), stock_model().double()
    terms = {"clip": (0.2, 0.28), "kl": 0.05, "entropy": 0.02}
    for seed in range(count):
        batch = random_batch(seed, _sizes(seed), CAP)
        with torch.no_grad():
            size = max(float(policy_loss(exact, batch, absolute=True, **terms)), 1e-3)
        loss, single = policy_loss(exact, batch, **terms), policy_loss(model, batch, **terms)
        expected = gradients(exact, loss)
        rounding = abs(float(loss - single)) / size, worst_difference(gradients(model, single), expected)[0]
        torch.save((float(loss), size, expected, rounding), Path(folder) / f"reference{seed}.pt")


Worst = tuple[float, float, str]


def compare_modes(payload: tuple[str, int]) -> dict[tuple[str, bool], Worst]:
    """Worst differences of loss and gradients, over their limits, and the worst gradient, per mode and loss scaling."""
    from roll_batching.losses import PolicyLoss
    from roll_batching.samples import distribute, gather_lengths
    from roll_batching.strategy import MegatronTrainStrategy
    from tests.support.models import fill, random_batch, whole_gradients, worker_config, worst_difference

    folder, count = payload
    worst: dict[tuple[str, bool], Worst] = {}
    loss = PolicyLoss(clip_low=0.2, clip_high=0.28, kl_coef=0.05, kl_bound=None, entropy_coef=0.02)
    for per_token in (True, False):
        strategies = {}
        for mode in MODES:
            config = worker_config(mode, CAP, megatron={"calculate_per_token_loss": per_token})
            strategies[mode] = MegatronTrainStrategy(config)
            strategies[mode].initialize()
        for seed in range(count):
            expected_loss, size, expected, (loss_rounding, rounding) = torch.load(Path(folder) / f"reference{seed}.pt")
            whole = random_batch(seed, _sizes(seed), CAP)
            for mode, strategy in strategies.items():
                dp = strategy.layout
                local = whole.select(torch.arange(dp.dp_rank, len(whole), dp.dp_size))
                plan = strategy.plan(gather_lengths(local))
                fill(strategy.chunks, 61)
                result = strategy.train_step(distribute(local, plan), plan, loss)
                found = whole_gradients(strategy.chunks, 61, 0, False)
                gap, name = worst_difference(found, expected)
                gap = max(gap, found["spread"])
                loss_gap = abs(result.loss - expected_loss) / size / limit_of(loss_rounding)
                before = worst.get((mode, per_token), (0.0, 0.0, ""))
                where = f"{gap:.1e}, {name} of batch {seed}"
                worst[mode, per_token] = (max(before[0], loss_gap), *max(before[1:], (gap / limit_of(rounding), where)))
    return worst


@pytest.mark.parametrize("count", [FEW, pytest.param(ALL, marks=pytest.mark.slow)])
@pytest.mark.parametrize("dp_size", [1, 2])
def test_modes_equal_the_reference(dp_size: int, count: int, tmp_path: Path, report) -> None:
    payload = (str(tmp_path), count)
    run_ranks(1, "tests.strategy.test_equality:write_references", payload)
    worst = run_ranks(dp_size, "tests.strategy.test_equality:compare_modes", payload)[0]
    for (mode, per_token), (loss_gap, gradient_gap, where) in worst.items():
        scaling = "per-token" if per_token else "micro-batch mean"
        report(
            f"{mode:8} dp={dp_size} {scaling:16} worst of {count} batches: loss {loss_gap:.2f} of the limit, gradient "
            f"{gradient_gap:.2f} ({where})"
        )
    assert len(worst) == 6
    assert max(max(loss, gradient) for loss, gradient, _ in worst.values()) < 1
