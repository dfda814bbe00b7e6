"""Dynamic sampling: which groups train, on how many ranks whatever, what a checkpoint restores, and the limit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from roll_batching.errors import RankError
from roll_batching.jobs.config import ConfigFileError, JobConfig, config_from_dict
from roll_batching.jobs.observe.run_files import read_metrics
from roll_batching.jobs.rl.dynamic_sampling import sample_full_step, varied_groups
from roll_batching.jobs.rollouts.rollout import StepScores
from roll_batching.jobs.texts.epochs import epoch_order
from roll_batching.samples import FieldSpec, SampleBatch
from tests.jobs.observe.rows import TIMES
from tests.jobs.rl.jobs import run_straight_and_resumed, settings, write_data
from tests.support.ranks import run_ranks

RUN = "tests.jobs.rl.jobs:run"
HERE = "tests.jobs.rl.test_dynamic_sampling:"
OF_THE_SAMPLER = {"staleness_mean", "staleness_max", "dropped_samples", "queue_depth", "sampler_restarts"}
BASE: dict[str, Any] = {
    "warmup": None,
    "max_steps": 3,
    "eval_samples": 0,
    "rollout_samples": -1,
    "dynamic_sampling": True,
    "reward_function": HERE + "even_prompts_are_hopeless",
    "seed": 3,
}


# ---- rewards


def even_prompts_are_hopeless(completion: Any) -> float:
    """0 for prompts with an even first number; for others a number that differs between responses."""
    if is_hopeless(completion.prompt):
        return 0.0
    return completion.tokens + sum(map(ord, completion.response)) % 9973 / 1e4


def constant(completion: Any) -> float:
    return 0.1


def is_hopeless(prompt: str) -> bool:
    return int(prompt[2]) % 2 == 0


# ---- jobs


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_data(tmp_path)
    return tmp_path


def job_of(folder: Path, name: str = "tiny", **changes: Any) -> dict[str, Any]:
    return settings(folder, exp_name=name, **(BASE | changes))


def rows_of(folder: Path, name: str = "tiny") -> list[dict[str, Any]]:
    return read_metrics(folder / "runs" / name / "metrics.jsonl")


def trained(folder: Path, name: str = "tiny") -> dict[int, list[dict[str, Any]]]:
    """Lines of rollouts.jsonl by step."""
    steps: dict[int, list[dict[str, Any]]] = {}
    for line in map(json.loads, (folder / "runs" / name / "rollouts.jsonl").read_text().splitlines()):
        steps.setdefault(line["step"], []).append(line)
    return steps


def expected(folder: Path, size: int, wanted: int, steps: int) -> list[tuple[list[str], int]]:
    """Prompts of each step and its number of generation batches, of `size` prompts, by the rule alone."""
    texts = [json.loads(line)["prompt"] for line in (folder / "prompts.jsonl").read_text().splitlines()]
    drawn = [texts[i] for epoch in range(99) for i in epoch_order(len(texts), 3, epoch)]
    result, position = [], 0
    for _ in range(steps):
        good: list[str] = []
        batches = 0
        while len(good) < wanted:
            good += [prompt for prompt in drawn[position : position + size] if not is_hopeless(prompt)]
            position += size
            batches += 1
        result.append((good[:wanted], batches))
    return result


SLOW = [pytest.param(2, *sizes, marks=pytest.mark.slow) for sizes in ((4, None), (5, 8), (1, 2))]


@pytest.mark.parametrize(("ranks", "wanted", "size"), [(1, 4, None), *SLOW])
def test_steps_are_full_of_groups_whose_rewards_differ(folder, ranks, wanted, size):
    """With one prompt a step, one of two ranks has no sample."""
    run_ranks(ranks, RUN, job_of(folder, rollout_batch_size=wanted, dynamic_sampling_batch_size=size))
    size = size or wanted
    lines = trained(folder)
    for row, (prompts, batches) in zip(rows_of(folder), expected(folder, size, wanted, 3), strict=True):
        step = sorted(lines[row["step"]], key=lambda line: line["id"])
        assert [line["id"] for line in step] == list(range(wanted * 3))
        assert [line["prompt"] for line in step] == [prompt for prompt in prompts for _ in range(3)]
        rewards = np.array([line["reward"] for line in step])
        assert varied_groups(rewards, 3).all() and row["reward"] == pytest.approx(rewards.mean())
        assert row["dynamic_sampling/batches"] == batches and row["dynamic_sampling/groups"] == batches * size
        lost = row["dynamic_sampling/equal_groups"] + row["dynamic_sampling/surplus_groups"]
        assert lost == batches * size - wanted
        assert row["dynamic_sampling/sampled_reward"] < row["reward"], "hopeless prompts count there"
        assert row["grad_norm"] > 0
        assert row["tokens"] == sum(line["prompt_tokens"] + line["response_tokens"] for line in step)


@pytest.mark.slow
def test_resumed_to_the_bit_on_two_ranks(folder):
    run_straight_and_resumed(job_of, folder, "rl-000001", save_steps=1)

    def stable(name: str) -> list[dict[str, Any]]:
        return [{key: value for key, value in row.items() if key not in TIMES} for row in rows_of(folder, name)]

    assert stable("resumed") == stable("straight")
    assert max(row["dynamic_sampling/batches"] for row in stable("straight")) > 1


@pytest.mark.slow
def test_a_sampler_on_its_own_devices_is_asked_for_more(folder):
    run_ranks(2, RUN, job_of(folder, "same", actor_train__device_mapping=[0, 1]))
    own = {"actor_train__device_mapping": [0, 1], "actor_infer": {"device_mapping": [2, 3]}}
    run_ranks(2, RUN, job_of(folder, "own", **own, save_steps=1), timeout=600)
    same, apart = rows_of(folder, "same"), rows_of(folder, "own")
    for one, two in zip(same, apart, strict=True):
        assert one["reward"] == two["reward"] and one["dynamic_sampling/batches"] == two["dynamic_sampling/batches"]
        assert two["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-4) and two["staleness_max"] == 0
    point = folder / "runs" / "own" / "checkpoints" / "rl-000001"
    run_ranks(2, RUN, job_of(folder, "own", **own, save_steps=1, resume_from_checkpoint=str(point)), timeout=600)
    assert [row["reward"] for row in rows_of(folder, "own")] == [row["reward"] for row in apart]


@pytest.mark.bad_input
def test_a_step_that_stays_empty_is_an_error_on_all_ranks(folder):
    changes = {"reward_function": HERE + "constant", "dynamic_sampling_max_batches": 2}
    outcomes = run_ranks(2, RUN, job_of(folder, **changes), check=False)
    for outcome in outcomes:
        assert outcome.returncode
        message = "step 1 has 0 of 4 prompts whose rewards differ, after 2 generation batches"
        assert message in outcome.output and "the mean reward is 0.1" in outcome.output
        assert "raise dynamic_sampling_max_batches" in outcome.output


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_return_sequences_in_group": 1, "adv_estimator": "reinforce"}, "raise num_return_sequences_in_group"),
        ({"async_generation_ratio": 1}, "needs async_generation_ratio: 0"),
        ({"adv_estimator": "remax"}, "greedy responses of remax"),
        ({"actor_train__data_args__domain_interleave_probs": {"a": 1.0}}, "domain_interleave_probs fixes"),
        ({"dynamic_sampling_max_batches": 0}, "dynamic_sampling_max_batches"),
        ({"dynamic_sampling_max_batches": float("nan")}, "dynamic_sampling_max_batches"),
        ({"dynamic_sampling_batch_size": -1}, "dynamic_sampling_batch_size"),
        ({"dynamic_sampling_batch_size": True}, "dynamic_sampling_batch_size"),
        ({"dynamic_sampling": "sometimes"}, "dynamic_sampling"),
    ],
)
def test_settings_that_exclude_it(tmp_path, changes, message):
    write_data(tmp_path)
    with pytest.raises(ConfigFileError) as caught:
        config_from_dict(job_of(tmp_path, **changes))
    assert message in str(caught.value)


@pytest.mark.config
def test_keys_without_effect_are_noticed(tmp_path):
    job = job_of(tmp_path, dynamic_sampling=False, dynamic_sampling_batch_size=8, dynamic_sampling_max_batches=3)
    noticed = [notice.path for notice in config_from_dict(job).notices if "dynamic_sampling is false" in notice.text]
    assert sorted(noticed) == ["dynamic_sampling_batch_size", "dynamic_sampling_max_batches"]
    assert config_from_dict(job).prompts_per_generation == 4


# ---- the choice of groups


def drawn(
    rewards: list[list[float]], first: int, rows: list[int] | None = None, samples: list[int] | None = None
) -> tuple[SampleBatch, StepScores, dict]:
    """A generation batch of these groups, of which this rank has the rollouts `rows`.

    Rollout i has `samples[i]` samples (None: one), each of token i + `first`.
    """
    flat = np.array(rewards).ravel()
    number = np.arange(len(flat))
    counts = np.ones(len(flat), dtype=np.int64) if samples is None else np.array(samples)
    rollout_ids = torch.from_numpy(number.repeat(counts))
    count = len(rollout_ids)
    fields = {"input_ids": rollout_ids + first, "response_mask": torch.ones(count, dtype=torch.bool)}
    schema = {name: FieldSpec("token") for name in fields} | {"rollout_ids": FieldSpec("sample")}
    batch = SampleBatch(
        torch.arange(count), torch.ones(count, dtype=torch.int64), fields | {"rollout_ids": rollout_ids}, schema
    )
    local = [i for row in (number.tolist() if rows is None else rows) for i in np.flatnonzero(rollout_ids == row)]
    count = len(flat)
    scores = StepScores(
        ids=number,
        rewards=flat,
        marks={f"mark{first}": number % 2 == 0, "always": np.ones(count, dtype=bool)},
        failed=np.zeros(count, dtype=bool),
        domains=np.array([""] * count),
        finished=number % 3 == 0,
        response_tokens=number + first,
        turns=np.ones(count, dtype=np.int64),
        samples=counts,
        episodes=np.full(count, None),
        lengths=np.ones(count, dtype=np.int64),
        generate_seconds=np.full(count, 2.0),
        reward_seconds=np.full(count, 1.0),
        sample_log=[{"id": int(i), "reward": float(flat[i])} for i in number],
    )
    figures = {"queue_wait_seconds": 1.5, "dropped_samples": 2, "staleness_max": first}
    return batch.select(torch.tensor(local)), scores, figures


def test_groups_keep_their_order_and_all_that_belongs_to_them():
    config = JobConfig.model_validate({"rollout_batch_size": 3, "num_return_sequences_in_group": 2, **MINIMAL})
    batches = [
        drawn([[1, 1], [0, 1], [0, 0]], 100, rows=[3, 0, 2]),
        drawn([[0.3, 0.3 + 1e-9], [5, 5], [2, 2]], 200),
        drawn([[2, 3], [7, 7], [4, 5], [8, 9]], 300, rows=[7, 5, 1]),
    ]
    batch, scores, metrics = sample_full_step(config, 1, batches.__getitem__)
    assert scores.rewards.tolist() == [0, 1, 2, 3, 4, 5] and scores.ids.tolist() == list(range(6))
    assert scores.response_tokens.tolist() == [102, 103, 300, 301, 304, 305]
    assert scores.marks["mark100"].tolist() == [True, False, False, False, False, False]
    assert scores.marks["always"].all() and scores.finished.tolist() == [False, True, True, False, False, False]
    assert [(line["id"], line["reward"]) for line in scores.sample_log] == list(enumerate([0, 1, 2, 3, 4, 5]))
    assert dict(zip(batch.ids.tolist(), batch["input_ids"].tolist(), strict=True)) == {1: 103, 0: 102, 5: 305, 3: 301}
    assert set(scores.generate_seconds) == {6.0} and set(scores.reward_seconds) == {3.0}, "of all batches"
    assert metrics == {
        "queue_wait_seconds": 4.5, "dropped_samples": 6, "staleness_max": 300, "dynamic_sampling/batches": 3,
        "dynamic_sampling/groups": 10, "dynamic_sampling/equal_groups": 6, "dynamic_sampling/surplus_groups": 1,
        "dynamic_sampling/sampled_reward": pytest.approx((3 + 14.6 + 45) / 20),
    }  # fmt: skip


def test_rollouts_keep_all_their_samples():
    config = JobConfig.model_validate({"rollout_batch_size": 2, "num_return_sequences_in_group": 2, **MINIMAL})
    batches = [
        drawn([[1, 1], [0, 1], [0, 0]], 100, rows=[0, 3], samples=[2, 1, 1, 3, 1, 1]),
        drawn([[2, 3], [4, 5]], 200, rows=[1, 2], samples=[1, 4, 2, 2]),
    ]
    batch, scores, _ = sample_full_step(config, 1, batches.__getitem__)
    assert scores.samples.tolist() == [1, 3, 1, 4] and scores.ids.tolist() == [0, 1, 2, 3]
    assert batch["input_ids"].tolist() == [103] * 3 + [201] * 4, "all samples of the rollouts of this rank"
    assert batch.ids.tolist() == [1, 2, 3, 5, 6, 7, 8] and batch["rollout_ids"].tolist() == [1] * 3 + [3] * 4


def test_without_a_limit_it_goes_on_and_says_so(caplog):
    config = JobConfig.model_validate(
        {"rollout_batch_size": 1, "num_return_sequences_in_group": 2, "dynamic_sampling_max_batches": None, **MINIMAL}
    )
    _, _, metrics = sample_full_step(config, 1, lambda number: drawn([[0, int(number == 50)]], 0))
    assert metrics["dynamic_sampling/batches"] == 51
    warnings = [record.getMessage() for record in caplog.records]
    assert len(warnings) == 5 and "after 10 generation batches (dynamic_sampling_max_batches is ~" in warnings[0]
    config = config.model_copy(update={"dynamic_sampling_max_batches": 50})
    with pytest.raises(RankError, match="has 0 of 1 prompts whose rewards differ, after 50 generation batches"):
        sample_full_step(config, 1, lambda number: drawn([[0, int(number == 50)]], 0))


MINIMAL = {key: value for key, value in settings(Path("."), warmup=None).items() if key not in (
    "rollout_batch_size", "num_return_sequences_in_group")}  # fmt: skip
