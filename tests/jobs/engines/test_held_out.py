"""Held-out prompts are answered by what samples rollouts, with the weights of the step that is evaluated."""

from __future__ import annotations

import json
from typing import Any

import pytest

from roll_batching.jobs.observe.run_files import read_metrics
from tests.huggingface.test_job import job
from tests.jobs.engines.test_replicas import order, seen, start
from tests.support.ranks import run_ranks

pytest.importorskip("aiohttp")
pytestmark = pytest.mark.cluster

RUN = "tests.jobs.rl.jobs:run"
GREEDY = {"generating_args": {"do_sample": False, "max_new_tokens": 9}}
CHANGES: dict[str, Any] = {
    "warmup": None,
    "max_steps": 3,
    "eval_steps": 2,
    "rollout_samples": -1,
    "save_steps": 1,
    "validation": GREEDY,
    "actor_train__training_args__learning_rate": 2e-3,  # enough for other responses after each step, and not for "kkk"
    "actor_train__strategy_args__strategy_config": {"context_parallel_size": 2},
}

OWN_DEVICE = {"device_mapping": [2], "strategy_args": {"strategy_config": {"context_parallel_size": 1}}}


@pytest.fixture
def server(folder):
    process, urls = start(folder / "model")
    yield urls[0]
    process.kill()


def engine_job(folder: Any, url: str, name: str, **changes: Any) -> dict[str, Any]:
    engine = {"strategy_args": {"strategy_name": "sglang"}, "engine_args": {"urls": [url]}}
    return job(folder, exp_name=name, actor_infer=engine, **(CHANGES | changes))


def evaluate_checkpoints(payload: dict[str, Any]) -> list[tuple[float, list[str]]]:
    """On a rank: reward and responses of each checkpoint of a run, sampled by the model itself."""
    from pathlib import Path

    from roll_batching.jobs.inputs import load_inputs
    from roll_batching.jobs.objectives.from_config import sampling_of
    from roll_batching.jobs.run.saved_model import open_checkpoint

    result = []
    for step in payload["steps"]:
        model = open_checkpoint(Path(payload["run"]) / "checkpoints" / f"rl-{step:06d}")
        inputs = load_inputs(model.config)
        sampling = sampling_of(model.config, inputs.tokenizer, held_out=True)
        metrics, lines = model.evaluate(
            inputs.heldout, inputs.tokenizer, sampling, samples=model.config.eval_samples, shown=-1
        )
        result.append((metrics["eval_reward"], [line["response"] for line in lines]))
    return result


def held_out(run: Any) -> dict[int, tuple[float, list[str]]]:
    """By the step that was evaluated: reward and responses."""
    lines = [json.loads(line) for line in (run / "rollouts.jsonl").read_text().splitlines()]
    rows = [row for row in read_metrics(run / "metrics.jsonl") if "eval_reward" in row]
    return {
        row["eval_updates"]: (
            row["eval_reward"],
            [line["response"] for line in lines if line["kind"] == "eval" and line["version"] == row["eval_updates"]],
        )
        for row in rows
    }


def check_evaluations(run: Any) -> dict[int, tuple[float, list[str]]]:
    """The run's evaluations after steps 2 and 3 are those of its checkpoints, and differ between the steps."""
    found = held_out(run)
    ((first, second),) = run_ranks(
        1, "tests.jobs.engines.test_held_out:evaluate_checkpoints", {"run": str(run), "steps": [2, 3]}
    )
    assert [found[2], found[3]] == [first, second]
    assert len({*first[1]} | {*second[1]}) > 1 and len(first[1]) == 5 and found[0] != found[2] != found[3]
    return found


def test_ahead_of_training_and_under_context_parallelism_it_has_the_weights_of_the_step(folder, server):
    """Asynchronous, CP 2: greedy responses of the engine are those of the checkpoints' own sampling; also resumed."""
    run = folder / "runs" / "ahead"
    payload = engine_job(folder, server, "ahead", async_generation_ratio=1)
    run_ranks(2, RUN, payload, timeout=400)
    check_evaluations(run)
    assert seen(server)["version"] == "3", "the last evaluation needs the weights after the last step"
    rows = read_metrics(run / "metrics.jsonl")
    assert [("eval_reward" in row) for row in rows] == [True, True, True]
    assert not (run / "engine_weights").exists()


@pytest.mark.slow
def test_a_resumed_run_evaluates_its_own_weights(folder, server):
    run = folder / "runs" / "ahead"
    payload = engine_job(folder, server, "ahead", async_generation_ratio=1)
    run_ranks(2, RUN, payload | {"max_steps": 2}, timeout=400)
    run_ranks(2, RUN, payload | {"resume_from_checkpoint": True}, timeout=400)
    check_evaluations(run)


@pytest.mark.slow
def test_in_step_with_training_under_context_parallelism(folder, server):
    run_ranks(2, RUN, engine_job(folder, server, "step"), timeout=400)
    check_evaluations(folder / "runs" / "step")


@pytest.mark.slow
@pytest.mark.parametrize("sampler", [{"async_generation_ratio": 1}, {"actor_infer": OWN_DEVICE}], ids=["ahead", "own"])
def test_a_sampler_that_holds_the_model_answers_them_too(folder, sampler):
    changes = CHANGES | sampler | {"exp_name": "model", "actor_train__device_mapping": [0, 1]}
    run_ranks(2, RUN, job(folder, **changes), timeout=400)
    check_evaluations(folder / "runs" / "model")


@pytest.mark.bad_input
@pytest.mark.parametrize("ahead", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_an_engine_that_dies_in_an_evaluation_ends_the_job(folder, server, ahead):
    """In step the first requests are the evaluation's; ahead the last 5 of 2 x 12 + 2 x 5."""
    changes = {"max_steps": 2, "async_generation_ratio": int(ahead), "save_steps": 0}
    if ahead:
        order(server, "", times=29)
    order(server, "dies", times=9)
    outcomes = run_ranks(2, RUN, engine_job(folder, server, "dies", **changes), check=False, timeout=400)
    for outcome in outcomes:
        assert outcome.returncode not in (0, -9), outcome.output
        assert "sglang: no server is left" in outcome.output and "start them again, and resume" in outcome.output
        if ahead:
            assert "held-out evaluation: rank 0: DataError: the sampler ended" in outcome.output
