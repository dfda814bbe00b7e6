"""Generalised advantage estimation: beside sums written out in float64, verl's numbers, and over two ranks.

verl's numbers were made once by running its compute_gae_advantage_return and masked_whiten in float64, padded, on
`waves.batch()` with the values `wave(0.29) / 2`. ROLL's compute_gae_advantage_return gives the same for responses
without gaps where the values behind a response are set to 0, which its caller does not do.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from roll_batching.errors import DataError
from roll_batching.jobs.objectives.stateful import KlCoefficient
from roll_batching.jobs.objectives.token_rewards import TokenRewards, generalised_advantages, token_rewards
from roll_batching.samples.token_fields import counted_positions
from tests.losses.waves import batch, wave
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.loss

ALONE = SimpleNamespace(host_group=None, is_replica_leader=True)
HERE = "tests.jobs.objectives.test_gae:"


def valued(data: Any = None) -> Any:
    data = batch() if data is None else data
    return data.with_fields({"old_values": wave(0.29, n=data.num_tokens) / 2}, {"old_values": "next_token"})


@pytest.mark.parametrize(("gamma", "lambd"), [(1.0, 1.0), (0.9, 0.8), (0.99, 0.0)])
def test_advantages_are_the_sums_of_the_definition(gamma: float, lambd: float) -> None:
    """A_t = sum over l of (gamma lambda)^l delta_{t+l}, over the counted tokens of each sample."""
    data, spent = valued(), wave(0.5).abs() / 3
    counted = counted_positions(data)
    rewards = token_rewards(data, counted, torch.where(counted, spent, 0.0))
    found = generalised_advantages(data, counted, rewards, data["old_values"].double(), gamma, lambd)
    values, last = data["old_values"].tolist(), data["advantages"].tolist()
    gaps = 0
    for i, (start, length) in enumerate(zip(data.offsets.tolist(), data.lengths.tolist(), strict=False)):
        places = [p for p in range(start, start + length) if counted[p]]
        gaps += places != list(range(places[0], places[-1] + 1))
        deltas = []
        for n, place in enumerate(places):
            is_last = n == len(places) - 1
            reward = -float(spent[place]) + (last[i] if is_last else 0.0)
            deltas.append(reward + gamma * (0.0 if is_last else values[places[n + 1]]) - values[place])
        for n, place in enumerate(places):
            expected = sum((gamma * lambd) ** m * delta for m, delta in enumerate(deltas[n:]))
            assert float(found[place]) == pytest.approx(expected, rel=1e-12, abs=1e-14)
    assert gaps, "responses with tokens of an environment between them are among the samples"


PEER = {
    (1.0, 1.0): (5.525089534115959, -3.251818117401314, -3.741161966122862),
    (0.95, 0.9): (4.354925866587988, -0.5448521461279789, -0.8834310922107247),
}


@pytest.mark.parametrize("key", PEER)
def test_advantages_are_verls_whitened_or_not(key: tuple[float, float]) -> None:
    norm, product, whitened = PEER[key]
    gamma, lambd = key
    data = valued()
    plain, metrics = TokenRewards(gamma=gamma, lambd=lambd)(data, ALONE, np.full(80, ""))
    found = plain["advantages"].double()
    assert (float(found.norm()), float(found @ wave(0.37))) == pytest.approx((norm, product), abs=2e-6)
    white, _ = TokenRewards(gamma=gamma, lambd=lambd, whiten=True)(data, ALONE, np.full(80, ""))
    assert float(white["advantages"].double() @ wave(0.37)) == pytest.approx(whitened, abs=2e-6)
    counted = counted_positions(data)
    expected = torch.where(counted, found + data["old_values"], 0.0)
    for batch_ in (plain, white):  # the critic's target is neither whitened nor clipped
        assert torch.allclose(batch_["returns"].double(), expected, atol=1e-6)
    target, error = expected[counted], (expected - data["old_values"])[counted]
    share = 1 - float(error.var(correction=0) / target.var(correction=0))
    assert metrics["value_explained_variance"] == pytest.approx(share, abs=1e-6)


def test_the_divergence_from_the_reference_is_a_cost_of_each_token() -> None:
    data = valued()
    counted = counted_positions(data)
    kl = KlCoefficient(0.2)
    home, metrics = TokenRewards(gamma=0.9, lambd=0.8, kl=kl)(data, ALONE, np.full(80, ""))
    cost = torch.where(counted, 0.2 * (data["old_log_probs"] - data["ref_log_probs"]), 0.0)
    rewards = token_rewards(data, counted, cost)
    expected = generalised_advantages(data, counted, rewards, data["old_values"], 0.9, 0.8)
    assert torch.allclose(home["advantages"].double()[counted], expected[counted], atol=1e-6)
    assert {"reward_kl", "reward_kl_coef", "value_explained_variance"} == set(metrics)


def test_a_masked_sample_has_neither_advantages_nor_returns() -> None:
    mask = torch.ones(54, dtype=torch.bool)
    mask[:7] = False  # the first sample
    home, _ = TokenRewards(lambd=0.9, clip=0.5)(valued(batch(mask)), ALONE, np.full(80, ""))
    assert home["advantages"][:7].tolist() == home["returns"][:7].tolist() == [0.0] * 7
    assert home["advantages"].abs().max() <= 0.5 < home["returns"].abs().max()


def whiten_on_two_ranks(_: None) -> tuple[list[int], list[float], float]:
    import torch.distributed as dist

    dist.init_process_group("gloo")
    data, rank = valued(), dist.get_rank()
    own = data.select(torch.arange(rank, len(data), 2))
    layout = SimpleNamespace(host_group=dist.group.WORLD, is_replica_leader=True)
    home, metrics = TokenRewards(gamma=0.9, lambd=0.8, whiten=True)(own, layout, np.full(80, ""))
    rows = torch.cat(home.to_lists("advantages")).tolist()
    return own.ids.tolist(), rows, metrics["value_explained_variance"]


def test_whitening_is_over_the_samples_of_all_ranks() -> None:
    home, metrics = TokenRewards(gamma=0.9, lambd=0.8, whiten=True)(valued(), ALONE, np.full(80, ""))
    for ids, rows, explained in run_ranks(2, HERE + "whiten_on_two_ranks"):
        expected = torch.cat(home.select_ids(torch.tensor(ids)).to_lists("advantages"))
        assert rows == pytest.approx(expected.tolist(), abs=1e-6)
        assert explained == pytest.approx(metrics["value_explained_variance"], rel=1e-9)


@pytest.mark.bad_input
def test_returns_that_are_not_finite_are_an_error_that_names_the_sample() -> None:
    from roll_batching.losses import ValueLoss

    data = valued()
    home, _ = TokenRewards(lambd=1.0)(data, ALONE, np.full(80, ""))
    broken = home["returns"].clone()
    broken[12] = float("nan")  # of the third sample
    assert counted_positions(home)[12]
    with pytest.raises(DataError, match="returns of sample 20 is not finite"):
        ValueLoss().check(home.with_fields({"returns": broken}, {"returns": "next_token"}), [])
    with pytest.raises(DataError, match="needs the next_token field 'old_values'"):
        ValueLoss(clip=0.2).check(home.without("old_values"), [])
