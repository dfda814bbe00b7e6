"""Rollouts on an engine's servers run free: none waits for another's tool, whoever fails and however long it takes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from roll_batching.jobs.observe.run_files import read_metrics
from tests.huggingface.test_job import folder, job
from tests.jobs.engines.test_replicas import order, seen, start
from tests.support.ranks import run_ranks

pytest.importorskip("aiohttp")
pytestmark = pytest.mark.cluster

HERE = "tests.jobs.rollouts.rollout_functions:"


assert folder  # the fixture: a model directory with its tokenizer, and the data of the tiny job


def settings(folder: Path, name: str, urls: list[str], kind: str, function: str, **arguments: Any) -> dict[str, Any]:
    engine = {"strategy_args": {"strategy_name": kind}, "engine_args": {"urls": urls, "request_timeout": 60}}
    made: dict[str, Any] = job(
        folder,
        exp_name=name,
        warmup=None,
        eval_samples=0,
        rollout_samples=-1,
        max_steps=2,
        rollout_function=HERE + function,
        rollout_args=arguments,
        actor_infer=engine,
    )
    del made["reward_function"]
    return made


def run(job: dict[str, Any]) -> tuple[list[dict[str, Any]], list[str]]:
    """The job on two ranks: rows of its metrics, and responses."""
    run_ranks(2, "tests.jobs.rl.jobs:run", job)
    run_folder = Path(job["output_dir"]) / job["exp_name"]
    lines = (run_folder / "rollouts.jsonl").read_text().splitlines()
    return read_metrics(run_folder / "metrics.jsonl"), [json.loads(line)["response"] for line in lines]


def test_a_slow_tool_delays_its_own_rollout_alone(folder, report):
    """Each rollout waits 1.5 s, in one of its three turns. Rounds of all would take three times as long."""
    server, urls = start(folder / "model")
    try:
        rows, _ = run(settings(folder, "slow", urls, "sglang", "slow_tool", seconds=1.5))
    finally:
        server.kill()
    seconds = rows[-1]["generate_seconds"]
    report(f"a step of rollouts that wait 1.5 s each: {seconds:.2f} s")
    assert 1.5 <= seconds < 2.5


@pytest.mark.equality
@pytest.mark.parametrize("kind", ["sglang", "vllm"])
def test_samples_depend_on_their_seeds_alone(kind, folder):
    """Tools that take their time at random, faults, and a server that restarts with its first weights."""
    server, urls = start(folder / "model", "--kind", kind, "--replicas", "2", "--processed")
    try:
        rows, expected = run(settings(folder, "quiet", urls, kind, "three_turns", pause=0.0))
        order(urls[0], "500", 2)
        order(urls[1], "restarts" if kind == "vllm" else "short")
        other, found = run(settings(folder, "loud", urls, kind, "three_turns", pause=0.05))
        told = [seen(url) for url in urls]
    finally:
        server.kill()
    assert found == expected and len(found) == 2 * 12 and len(set(found)) > 12
    assert all(0 < row["engine_gap_mean"] < 1e-5 for row in rows)
    assert [row["loss"] for row in rows] == [row["loss"] for row in other]
    assert rows[0]["engine_requests"] == 30, "a call of each of two or three turns"
    assert other[0]["engine_failed_attempts"] >= 2 and all(one["requests"] for one in told)
    assert other[0]["engine_dropped"] == (2 if kind == "vllm" else 0), "once on each rank"
    if kind == "vllm":
        assert other[0]["engine_requests"] > 32, "the rollouts that it sampled for have begun again"


def test_a_rollout_need_not_wait_for_all_its_calls(folder):
    server, urls = start(folder / "model")
    try:
        rows, responses = run(settings(folder, "races", urls, "sglang", "races"))
    finally:
        server.kill()
    assert len(responses) == 24 and [row["reward"] for row in rows] == [1, 1]


@pytest.mark.bad_input
def test_a_failed_engine_is_not_the_functions_to_handle(folder):
    server, urls = start(folder / "model")
    try:
        order(urls[0], "500", 1000)
        failing = settings(folder, "failing", urls, "sglang", "swallows")
        outcomes = run_ranks(2, "tests.jobs.rl.jobs:run", failing, check=False)
    finally:
        server.kill()
    for outcome in outcomes:
        assert outcome.returncode != 0 and "sglang: a request failed 4 times" in outcome.output
