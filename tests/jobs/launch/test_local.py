"""The local launcher: ranks' environment, and the end of all ranks with the root cause when one fails."""

from __future__ import annotations

import fnmatch
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from roll_batching.errors import ConfigError
from roll_batching.jobs.config import config_from_dict
from roll_batching.jobs.launch.devices import choose_devices, oversubscription_warning, process_count, visible_devices
from roll_batching.jobs.run.checkpoint_names import advise_resuming
from tests.jobs.launch import commands

pytest.importorskip("torch")

LAUNCH = """
import sys
from roll_batching.jobs.launch.local import launch
message = launch("tests.jobs.launch.workers", sys.argv[1:], 2, {"NVTE_FLASH_ATTN": "1"})
if message:
    sys.exit(message)
"""


def launched(*arguments):
    command = [sys.executable, "-c", LAUNCH, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_variables_are_there_before_any_import(tmp_path):
    done = launched("environment", tmp_path)
    assert done.returncode == 0, done.stderr
    assert [(tmp_path / f"rank{rank}").read_text() for rank in (0, 1)] == ["1", "1"]


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("error", "rank 1 failed: prompts.jsonl:7: not an object"),
        ("aftermath", "rank 1 failed: RuntimeError: the cause"),
        ("leaves", "rank 1 failed: my_loss (*workers.py:*) called sys.exit(0) before the job was complete; *"),
        (
            "vanishes",
            "rank 1 ended with exit code 0 before the job was complete, without a message; its output is above",
        ),
        (
            "lost",
            "rank 1 ended with exit code 0 before the job was complete, without a message; its output is above",
        ),
        ("killed", "rank 1 was ended by signal 9 (SIGKILL) without a message; its output is above"),
    ],
)
def test_a_failing_rank_ends_the_job_and_one_message_says_why(how, message, tmp_path, report):
    done = launched(how, tmp_path)
    seconds = time.time() - float((tmp_path / "failing").read_text())
    assert done.returncode != 0
    *above, last = done.stderr.rstrip().splitlines()
    assert fnmatch.fnmatchcase(last, message), done.stderr
    assert seconds < 15
    if how == "aftermath":  # an error of ours, or of torch's: where it happened is shown
        assert above[0] == "Where rank 1 failed (most recent call last):" and "in aftermath" in above[-2]
        assert "rank 0" not in done.stderr
    else:
        assert not above
    report(f"rank 1 fails ({how}): all ended after {seconds:.1f} s: {last}")


def test_what_a_killed_rank_has_started_ends_with_the_job(tmp_path):
    arguments = ("-c", LAUNCH, "leaves_children", str(tmp_path))
    with commands.started(tmp_path, *arguments) as job:
        commands.wait_for((tmp_path / "failing").exists, 150)
        assert job.wait(timeout=15) == 1
        assert not commands.processes(tmp_path)


def test_what_killed_ranks_have_forked_ends_even_without_a_launcher(tmp_path):
    with commands.started(tmp_path, "-c", LAUNCH, "forks", str(tmp_path)) as job:
        commands.wait_for(lambda: len(list(tmp_path.glob("forked*"))) == 2, 150)
        ranks = [p for p in commands.processes(tmp_path) if p.ppid() == job.pid]
        assert len(ranks) == 2 and len(commands.processes(tmp_path)) == 5
        commands.kill(job)
        for rank in ranks:
            rank.kill()
        commands.wait_for(lambda: not commands.processes(tmp_path), 5)


@pytest.mark.parametrize("how", ["leaves", "error"])
def test_without_our_launcher_a_rank_that_leaves_early_exits_with_1(how, tmp_path):
    place = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    code, said = commands.done(tmp_path, "-m", "tests.jobs.launch.workers", how, str(tmp_path), **place)
    assert code == 1
    assert said.startswith("rank 1 failed: ") and len(said.splitlines()) == 1


def test_process_count():
    config = config_from_dict({"actor_train": {"device_mapping": "0-3"}})
    assert process_count(config, None) == 4
    assert process_count(config, 2) == 2
    assert process_count(config_from_dict({}), None) == 1
    layout = {"strategy_args": {"strategy_config": {"tensor_model_parallel_size": 2}}, "device_mapping": "0-3"}
    with pytest.raises(ConfigError, match="3 processes do not divide"):
        process_count(config_from_dict({"actor_train": layout}), 3)


def test_devices_of_a_machine():
    assert choose_devices(range(8), 8, 0, forced=False) == []
    assert choose_devices([4, 5], 2, 8, forced=False) == [4, 5]
    assert choose_devices([4, 5], 1, 8, forced=True) == [4]
    assert choose_devices(range(8), 1, 1, forced=True) == [0]
    assert choose_devices([4, 5], 4, 8, forced=True) == [0, 1, 2, 3]
    assert choose_devices([3, 4], 2, 4, forced=True) == [0, 1]
    assert choose_devices(None, 2, 2, forced=False) == [0, 1]
    with pytest.raises(ConfigError, match="names device 7, but this machine has 1 GPU .*--nproc 1"):
        choose_devices(range(8), 8, 1, forced=False)
    with pytest.raises(ConfigError, match="names device 8, but this machine has 8 GPUs"):
        choose_devices([7, 8], 2, 8, forced=False)
    with pytest.raises(ConfigError, match="--nproc asks for 4, but this machine has 2 GPUs"):
        choose_devices(range(8), 4, 2, forced=True)


def test_visible_devices_count_within_what_is_visible():
    assert visible_devices([0, 1], {}) == {"CUDA_VISIBLE_DEVICES": "0,1"}
    assert visible_devices([0, 2], {"CUDA_VISIBLE_DEVICES": "4,5,6"}) == {"CUDA_VISIBLE_DEVICES": "4,6"}
    assert visible_devices([], {}) == {}


@pytest.mark.parametrize("stop", [signal.SIGTERM, signal.SIGINT])
def test_stopping_the_launcher_ends_the_ranks(tmp_path, stop):
    command = [sys.executable, "-c", LAUNCH, "wait", str(tmp_path)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as job:
        deadline = time.monotonic() + 60
        while len(list(tmp_path.glob("rank*"))) < 2 and time.monotonic() < deadline:
            time.sleep(0.1)
        pids = [int(file.read_text()) for file in tmp_path.glob("rank*")]
        job.send_signal(stop)
        _, said = job.communicate(timeout=30)
    assert job.returncode != 0 and said == f"stopped by {stop.name}; all ranks were ended\n"
    assert len(pids) == 2 and not any(Path(f"/proc/{pid}").exists() for pid in pids)


def test_a_stopped_job_names_the_checkpoint_to_resume_from(tmp_path):
    assert advise_resuming(tmp_path).startswith("No checkpoint was written")
    for name in ("warmup-000009", "rl-000010", "rl-000009", "rl-000011.partial"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
        (tmp_path / "checkpoints" / name / "job.json").touch()
    (tmp_path / "checkpoints" / "rl-000012").mkdir()  # not complete
    text = f"{tmp_path}/checkpoints/rl-000010 is complete: resume with resume_from_checkpoint=true"
    assert advise_resuming(tmp_path) == text


@pytest.mark.parametrize(("count", "processors", "said"), [(16, 2, True), (4, 2, False), (9, 4, True), (64, 64, False)])
def test_more_processes_than_a_machine_without_gpus_has_room_for_are_said(count, processors, said):
    text = oversubscription_warning(count, processors)
    assert (text is not None) == said
    assert text is None or (f"{count} processes" in text and f"--nproc {processors}" in text)
