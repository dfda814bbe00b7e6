"""Rollouts ahead of training: the samples of a synchronous run, no older than allowed, whatever the sampler suffers."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from roll_batching.errors import ConfigError
from roll_batching.jobs.config import ConfigFileError, JobConfig, load_config
from roll_batching.jobs.launch.devices import role_device_variables
from roll_batching.jobs.observe.run_files import read_metrics
from roll_batching.jobs.processes.child_process import ROLE_DEVICES
from roll_batching.jobs.rl.async_rollouts import parts_per_step
from roll_batching.jobs.roles.client import SAMPLER, RoleClient
from roll_batching.jobs.roles.sampler import Request
from roll_batching.jobs.texts.texts import Prompt
from tests.jobs.rl.jobs import settings, write_data
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.streams

RUN = "tests.jobs.rl.jobs:run"
HERE = "tests.jobs.rl.test_async_rollouts:"


# ---- rewards, which run in a process that the sampler has started


def signals_the_sampler(completion: Any, folder: str, after: int, number: int, times: int = 1) -> float:
    """The length; at the `after`-th call, and `times` times in all, the sampler gets a signal."""
    calls = Path(folder) / "calls"
    with calls.open("a") as file:
        file.write(".")
    sent = Path(folder) / "sent"
    if calls.stat().st_size >= after and len(list(Path(folder).glob("sent*"))) < times:
        sent.with_suffix(f".{calls.stat().st_size}").touch()
        os.kill(os.getppid(), number)
        time.sleep(5)
    return completion.tokens / 10


def slow(completion: Any) -> float:
    time.sleep(0.05)
    return completion.tokens / 10


def counts_workers(completion: Any, folder: str) -> float:
    """The length; leaves a file named by the number of reward processes of the whole job."""
    rank = psutil.Process(os.getppid()).parent()
    names = [" ".join(child.cmdline()) for child in rank.children(recursive=True)]
    (Path(folder) / f"workers{sum('rewards.worker' in name for name in names)}").touch()
    return completion.tokens / 10


def refuses(completion: Any) -> float:
    raise ValueError("no reward today")


# ---- jobs


@pytest.fixture
def folder(tmp_path):
    write_data(tmp_path)
    return tmp_path


def job_of(folder, **changes):
    base = {
        "warmup": None,
        "eval_samples": 0,
        "reward_function": "tests.jobs.rl.jobs:length",
        "async_generation_ratio": 1,
        "rollout_samples": -1,
    }
    return settings(folder, **(base | changes))


def rows_of(folder, name="tiny"):
    return read_metrics(folder / "runs" / name / "metrics.jsonl")


def trained_on(folder, name="tiny"):
    """Of every step, its samples in order: place, prompt, response."""
    lines = [json.loads(line) for line in (folder / "runs" / name / "rollouts.jsonl").read_text().splitlines()]
    steps: dict[int, list[tuple[int, str, str]]] = {}
    for line in lines:
        steps.setdefault(line["step"], []).append((line["id"], line["prompt"], line["response"]))
    return [sorted(steps[step]) for step in sorted(steps)]


@pytest.mark.slow
def test_a_killed_sampler_is_started_again_and_every_sample_is_trained_on_once(folder):
    """With weights that stay, an asynchronous run draws what a synchronous one draws, to the letter."""
    fixed = {"max_steps": 4, "actor_train__training_args__learning_rate": 1e-12}
    run_ranks(1, RUN, job_of(folder, async_generation_ratio=0, exp_name="sync", **fixed))
    killing = {
        "reward_function": f"{HERE}signals_the_sampler",
        "reward_args": {"folder": str(folder), "after": 18, "number": int(signal.SIGKILL)},
    }
    outcome = run_ranks(1, RUN, job_of(folder, **fixed, **killing), check=False)[0]
    assert outcome.returncode == 0, outcome.output
    assert "the sampler ended by signal 9 (SIGKILL)" in outcome.output
    assert re.search(r"started again \(1 of 2\), and asked again for (4|8) prompts", outcome.output), outcome.output
    expected, found = trained_on(folder, "sync"), trained_on(folder)
    assert found == expected and [len(step) for step in found] == [12] * 4
    rows = rows_of(folder)
    assert [row["reward"] for row in rows] == [row["reward"] for row in rows_of(folder, "sync")]
    assert all(row["staleness_max"] <= 1 for row in rows)
    assert [row["sampler_restarts"] for row in rows] == [0, 1, 1, 1]
    assert all(row["dropped_samples"] == 0 and row["sampler_seconds"] > 0 for row in rows)
    # The sampler's own log-probs stand in the ratio, and agree with those of the weights, which do not change.
    assert all(row["ratio_max"] == pytest.approx(1, abs=1e-3) for row in rows)
    assert not (folder / "runs" / "tiny" / "weights").exists()
    assert not [p for p in psutil.process_iter(["cmdline"]) if str(folder) in " ".join(p.info["cmdline"] or [])]


@pytest.mark.slow
@pytest.mark.bad_input
def test_without_restarts_a_killed_sampler_ends_the_job_on_every_rank(folder):
    job = job_of(
        folder,
        sampler_restarts=0,
        reward_function=f"{HERE}signals_the_sampler",
        reward_args={"folder": str(folder), "after": 5, "number": int(signal.SIGKILL)},
    )
    for outcome in run_ranks(2, RUN, job, check=False, timeout=120):
        assert outcome.returncode not in (0, -9), outcome.output
        assert "rollouts: rank 0: DataError: the sampler ended by signal 9 (SIGKILL)" in outcome.output
        assert "resume_from_checkpoint" in outcome.output


@pytest.mark.slow
def test_a_sampler_that_stalls_is_started_again(folder):
    job = job_of(
        folder,
        rollout_timeout=20,
        reward_function=f"{HERE}signals_the_sampler",
        reward_args={"folder": str(folder), "after": 5, "number": int(signal.SIGSTOP)},
    )
    outcome = run_ranks(1, RUN, job, check=False, timeout=240)[0]
    assert outcome.returncode == 0, outcome.output
    assert "the sampler sent no message for rollout_timeout=20 seconds" in outcome.output
    assert [row["sampler_restarts"] for row in rows_of(folder)] == [1, 1]


@pytest.mark.slow
@pytest.mark.bad_input
def test_what_fails_in_the_sampler_is_said_on_every_rank(folder):
    job = job_of(folder, reward_function=f"{HERE}refuses")
    for outcome in run_ranks(2, RUN, job, check=False, timeout=120):
        assert outcome.returncode not in (0, -9), outcome.output
        assert "the sampler ended: DataError: reward function" in outcome.output
        assert "no reward today" in outcome.output


@pytest.mark.slow
@pytest.mark.parametrize("ratio, ranks", [(0.5, 2), (2, 1)])
def test_samples_are_as_old_as_the_ratio_allows(folder, ratio, ranks):
    run_ranks(ranks, RUN, job_of(folder, async_generation_ratio=ratio, max_steps=6))
    rows = rows_of(folder)
    assert [len(step) for step in trained_on(folder)] == [12] * 6
    if ratio == 2:
        # How far ahead the engine is at the last step is a matter of time.
        assert all(row["staleness_max"] <= 2 for row in rows) and any(row["staleness_max"] > 0 for row in rows)
    else:
        # Of a step's two requests one may have been drawn a step before.
        assert all(row["staleness_mean"] <= 0.5 and row["staleness_max"] <= 1 for row in rows)
    assert max(row["approx_kl"] for row in rows[1:]) > 0, "older weights drew them"


@pytest.mark.slow
def test_stale_samples_are_dropped_counted_and_drawn_again(folder):
    run_ranks(1, RUN, job_of(folder, max_staleness=0, max_steps=4))
    rows = rows_of(folder)
    assert sum(row["dropped_samples"] for row in rows) > 0
    assert all(row["staleness_max"] == 0 for row in rows)
    assert [len(step) for step in trained_on(folder)] == [12] * 4


@pytest.mark.slow
def test_a_killed_run_goes_on_where_it_was(folder):
    job = job_of(folder, max_steps=5, save_steps=2, reward_function=f"{HERE}slow")
    whole = dict(job, exp_name="whole")
    run_ranks(1, RUN, whole)
    outcome = run_ranks(1, f"{HERE}run_until_killed", dict(job, rows=3), check=False, timeout=120)[0]
    assert outcome.returncode == -9
    run_ranks(1, RUN, dict(job, resume_from_checkpoint=True))
    rows = rows_of(folder)
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5]
    prompts = [[prompt for _, prompt, _ in step] for step in trained_on(folder)]
    assert prompts == [[prompt for _, prompt, _ in step] for step in trained_on(folder, "whole")]
    assert rows[2]["staleness_max"] == 0, "what was drawn ahead went with the process, and was drawn again"


def run_until_killed(payload: dict[str, Any]) -> None:
    """On a rank: the job, until so many rows are written."""
    import threading

    from tests.jobs.rl.jobs import run

    rows = payload.pop("rows")
    file = Path(payload["output_dir"]) / payload["exp_name"] / "metrics.jsonl"

    def watch() -> None:
        while not (file.exists() and file.read_bytes().count(b"\n") >= rows):
            time.sleep(0.001)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()
    run(payload)


@pytest.mark.slow
def test_truncated_importance_sampling_weighs_by_the_age_of_samples(folder):
    job = job_of(folder, loss_args={"engine_ratio_cap": 2.0}, max_steps=3)
    assert JobConfig.model_validate(job).actor_train.logprob_plan == "train"
    run_ranks(2, RUN, job)
    rows = rows_of(folder)
    assert rows[0]["engine_ratio"] == pytest.approx(1, abs=1e-4), "the first step's samples are of its own weights"
    assert any(abs(row["engine_ratio"] - 1) > 1e-5 for row in rows[1:])


def test_nobody_waits_for_a_sampler_that_reads_nothing(folder):
    sampler = RoleClient(JobConfig.model_validate(job_of(folder)), SAMPLER)
    sampler.start()
    try:
        os.kill(sampler.workers.pids[0], signal.SIGSTOP)
        prompts = [Prompt("x" * 1_000_000, "")]
        asking = threading.Thread(
            target=lambda: [sampler.ask(Request(number=i, prompts=prompts, seed=0, shown=0)) for i in range(4)],
            daemon=True,
        )
        asking.start()
        asking.join(20)
        assert not asking.is_alive(), "it waits until somebody reads"
    finally:
        sampler.close()


# ---- keys


def test_requests_of_a_step():
    def parts(ratio):
        return parts_per_step(
            JobConfig.model_validate(job_of(Path("."), async_generation_ratio=ratio, rollout_batch_size=24))
        )

    assert [parts(ratio) for ratio in (1, 2, 0.5, 0.25, 1.5, 0.3, 0.01)] == [1, 1, 2, 4, 2, 4, 24]


def test_ratios_follow_the_policy_that_drew():
    def plan(**changes):
        return JobConfig.model_validate(job_of(Path("."), **changes)).actor_train.logprob_plan

    assert plan() == "rollout" and plan(async_generation_ratio=0) == "train"
    assert plan(loss_args={"engine_ratio_cap": 2.0}) == "train"
    assert plan(loss_args={"engine_ratio_cap": 2.0}, actor_train__logprob_plan="own") == "own"
    job = JobConfig.model_validate(job_of(Path("."), async_generation_ratio=1.5))
    assert job.staleness_bound == 2


@pytest.mark.bad_input
@pytest.mark.parametrize(
    "changes, words",
    [
        ({"actor_train.logprob_plan": "none"}, "assumes that the current weights sampled"),
        ({"actor_train.logprob_plan": "train"}, "loss_args.engine_ratio_cap"),
        ({"adv_estimator": "remax"}, "greedy completions from the current weights"),
        ({"async_generation_ratio": "-1"}, "must be at least 0"),
        ({"sampler_restarts": "-1"}, "must be at least 0"),
    ],
)
def test_what_does_not_go_with_rollouts_ahead_is_refused(changes, words):
    file = Path(__file__).resolve().parents[3] / "configs" / "grpo_async_demo.yaml"
    with pytest.raises(ConfigError, match=words.replace(".", r"\.")):
        load_config(file, [f"{key}={value}" for key, value in changes.items()])


def test_a_sampler_may_have_a_device_of_its_own():
    file = Path(__file__).resolve().parents[3] / "configs" / "grpo_async_demo.yaml"
    job = load_config(file, ["actor_infer.device_mapping=[2]"])
    assert role_device_variables(job, {"CUDA_VISIBLE_DEVICES": "4,5,7"}) == {ROLE_DEVICES["actor_infer"]: "7"}
    assert (
        role_device_variables(job, {}) == {ROLE_DEVICES["actor_infer"]: "2"}
        and role_device_variables(job, {ROLE_DEVICES["actor_infer"]: "7"}) == {}
    )
    assert role_device_variables(load_config(file), {}) == {}
    with pytest.raises(ConfigError, match="device 2 is not there: CUDA_VISIBLE_DEVICES=4,5 shows 2"):
        role_device_variables(job, {"CUDA_VISIBLE_DEVICES": "4,5"})


def test_overrides_without_effect_are_refused():
    file = Path(__file__).resolve().parents[3] / "configs" / "demo_grpo.yaml"
    with pytest.raises(ConfigFileError) as caught:
        load_config(file, ["max_staleness=2", "rollout_timeout=5"])
    assert [problem.path for problem in caught.value.problems] == [("max_staleness",), ("rollout_timeout",)]
    changes = ["loss_args.engine_ratio_cap=2", "actor_train.logprob_plan=rollout"]
    with pytest.raises(ConfigFileError, match="engine_ratio_cap: has no effect: .*no other numbers to correct"):
        load_config(file.with_name("grpo_async_demo.yaml"), changes)


@pytest.mark.slow
def test_rewards_run_beside_the_sampler_only(folder):
    """Training ranks, which score nothing, would keep idle processes that have imported the user's code."""
    reward = {"reward_function": f"{HERE}counts_workers", "reward_args": {"folder": str(folder)}}
    run_ranks(1, RUN, job_of(folder, **reward, max_steps=1, reward_workers=1))
    assert [path.name for path in folder.glob("workers*")] == ["workers1"]
