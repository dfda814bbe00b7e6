"""Jobs that start their engine's servers: real programs with the engines' options, which end with the job."""

from __future__ import annotations

import json
import re
import shlex
import signal
import sys
import time

import psutil
import pytest

from roll_batching.errors import EngineError
from roll_batching.jobs.config import ConfigFileError, config_from_dict
from roll_batching.jobs.engines.servers import SERVER_KINDS, server_command
from tests.huggingface.test_job import job
from tests.jobs.engines.programs import install, parser
from tests.jobs.launch.commands import done, kill, processes, started, train, wait_for

pytest.importorskip("aiohttp")
pytestmark = pytest.mark.cluster

OF_ROLL = {
    "vllm": {
        "gpu_memory_utilization": 0.8,
        "max_model_len": 8000,
        "block_size": 16,
        "load_format": "auto",
        "enforce_eager": True,
        "enable_prefix_caching": False,
        "disable_log_stats": False,
        "tensor_parallel_size": 2,
        "cudagraph_capture_sizes": [1, 2, 4],
        "limit_mm_per_prompt": {"image": 2},
        "optimization_level": None,
    },
    "sglang": {"mem_fraction_static": 0.7, "load_format": "dummy", "enable_memory_saver": False},
}


def words_of(kind, options, **changes):
    given = {"program": [sys.executable, "serve"], "host": "127.0.0.1", "port": 8000, "sleeps": False, **changes}
    return " ".join(server_command(SERVER_KINDS[kind], "/models/m", options, **given)[2:])


@pytest.mark.config
@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_options_of_rolls_files_are_options_of_the_command_line(kind):
    expected = {
        "vllm": "/models/m --host 127.0.0.1 --port 8000 --logprobs-mode processed_logprobs "
        "--gpu-memory-utilization 0.8 --max-model-len 8000 --block-size 16 --load-format auto "
        "--enforce-eager --no-enable-prefix-caching "
        '--tensor-parallel-size 2 --cudagraph-capture-sizes 1 2 4 --limit-mm-per-prompt {"image": 2}',
        "sglang": "--model-path /models/m --host 127.0.0.1 --port 8000 --mem-fraction-static 0.7 --load-format dummy",
    }
    assert words_of(kind, OF_ROLL[kind]) == expected[kind]
    command = server_command(
        SERVER_KINDS[kind],
        "/m",
        OF_ROLL[kind],
        program=None if kind == "sglang" else ["sh"],
        host="h",
        port=1,
        sleeps=True,
    )
    parser(kind).parse_args(["serve", *command[1:]] if kind == "vllm" else command[3:])
    assert ("--enable-sleep-mode" if kind == "vllm" else "--enable-memory-saver") in words_of(kind, {}, sleeps=True)
    assert "--logprobs-mode raw_logprobs" in words_of("vllm", {"logprobs_mode": "raw_logprobs"}), "the user's count"


@pytest.mark.bad_input
def test_a_program_that_is_not_there(report):
    with pytest.raises(EngineError, match="there is no program 'no-such-vllm' to start a server with") as caught:
        words_of("vllm", {}, program=["no-such-vllm", "serve"])
    report(str(caught.value))


def written(folder, kind, options=None, **changes):
    """The tiny job, whose rollouts come from servers that it starts, as a file."""
    role = {"strategy_args": {"strategy_name": kind, "strategy_config": options or {}}, **changes.pop("infer", {})}
    file = folder / "job.yaml"
    file.write_text(json.dumps(job(folder, warmup=None, **{"actor_infer": role, **changes})))
    return file


def rows_of(folder):
    lines = (folder / "runs" / "tiny" / "metrics.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if row["phase"] == "rl"]


@pytest.mark.parametrize("kind", ["vllm", pytest.param("sglang", marks=pytest.mark.slow)])
def test_a_job_starts_its_servers_and_ends_them(kind, folder, report):
    """Two servers of one device each, two ranks; `done` fails where a process of the job is left."""
    options = {"vllm": {"max_model_len": 64, "enforce_eager": True}, "sglang": {"mem_fraction_static": 0.5}}[kind]
    file = written(folder, kind, options, infer={"device_mapping": [2, 3]}, actor_train__device_mapping=[0, 1])
    code, said = done(folder, *train(file), timeout=400, **install(folder / "engine"))
    assert code == 0, said
    rows = rows_of(folder)
    assert [row["engine_replicas"] for row in rows] == [2, 2] and all(row["engine_gap_mean"] < 1e-4 for row in rows)
    logs = [(folder / "runs" / "tiny" / "engine_logs" / f"{kind}-{n}.log").read_text() for n in (0, 1)]
    (command,) = re.findall(r"notice: starting 2 servers of \w+, the first one as `(.*)`; what they say is in", said)
    assert logs[0].splitlines()[0] == f"$ {command}"
    told = [json.loads(log.splitlines()[1]) for log in logs]
    assert [one["devices"] for one in told] == ["2", "3"] and [one["rank"] for one in told] == [None, None]
    assert told[0]["options"] == shlex.split(command)[-len(told[0]["options"]) :]
    assert "has no effect" not in said
    report(f"started by the job: {command}")


@pytest.mark.slow
@pytest.mark.bad_input
def test_a_server_that_does_not_start_ends_the_job_with_its_last_lines(folder, report):
    programs = install(folder / "engine")
    file = written(folder, "vllm", {"gpu_memory_utilisation": 0.5}, actor_train__device_mapping=[0, 1])
    code, said = done(folder, *train(file), timeout=400, **programs)
    assert code == 1 and "error: unrecognized arguments: --gpu-memory-utilisation 0.5" in said.splitlines()[-1], said
    assert "starting the engine's servers: rank 0: EngineError: the server at http://127.0.0.1:" in said
    code, said = done(folder, *train(written(folder, "vllm")), timeout=400, TEST_ENGINE="dies", **programs)
    assert code == 1 and "ended with exit code 3 before it was ready" in said, said
    assert said.splitlines()[-1].endswith("CUDA out of memory")
    report("\n".join(said.splitlines()[-8:]))
    slow = written(folder, "sglang", infer={"engine_args": {"start_timeout": 5}})
    began = time.monotonic()
    code, said = done(folder, *train(slow), timeout=400, TEST_ENGINE="hangs", **programs)
    assert code == 1 and "was not ready within actor_infer.engine_args.start_timeout = 5 seconds" in said, said
    assert time.monotonic() - began > 5


@pytest.mark.slow
@pytest.mark.parametrize("whom", ["launcher", "rank", "supervisor"])
def test_no_server_outlives_the_job(whom, folder):
    file = written(folder, "vllm", infer={"device_mapping": [0]}, max_steps=1000, eval_samples=0)
    with started(folder, *train(file), **install(folder / "engine")) as launcher:
        metrics = folder / "runs" / "tiny" / "metrics.jsonl"
        wait_for(lambda: metrics.exists() and metrics.read_bytes().count(b"\n") >= 1, 300)
        assert len(of_servers(folder)) == 3, "the supervisor, the server, and its worker"
        if whom == "launcher":
            kill(launcher)
        else:
            mark = "run_under" if whom == "supervisor" else "train"
            victims = [one for one in processes(folder) if mark in " ".join(one.cmdline()) and one.pid != launcher.pid]
            first = min(victims, key=lambda one: one.environ().get("RANK", ""))
            first.send_signal(signal.SIGKILL)
            if whom == "rank":
                assert launcher.wait(timeout=60) == 1
        wait_for(lambda: len(of_servers(folder)) <= (whom == "supervisor"), 30)
        if whom == "supervisor":
            assert launcher.wait(timeout=120) == 1
            last = (folder / "said").read_text().splitlines()[-1]
            assert "no server is left" in last or "no server took the weights" in last
    assert not processes(folder)


def of_servers(folder):
    """The processes of the job's servers."""
    words = ("run_under", "tests.jobs.engines.programs", "time.sleep(3600)")
    found = []
    for one in processes(folder):
        try:
            found += [one] if any(word in " ".join(one.cmdline()) for word in words) else []
        except psutil.NoSuchProcess:
            continue
    return found


@pytest.mark.bad_input
def test_what_servers_of_the_job_need(folder, report):
    options = {"tensor_parallel_size": 2, "port": 8000}
    infer = {"device_mapping": [0, 1, 2]}
    with pytest.raises(ConfigFileError) as caught:
        config_from_dict(json.loads(written(folder, "vllm", options, infer=infer).read_text()))
    assert [problem.message.split(":")[0] for problem in caught.value.problems] == [
        "is set by the job",
        "names 3 devices, but a server has 2 (tensor x pipeline parallel size); name a multiple of 2",
    ]
    report(str(caught.value))
    urls = {"engine_args": {"urls": ["http://h:1"], "start_timeout": 5}}
    config = config_from_dict(json.loads(written(folder, "vllm", {"block_size": 16}, infer=urls).read_text()))
    said = {notice.path: notice.text for notice in config.notices}
    assert said["actor_infer.engine_args.start_timeout"] == "has no effect: the job starts no server"
    assert "which is not started here" in said["actor_infer.strategy_args.strategy_config.block_size"]
