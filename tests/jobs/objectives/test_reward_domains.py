"""Statistics of rewards: of one domain each, and over the tokens that the loss counts.

The numbers were made by running ROLL 8eb27cc, roll/utils/functionals.py: reward_postprocess, expand_to_token_level and
compute_advantage of each domain by itself, as roll/pipeline/rlvr/rlvr_pipeline.py calls them.
"""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from roll_batching.errors import DataError
from roll_batching.jobs.config import config_from_dict
from roll_batching.jobs.config.rules import missing_for_a_run
from roll_batching.jobs.objectives.from_config import advantages_of
from roll_batching.jobs.objectives.stateful import DomainMoments, RunningMoments
from roll_batching.jobs.objectives.token_rewards import TokenRewards
from roll_batching.jobs.rewards import Completion
from roll_batching.samples import SampleBatch
from tests.jobs.rl.jobs import settings, write_data
from tests.support.ranks import run_ranks

ALONE = SimpleNamespace(host_group=None, is_replica_leader=True)
BY_BATCH = {"adv_estimator": "reinforce", "norm_mean_type": "batch", "norm_std_type": "batch"}
MATH, CODE = [1.0, 0.0, 0.0, 0.0], [10.0, 0.0, 5.0, 10.0]
DOMAINS = np.array(["math"] * 2 + ["code"] * 4 + ["math"] * 2)
REWARDS = np.array([*MATH[:2], *CODE, *MATH[2:]])
TOKENS = np.array([4, 2, 2, 6, 1, 3, 5, 3])
MASKED = np.array([False, False, False, True, False, False, True, False])
OF_ROLL = {
    "batch": (BY_BATCH, [1.054092646, -0.843273997, 0.408248186, 0, -2.041241646, 0.408248186, 0, -0.843273997]),
    "group": (
        {"adv_estimator": "reinforce", "norm_mean_type": "group"},
        [0.933333397, -1.466666698, 0.912870884, 0, -1.825741768, 0, 0, -0.266666681],
    ),
}


def estimate(keys: dict[str, Any], rewards: np.ndarray, group: int, **given: Any) -> list[float]:
    found = advantages_of(config_from_dict(keys))(rewards, group, **given)
    return found.tolist()


def test_math_beside_code_has_a_mean_of_its_own() -> None:
    math, code = np.array([1.0, 0.0] * 256), np.array([10.0, 0.0] * 1024)
    domains = np.array(["math"] * 512 + ["code"] * 2048)
    tokens = np.ones(2560, dtype=np.int64)
    found = estimate(BY_BATCH, np.concatenate([math, code]), 2, response_tokens=tokens, domains=domains)
    assert found[:2] == pytest.approx([0.9990209937, -0.9990209937], abs=1e-6)
    together = estimate(BY_BATCH, np.concatenate([math, code]), 2, response_tokens=tokens)
    assert together[0] == pytest.approx(-0.6422321200, abs=1e-6), "what one mean for both domains would be"


def test_whitening_counts_no_masked_response() -> None:
    keys = {"adv_estimator": "reinforce", "whiten_advantages": True}
    rewards, tokens = np.array([1.0, 0.0, 0.0]), np.array([247, 100, 547])
    assert estimate(keys, rewards, 1, response_tokens=tokens) == pytest.approx([1.6175606, -0.6175232, -0.6175232])
    counted = tokens * np.array([1, 1, 0])
    assert estimate(keys, rewards, 1, response_tokens=counted)[:2] == pytest.approx([0.6353673, -1.5693570])


@pytest.mark.parametrize("name", OF_ROLL)
def test_statistics_are_of_a_domain_and_of_unmasked_tokens(name: str) -> None:
    keys, expected = OF_ROLL[name]
    keys = keys | {"whiten_advantages": True}
    found = estimate(keys, REWARDS, 2, response_tokens=np.where(MASKED, 0, TOKENS), domains=DOMAINS)
    assert np.array(found)[~MASKED] == pytest.approx(np.array(expected)[~MASKED], abs=1e-6)


def test_discounted_advantages_are_whitened_by_domain() -> None:
    """The samples as a rank may hold them: not in the order of their ids."""
    ids = [5, 0, 7, 2, 6, 3, 1, 4]
    shaped = estimate(BY_BATCH, REWARDS, 2, response_tokens=TOKENS, domains=DOMAINS)
    rows = [torch.ones(int(TOKENS[i]) + 1, dtype=torch.bool) for i in ids]
    masks = [row & (not MASKED[i]) for row, i in zip(rows, ids, strict=True)]
    for mask in masks:
        mask[0] = False  # the prompt, one token
    fields = {"input_ids": [row.long() for row in rows], "response_mask": masks}
    fields["advantages"] = torch.tensor([shaped[i] for i in ids])  # type: ignore[assignment]
    kinds = {"input_ids": "token", "response_mask": "token", "advantages": "sample"}
    home, _ = TokenRewards(gamma=0.9, whiten=True)(SampleBatch.from_lists(fields, kinds, ids=ids), ALONE, DOMAINS)
    found = dict(zip(ids, (row[:-1].tolist() for row in home.to_lists("advantages")), strict=True))
    assert found[0] == pytest.approx([0.835516155, 0.966259897, 1.111530781, 1.272942781], abs=1e-6)
    assert found[7] == pytest.approx([-0.77698952, -0.825413108, -0.879217088], abs=1e-6)
    assert found[2] == pytest.approx([0.361800015, 0.55504632], abs=1e-6)
    assert found[4] == pytest.approx([-2.021571159], abs=1e-6)
    assert found[3] == [0] * 6 and found[6] == [0] * 5


def test_running_moments_are_of_a_domain_and_go_on_from_a_checkpoint() -> None:
    keys = {"adv_estimator": "reinforce", "norm_mean_type": "running", "norm_std_type": "running"}
    rewards = np.array([1.0, 0, 0, 0, 10.0, 0, 0, 5.0])
    given = {"response_tokens": np.ones(8, dtype=np.int64), "domains": np.array(["math"] * 4 + ["code"] * 4)}
    first, again = advantages_of(config_from_dict(keys)), advantages_of(config_from_dict(keys))
    expected = [
        1.49999702,
        -0.499998987,
        -0.499998987,
        -0.499998987,
        1.305582166,
        -0.783349276,
        -0.783349276,
        0.2611164,
    ]
    assert first(rewards, 2, **given).tolist() == pytest.approx(expected, abs=1e-6)
    saved = json.loads(json.dumps(first.stateful_parts()["reward_moments"].state_dict()))
    again.stateful_parts()["reward_moments"].load_state_dict(saved)
    assert again(rewards + 1, 2, **given).tolist() == first(rewards + 1, 2, **given).tolist()


@pytest.mark.bad_input
def test_moments_of_all_domains_together_are_refused() -> None:
    with pytest.raises(DataError, match="one mean reward for all domains: it was saved by an earlier version"):
        DomainMoments().load_state_dict(RunningMoments().state_dict())


@pytest.mark.parametrize("keys", [BY_BATCH, BY_BATCH | {"norm_mean_type": "running", "norm_std_type": "running"}])
def test_a_domain_with_one_response_in_a_step_is_not_divided(keys: dict[str, Any]) -> None:
    given = {"response_tokens": np.ones(3, dtype=np.int64), "domains": np.array(["math", "code", "math"])}
    assert estimate(keys, np.array([1.0, 5.0, 0.0]), 1, **given) == pytest.approx([0.707106, 0, -0.707106], abs=1e-5)


@pytest.mark.bad_input
def test_a_step_of_one_response_has_no_deviation(tmp_path) -> None:
    job = settings(tmp_path, rollout_batch_size=1, num_return_sequences_in_group=1, **BY_BATCH)
    (problem,) = missing_for_a_run(config_from_dict(job))
    assert problem.path == ("norm_std_type",) and "a step has one response, which has no deviation" in problem.message


@pytest.mark.parametrize("name", ["opo", "reinforce_plus_plus", "rloo"])
def test_a_domain_whose_responses_are_all_masked_ends_no_job(name: str) -> None:
    """Its advantages are read by nothing; those of the others are what they would be without it."""
    counted = np.where(DOMAINS == "code", 0, TOKENS)
    keys = {"adv_estimator": name} | ({} if name == "reinforce_plus_plus" else {"whiten_advantages": True})
    found = np.array(estimate(keys, REWARDS, 2, response_tokens=counted, domains=DOMAINS))
    here = DOMAINS == "math"
    assert np.isfinite(found).all()
    assert found[here].tolist() == estimate(keys, REWARDS[here], 2, response_tokens=TOKENS[here])


def test_an_estimator_of_ones_own_sees_one_domain_at_a_time(monkeypatch) -> None:
    from roll_batching.jobs.objectives import from_config

    def own(rewards, group_size, *, response_tokens):
        return rewards / rewards.max() if rewards.max() < 5 else rewards[:-1]

    monkeypatch.setattr(from_config.ADVANTAGE_ESTIMATORS, "load", lambda name: own)
    with pytest.raises(DataError, match="the advantages of own:own for code have shape"):
        estimate({"adv_estimator": "own:own"}, REWARDS, 2, response_tokens=TOKENS, domains=DOMAINS)


# ---- whole jobs


def odd(completion: Completion, most: float) -> float:
    return most * (completion.tokens % 2)


@pytest.mark.parametrize("gamma", [1.0, pytest.param(0.9, marks=pytest.mark.slow)])
def test_a_job_of_two_domains_that_masks_and_whitens(tmp_path, gamma: float) -> None:
    """What its loss reads is what ROLL's formulas give for each domain by itself."""
    write_data(tmp_path)
    lines = [json.loads(line) for line in (tmp_path / "prompts.jsonl").read_text().splitlines()]
    tagged = [{**line, "tag": "ab"[i % 2]} for i, line in enumerate(lines)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in tagged))
    keys = BY_BATCH | {"whiten_advantages": True, "max_len_mask": True, "max_steps": 1, "rollout_samples": -1}
    job = settings(tmp_path, warmup=None, eval_samples=0, response_length=16, gamma=gamma, **keys)
    del job["reward_function"]
    job["rewards"] = {
        name: {"reward_function": f"{__name__}:odd", "reward_args": {"most": most}, "tag_included": [tag]}
        for name, most, tag in (("math", 1.0, "a"), ("code", 10.0, "b"))
    }
    (kept,) = run_ranks(1, "tests.jobs.rl.jobs:run_and_keep", job)
    said = [json.loads(line) for line in (tmp_path / "runs/tiny/rollouts.jsonl").read_text().splitlines()]
    assert {line["finished"] for line in said} == {True, False} and len({line["domain"] for line in said}) == 2
    for domain in ("math", "code"):
        here = [line for line in said if line["domain"] == domain]
        rewards = torch.tensor([line["reward"] for line in here], dtype=torch.float64)
        shaped = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
        rows = [
            shaped[i] * gamma ** torch.arange(line["response_tokens"] - 1, -1, -1, dtype=torch.float64)
            for i, line in enumerate(here)
            if line["finished"]
        ]
        tokens = torch.cat(rows)
        whitened = [(row - tokens.mean()) * torch.rsqrt(tokens.var() + 1e-8) for row in rows]
        for line, row in zip([line for line in here if line["finished"]], whitened, strict=True):
            assert kept[line["id"]] == pytest.approx(row.tolist(), abs=1e-5), (domain, line)
