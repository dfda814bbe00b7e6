"""Advantages of tokens, running moments and the KL coefficient: beside ROLL's functions, and through whole jobs.

The numbers were made once by running ROLL 8eb27cc in float64, padded, on `waves.batch()`: roll/utils/functionals.py
(compute_approx_kl, compute_reinforce_return, masked_whiten, reward_norm, RunningMoments), roll/utils/kl_controller.py.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from roll_batching.errors import DataError
from roll_batching.jobs.config.diagnostics import ConfigFileError
from roll_batching.jobs.config.loader import config_from_dict
from roll_batching.jobs.objectives.from_config import advantages_of
from roll_batching.jobs.objectives.stateful import CompositeState, KlCoefficient, RunningMoments
from roll_batching.jobs.objectives.token_rewards import TokenRewards, discounted, token_rewards
from roll_batching.jobs.observe.run_files import read_metrics
from roll_batching.samples.token_fields import counted_positions
from tests.jobs.rl.jobs import settings, write_data
from tests.losses.waves import batch, wave
from tests.support.ranks import run_ranks

ALONE = SimpleNamespace(host_group=None, is_replica_leader=True)
CASES = {
    "kl": ({"estimator": "k1"}, 1.0, (10.06305102, 4.61205288, -4.943938878), -0.002894061821, 0.19968),
    "kl, discounted": ({"estimator": "k1"}, 0.9, (5.924131731, 3.642335228, -2.84222779), -0.002894061821, 0.19968),
    "k3, discounted, whitened": (
        {"estimator": "k3", "whiten": True},
        0.95,
        (0.0, 5.656854195, -4.946061818),
        0.2315764245,
        0.20032,
    ),
    "discounted": (None, 0.9, (6.117557015, 3.711392879, -2.447070993), None, None),
}


@pytest.mark.parametrize("name", CASES)
def test_token_advantages_are_rolls(name: str) -> None:
    options, gamma, (total, norm, product), divergence, coefficient = CASES[name]
    kl = None if options is None else KlCoefficient(0.2, target=0.05, horizon=1000)
    home, row = TokenRewards(gamma=gamma, kl=kl, **options or {})(batch(), ALONE, np.full(80, ""))
    found = home["advantages"].double()
    assert home.schema["advantages"].kind == "next_token"
    assert (float(found.sum()), float(found.norm()), float(found @ wave(0.37))) == pytest.approx(
        (total, norm, product), abs=2e-6
    )
    if kl is not None:
        assert row == {"reward_kl": pytest.approx(divergence, rel=1e-7), "reward_kl_coef": 0.2}
        assert kl.value == pytest.approx(coefficient, rel=1e-12)


def test_verls_reinforce_plus_plus_with_a_discount() -> None:
    """verl b178a3c, compute_reinforce_plus_plus_outcome_advantage, gamma 0.9: samples 0, 5 and 8 of test_baselines."""
    from roll_batching.samples import SampleBatch
    from tests.jobs.objectives.test_baselines import REWARDS, TOKENS

    rows = [torch.ones(n + 1, dtype=torch.bool) for n in TOKENS.tolist()]
    for row in rows:
        row[0] = False  # the prompt, one token
    data = SampleBatch.from_lists(
        {"input_ids": [row.long() for row in rows], "response_mask": rows, "advantages": torch.from_numpy(REWARDS)},
        {"input_ids": "token", "response_mask": "token", "advantages": "sample"},
        ids=range(len(rows)),
    )
    home, _ = TokenRewards(gamma=0.9, whiten=True)(data, ALONE, np.full(len(data), ""))
    found = home.to_lists("advantages")
    assert found[0].tolist() == pytest.approx([1.664534071, 1.949925376, 2.267026825, 0], abs=1e-6)
    assert found[5].tolist() == pytest.approx([-0.90398767] * 6 + [0], abs=1e-6)
    assert found[8].tolist() == pytest.approx([-0.2104868, -0.1334311, -0.0478138, 0.0473167, 0], abs=1e-6)


def test_returns_are_the_sums_of_what_follows() -> None:
    data, spent = batch(), wave(0.5).abs()
    counted = counted_positions(data)
    rewards = token_rewards(data, counted, torch.where(counted, spent, 0.0))
    found, advantages = discounted(data, rewards, 0.8), data["advantages"]
    for i, (start, length) in enumerate(zip(data.offsets.tolist(), data.lengths.tolist(), strict=False)):
        places = [p for p in range(start, start + length) if counted[p]]
        for here in places:
            later = [p for p in places if p >= here]
            expected = float(advantages[i]) * 0.8 ** (places[-1] - here)
            expected -= sum(float(spent[p]) * 0.8 ** (p - here) for p in later)
            assert float(found[here]) == pytest.approx(expected, rel=1e-12)


def test_rewards_by_running_moments_are_rolls_and_go_on_from_a_checkpoint() -> None:
    def estimator():
        keys = {"adv_estimator": "reinforce", "norm_mean_type": "running", "norm_std_type": "running"}
        return advantages_of(config_from_dict(keys))

    def step(estimate, rewards):
        return estimate(np.array(rewards), 2, response_tokens=np.ones(4, dtype=np.int64)).tolist()

    first = estimator()
    assert step(first, [1.0, 0, 0.25, 0.5]) == pytest.approx([1.317461928, -1.024692611, -0.439153976, 0.146384659])
    saved = json.loads(json.dumps(CompositeState(RunningMoments(), **first.stateful_parts()).state_dict()))
    again = estimator()
    CompositeState(RunningMoments(), **again.stateful_parts()).load_state_dict(saved)
    expected = [0.976640783, 1.923686391, -0.917450433, 0.029595175]
    later = step(first, [2.0, 3, 0, 1])
    assert later == pytest.approx(expected, rel=1e-6), "ROLL keeps its moments in fp32"
    assert step(again, [2.0, 3, 0, 1]) == later


def test_a_coefficient_that_was_not_saved_cannot_go_on() -> None:
    with pytest.raises(DataError, match="the checkpoint has no reward_kl"):
        CompositeState(RunningMoments(), reward_kl=KlCoefficient(0.1)).load_state_dict(RunningMoments().state_dict())


REFUSED = {
    "no reference": ({}, "needs the role `reference`"),
    "no old log-probs": ({"reference": {}, "actor_train": {"logprob_plan": "none"}}, "reads old log-probs"),
    "idle groups": ({"reference": {}, "drop_zero_advantage_groups": True}, "still learn from add_token_level_kl"),
}


@pytest.mark.bad_input
@pytest.mark.parametrize("name", REFUSED)
def test_what_a_divergence_in_the_reward_needs(name: str) -> None:
    keys, words = REFUSED[name]
    with pytest.raises(ConfigFileError, match=words):
        config_from_dict({"add_token_level_kl": True, **keys})


def test_what_has_no_effect_is_told() -> None:
    told = config_from_dict({"init_kl_coef": 0.0, "target_kl": 0.1}).notices
    assert [notice.text for notice in told] == ["has no effect: add_token_level_kl is false"] * 2


JOBS = {
    "kl": {
        "adv_estimator": "reinforce",
        "norm_mean_type": "running",
        "norm_std_type": "running",
        "gamma": 0.95,
        "whiten_advantages": True,
        "add_token_level_kl": True,
        "target_kl": 0.01,
        "kl_horizon": 50,
        "reference": {},
    },
    "remax": {
        "adv_estimator": "remax",
        "loss_function": "clip_cov",
        "loss_args": {"engine_ratio_cap": 2.0, "share": 0.25, "lowest": -100, "highest": 100},
    },
}


def both_jobs(payload):
    """On a rank: a job, and the same from its first checkpoint on; then one with greedy answers."""
    from roll_batching.jobs.config import JobConfig
    from roll_batching.jobs.job import run_job

    for job in payload:
        run_job(JobConfig.model_validate(job))


def slow_at_first(completion, folder: str) -> float:
    """The first call on a rank, for one of the greedy answers, takes a second."""
    called = Path(folder) / f"called-{os.environ['RANK']}"
    if not called.exists():
        called.touch()
        time.sleep(1)
    return completion.tokens / 10


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2])
def test_jobs_learn_from_tokens_and_resume(tmp_path, ranks: int) -> None:
    """The row of step 2 is the same whether step 1 was made by this process or came from a checkpoint."""
    write_data(tmp_path)
    base = {"warmup": None, "eval_samples": 0, "reward_function": "tests.jobs.rl.jobs:length", "max_steps": 2}
    whole = settings(tmp_path, **base, **JOBS["kl"], exp_name="whole", save_steps=1)
    rest = whole | {"exp_name": "rest", "resume_from_checkpoint": str(tmp_path / "runs/whole/checkpoints/rl-000001")}
    slow = {"reward_function": f"{__name__}:slow_at_first", "reward_args": {"folder": str(tmp_path)}, "max_steps": 1}
    greedy = settings(tmp_path, **base | slow, **JOBS["remax"], exp_name="greedy")
    run_ranks(ranks, "tests.jobs.objectives.test_token_rewards:both_jobs", [whole, rest, greedy])
    first, second = read_metrics(tmp_path / "runs/whole/metrics.jsonl")
    (again,) = [row for row in read_metrics(tmp_path / "runs/rest/metrics.jsonl") if row["step"] == 2]
    assert first["reward_kl"] == pytest.approx(0, abs=1e-6) and first["reward_kl_coef"] == 0.2
    assert second["reward_kl_coef"] == pytest.approx(0.2 * (1 - 0.2 * 12 / 50))
    for name in ("loss", "grad_norm", "reward", "reward_kl", "reward_kl_coef"):
        assert again[name] == second[name] and np.isfinite(second[name])
    (row,) = read_metrics(tmp_path / "runs/greedy/metrics.jsonl")
    assert np.isfinite(row["loss"]) and row["grad_norm"] > 0 and 0 <= row["clip_fraction"] <= 1
    assert row["held_back"] == pytest.approx(0.25, abs=0.02)
    assert row["reward_seconds"] >= 1, "scoring the greedy answers is part of it"


def fails_at_first(completion, folder: str) -> float:
    """The first call, for one of the greedy answers, fails."""
    called = Path(folder) / "called"
    if not called.exists():
        called.touch()
        raise ValueError("no reward for this one")
    return completion.tokens / 10


@pytest.mark.bad_input
@pytest.mark.parametrize("policy", ["drop", pytest.param("zero", marks=pytest.mark.slow)])
def test_a_greedy_answer_without_a_reward(tmp_path, policy: str) -> None:
    """Its prompt's responses have nothing to be compared with: they are left out, or compared with 0."""
    write_data(tmp_path)
    job = settings(tmp_path, warmup=None, max_steps=1, eval_samples=0, rollout_samples=-1, adv_estimator="remax")
    job |= {"reward_failure": policy, "reward_function": f"{__name__}:fails_at_first"}
    job |= {"reward_args": {"folder": str(tmp_path)}}
    (seen,) = run_ranks(1, "tests.jobs.rl.jobs:run_and_count", job)
    (row,) = read_metrics(tmp_path / "runs/tiny/metrics.jsonl")
    said = [json.loads(line) for line in (tmp_path / "runs/tiny/rollouts.jsonl").read_text().splitlines()]
    assert row["baseline_failures"] == 1 and not any(line["failed"] for line in said)
    assert row["reward_failures"] == (3 if policy == "drop" else 0)
    if policy == "drop":
        tokens = [line["response_tokens"] for line in said]  # of four prompts, three responses each
        counted = sum(tokens for _, tokens in seen)
        assert counted in [sum(tokens) - sum(tokens[first : first + 3]) for first in range(0, 12, 3)]
