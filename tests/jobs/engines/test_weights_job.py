"""Jobs with weights over process groups: the rows of jobs with model directories, and servers that die."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from roll_batching.jobs.config import ConfigFileError, config_from_dict
from tests.huggingface import tiny
from tests.huggingface.test_job import job
from tests.jobs.engines.test_job import rows_of
from tests.jobs.engines.test_replicas import ServerProcess, order, seen, start
from tests.jobs.observe.rows import TIMES
from tests.jobs.rl.jobs import length, write_data
from tests.support.ranks import run_ranks

pytest.importorskip("aiohttp")
pytestmark = pytest.mark.cluster

GRID = {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2, "sequence_parallel": True}


@pytest.fixture
def folder(tmp_path):
    write_data(tmp_path)
    tiny.write_model(tmp_path / "model", "llama3")  # its output layer is tied to the embedding
    tiny.write_tokenizer(tmp_path / "model")
    return tmp_path


def role(urls, way="distributed", **args):
    """An `actor_infer` that asks these servers."""
    engine_args = {"urls": urls, "update_weights_from": way, **args}
    return {"strategy_args": {"strategy_name": "sglang"}, "engine_args": engine_args}


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 4])
def test_rows_do_not_depend_on_how_weights_come_to_the_servers(ranks, folder, report):
    """Directories, process groups, and process groups to servers that sleep: one rank, and TP 2 x PP 2."""
    server, urls = start(folder / "model", "--replicas", "2", "--sleeps")
    changes = {"warmup": None, "max_steps": 3, "loss_args": {"engine_ratio_cap": 2.0}}
    if ranks == 4:
        changes["actor_train__strategy_args__strategy_config"] = GRID
    ways = {"disk": {}, "distributed": {}, "asleep": {"is_offload_states": True}}
    try:
        for name, more in ways.items():
            how = "disk" if name == "disk" else "distributed"
            payload = job(folder, exp_name=name, actor_infer=role(urls, how), **changes, **more)
            run_ranks(ranks, "tests.jobs.rl.jobs:run", payload, timeout=600)
        told = [seen(url) for url in urls]
    finally:
        server.kill()
    found = {name: rows_of(folder, name) for name in ways}
    skipped = {"weights_bytes", "offload_bytes", "offload_seconds", *TIMES}
    plain = {name: [{k: v for k, v in row.items() if k not in skipped} for row in rows] for name, rows in found.items()}
    assert plain["distributed"] == plain["disk"] == plain["asleep"]
    assert found["disk"][-1]["grad_norm"] > 0
    files = sum(file.stat().st_size for file in (folder / "model").glob("*.safetensors"))
    once = told[0]["bytes"] // 8  # four updates of each of the two jobs
    assert all(one["bytes"] == 8 * once and one["joined"] == one["left"] == 2 for one in told)
    assert [row["weights_bytes"] for row in found["distributed"]] == [2 * once] * 3
    assert once < files <= found["disk"][0]["weights_bytes"]
    assert not (folder / "runs" / "distributed" / "engine_weights").exists()
    report(f"{ranks} ranks: {once} bytes of weights to each server, rows as by disk")


def kills(completion, pid, after, folder):
    """The length; the server `pid` is gone from the `after`-th call on."""
    calls = Path(folder) / "calls"
    with calls.open("a") as file:
        file.write(".")
    if calls.stat().st_size == after:
        os.kill(pid, signal.SIGKILL)
    return length(completion)


@pytest.mark.slow
def test_servers_may_die_between_updates_and_in_one(folder, report):
    """Of three servers, one is gone before the second update, one dies in the third; the last one remains."""
    processes = [ServerProcess(folder / "model") for _ in range(3)]
    urls = [process.urls()[0] for process in processes]
    changes = {"warmup": None, "max_steps": 4, "eval_samples": 0}
    try:
        alone = job(folder, exp_name="alone", actor_infer=role(urls[:1]), **changes)
        run_ranks(2, "tests.jobs.rl.jobs:run", alone, timeout=600)
        order(urls[1], "weights_die", after=2)
        dying = job(folder, exp_name="dying", actor_infer=role(urls), **changes)
        reward = {"pid": processes[2].pid, "after": 12, "folder": str(folder)}
        dying |= {"reward_function": "tests.jobs.engines.test_weights_job:kills", "reward_args": reward}
        run_ranks(2, "tests.jobs.rl.jobs:run", dying, timeout=600)
    finally:
        for process in processes:
            process.kill()
    ours, theirs = rows_of(folder, "alone"), rows_of(folder, "dying")
    for name in ("reward", "loss", "grad_norm"):
        assert [row[name] for row in theirs] == [row[name] for row in ours], name
    # A server that is gone is tried, and dropped, with every update.
    assert [row["engine_replicas"] for row in theirs] == [3, 2, 1, 1]
    assert [row["engine_dropped"] for row in theirs] == [0, 1, 2, 2]
    once = ours[0]["weights_bytes"]
    assert [row["weights_bytes"] / once for row in theirs] == [3, 2, 2, 1]
    report(f"servers by step {[row['engine_replicas'] for row in theirs]}, rows as with one alone")


@pytest.mark.bad_input
def test_where_weights_cannot_come_over_process_groups(folder, report):
    cases = {
        "vllm": ({"strategy_args": {"strategy_name": "vllm"}}, {}, "vLLM's own communicator"),
        "hf_infer": ({"strategy_args": {"strategy_name": "hf_infer"}}, {}, "distributed is for sglang, and"),
        "ahead": ({}, {"async_generation_ratio": 1}, "distributed is not for async_generation_ratio"),
        "shared": (
            {"device_mapping": [1, 2]},
            {"actor_train__device_mapping": [0, 1]},
            "NCCL allows one rank per device",
        ),
        "stages": (
            {"strategy_args": {"strategy_name": "sglang", "strategy_config": {"pp_size": 2}}},
            {},
            "under tensor parallelism alone",
        ),
    }
    for infer, more, words in cases.values():
        with pytest.raises(ConfigFileError, match=words) as caught:
            config_from_dict(job(folder, actor_infer={**role([]), **infer}, **more))
        assert len(caught.value.problems) == 1
    report(str(caught.value))
    said = config_from_dict(job(folder, actor_infer=role(["http://h:1"], weights_folder="/w"))).notices
    assert [notice.path for notice in said] == ["actor_infer.engine_args.weights_folder"]
