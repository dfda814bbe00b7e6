"""Jobs whose weights go to servers without a file: the rows of those that read directories."""

from __future__ import annotations

import pytest

from roll_batching.config import ConfigFileError, config_from_dict
from tests.engines.test_job import rows_of
from tests.engines.test_replicas import seen, start
from tests.huggingface import tiny
from tests.huggingface.test_job import job
from tests.observe.rows import TIMES
from tests.rl.jobs import write_data
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
            run_ranks(ranks, "tests.rl.jobs:run", payload, timeout=600)
        told = [seen(url) for url in urls]
    finally:
        server.kill()
        server.wait()
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


@pytest.mark.bad_input
def test_where_weights_cannot_come_over_process_groups(folder, report):
    cases = {
        "vllm": ({"strategy_args": {"strategy_name": "vllm"}}, {}, "vLLM's own communicator"),
        "hf_infer": ({"strategy_args": {"strategy_name": "hf_infer"}}, {}, "distributed is for sglang, and"),
        "ahead": ({}, {"async_generation_ratio": 1}, "distributed is not for async_generation_ratio"),
        "shared": (
            {"device_mapping": [1, 2]},
            {"actor_train__device_mapping": [0, 1]},
            "NCCL has no two ranks on one device",
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
