"""Jobs with rollouts by an engine: real ranks, a real server, weights as model directories."""

from __future__ import annotations

import json

import pytest

from roll_batching.jobs.config import ConfigFileError, config_from_dict
from roll_batching.jobs.config.engine_rules import server_options
from roll_batching.jobs.observe.run_files import read_metrics
from tests.huggingface import tiny
from tests.huggingface.test_job import job
from tests.jobs.engines.test_replicas import order, seen, start
from tests.jobs.rl.jobs import settings, write_data
from tests.support.ranks import run_ranks

pytest.importorskip("aiohttp")
pytestmark = pytest.mark.cluster


@pytest.fixture
def folder(tmp_path):
    write_data(tmp_path)
    tiny.write_model(tmp_path / "model", "llama3")  # its output layer is tied to the embedding
    tiny.write_tokenizer(tmp_path / "model")
    return tmp_path


def rows_of(folder, name):
    run = folder / "runs" / name
    return [row for row in read_metrics(run / "metrics.jsonl") if row["phase"] == "rl"]


GREEDY = {
    "warmup": None,
    "max_steps": 3,
    "adv_estimator": "reinforce",
    "num_return_sequences_in_group": 1,
    "rollout_samples": -1,
    "actor_infer__generating_args": {"do_sample": False},
}


def test_an_engine_answers_as_the_model_in_training_does(folder, report):
    """Greedy, on two ranks, while a server dies: each step's answers are those of Megatron's own sampling."""
    run_ranks(2, "tests.jobs.rl.jobs:run", job(folder, exp_name="own", **GREEDY))
    server, urls = start(folder / "model", "--replicas", "2")
    try:
        order(urls[1], "500", 2)
        engine = {"strategy_args": {"strategy_name": "sglang"}, "engine_args": {"urls": urls}}
        engine["generating_args"] = {"do_sample": False}
        run_ranks(2, "tests.jobs.rl.jobs:run", job(folder, exp_name="engine", **{**GREEDY, "actor_infer": engine}))
        told = [seen(url) for url in urls]
    finally:
        server.kill()
    ours, theirs = rows_of(folder, "own"), rows_of(folder, "engine")
    assert [row["reward"] for row in theirs] == [row["reward"] for row in ours]
    assert [row["eval_reward"] for row in theirs if "eval_reward" in row] == [
        row["eval_reward"] for row in ours if "eval_reward" in row
    ]
    said = [
        [json.loads(line)["response"] for line in (folder / "runs" / name / "rollouts.jsonl").read_text().splitlines()]
        for name in ("own", "engine")
    ]
    assert said[0] == said[1] and len(said[0]) == 3 * 4 + 2 * 5
    assert all(0 < row["engine_gap_mean"] < 1e-5 and row["engine_gap_max"] < 1e-4 for row in theirs)
    assert theirs[0]["grad_norm"] > 0 and theirs[0]["engine_failed_attempts"] == 2
    assert [one["updates"] for one in told] == [4, 4] and {one["version"] for one in told} == {"3"}, "0, 1, 2, and eval"
    assert sum(one["requests"] for one in told) == 3 * 4 + 2 * 5 + 2
    assert not (folder / "runs" / "engine" / "engine_weights").exists()
    report(f"mismatch of log-probs: {theirs[-1]['engine_gap_mean']:.1e} in the mean")


@pytest.mark.parametrize("kind", ["vllm", pytest.param("sglang", marks=pytest.mark.slow)])
def test_an_engine_sleeps_while_the_model_trains(kind, folder, report):
    """It sleeps before the model is built and after all rollouts of a step, and draws the same as one that does not."""
    server, urls = start(folder / "model", "--kind", kind, "--processed", "--sleeps")
    try:
        engine = {"strategy_args": {"strategy_name": kind}, "engine_args": {"urls": urls}}
        changes = {"warmup": None, "actor_infer": engine, "eval_steps": 1}
        run_ranks(1, "tests.jobs.rl.jobs:run", job(folder, exp_name="awake", **changes))
        assert "sleeps" not in seen(urls[0])
        run_ranks(1, "tests.jobs.rl.jobs:run", job(folder, exp_name="asleep", is_offload_states=True, **changes))
        told = seen(urls[0])
    finally:
        server.kill()
    awake, asleep = rows_of(folder, "awake"), rows_of(folder, "asleep")
    for name in ("reward", "loss", "grad_norm", "eval_reward"):
        assert [row[name] for row in asleep] == [row[name] for row in awake], name
    # Before the model is built, after each step's rollouts, after the evaluation of the last step.
    assert told["sleeps"] == 4
    assert all(row["engine_sleep_seconds"] > 0 and row["share/transfer"] > 0 for row in asleep)
    assert "engine_sleep_seconds" not in awake[0]
    report(f"{kind}: asleep after {asleep[-1]['engine_sleep_seconds']:.3f} s, rows as without sleep")


def test_transformers_under_tensor_parallelism(folder):
    """One replica of two ranks: one asks, both get the answers; their log-probs go into the loss."""
    changes = {
        "warmup": None,
        "loss_args": {"engine_ratio_cap": 2.0},
        "actor_infer": {"strategy_args": {"strategy_name": "hf_infer"}, "engine_args": {"gap_warning": 1e-9}},
        "actor_train__strategy_args__strategy_config": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    }
    run_ranks(2, "tests.jobs.rl.jobs:run", job(folder, **changes))
    rows = rows_of(folder, "tiny")
    assert all(row["engine_ratio"] == pytest.approx(1, abs=1e-4) for row in rows)
    assert all(abs(row["engine_kl"]) <= row["engine_gap_mean"] < 1e-5 for row in rows)
    assert rows[1]["engine_gap_mean"] < 1e-5, "the second step's weights have reached it"


def test_a_mismatch_that_is_not_known_is_not_told(folder):
    """Under `logprob_plan: rollout` the trainer computes no log-probs of its own."""
    changes = {"actor_infer": {"strategy_args": {"strategy_name": "hf_infer"}}, "actor_train__logprob_plan": "rollout"}
    run_ranks(1, "tests.jobs.rl.jobs:run", job(folder, warmup=None, max_steps=1, **changes))
    (row,) = rows_of(folder, "tiny")
    assert row["weights_seconds"] > 0 and not {"engine_gap_mean", "engine_gap_max", "engine_kl"} & row.keys()


@pytest.mark.bad_input
def test_what_an_engine_needs(folder, report):
    wrong = {"urls": ["localhost:8000", "localhost:8000"]}
    with pytest.raises(ConfigFileError) as caught:
        config_from_dict(job(folder, actor_infer={"strategy_args": {"strategy_name": "vllm"}, "engine_args": wrong}))
    assert [problem.message.split(";")[0] for problem in caught.value.problems] == [
        "has 'localhost:8000'",
        "names a server twice",
    ]
    own = job(folder, actor_infer={"strategy_args": {"strategy_name": "megatron_infer"}, "engine_args": wrong})
    with pytest.raises(ConfigFileError, match="is read by sglang and vllm"):
        config_from_dict(own)
    report(str(caught.value))


@pytest.mark.config
def test_what_has_no_effect_on_an_engine_is_named(folder):
    quiet = {"strategy_args": {"strategy_name": "vllm"}, "engine_args": {"urls": ["http://localhost:8000"]}}
    assert config_from_dict(job(folder, actor_infer=quiet)).notices == ()
    vllm = {"strategy_args": {"strategy_name": "vllm", "strategy_config": {"block_size": 16, "sleep_level": 1}}}
    loud = config_from_dict(settings(folder, actor_infer=vllm))
    texts = {notice.path.split(".")[-1]: notice.text for notice in loud.notices}
    assert "vllm is not started: rollouts run on the Megatron model itself" in texts["strategy_name"]
    assert "which is not started here" in texts["block_size"]
    (notice,) = config_from_dict(job(folder, actor_infer=vllm)).notices
    assert notice.path.endswith("sleep_level") and "when they wake up" in notice.text
    vllm["strategy_args"]["strategy_config"] = {"block_size": 16, "load_format": "dummy"}
    dummy = config_from_dict(job(folder, actor_infer=vllm))
    assert [notice.path.split(".")[-1] for notice in dummy.notices] == ["load_format"]
    assert server_options(dummy) == {"block_size": 16}, "weights that come later are read as the first ones were"
    vllm["strategy_args"]["strategy_config"]["load_format"] = "safetensors"
    real = config_from_dict(job(folder, actor_infer=vllm))
    assert real.notices == () and server_options(real)["load_format"] == "safetensors"
    with_servers = {**quiet, "device_mapping": [3], "generating_args": {"max_tokens_in_cache": 1000}}
    with_servers["strategy_args"] = {"strategy_name": "vllm", "strategy_config": {"block_size": 16}}
    said = {notice.path: notice.text for notice in config_from_dict(job(folder, actor_infer=with_servers)).notices}
    assert set(said) == {
        "actor_infer.device_mapping",
        "actor_infer.generating_args.max_tokens_in_cache",
        "actor_infer.strategy_args.strategy_config.block_size",
    }
