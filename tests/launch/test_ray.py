"""Jobs on several machines, by Ray and by torchrun; nodes of Ray's, and agents of torchrun's, play the machines."""

from __future__ import annotations

import os
import re
import signal
import socket
import time
from pathlib import Path
from typing import Any

import pytest

from roll_batching.observe.metrics_file import read_metrics
from tests.launch.clusters import cluster, on_ray, ranks
from tests.launch.commands import done, kill, processes, started, wait_for, write_job
from tests.rl.test_resume import TIMES

pytestmark = pytest.mark.cluster

SMALL = {"reward_function": "tests.rl.jobs:length", "eval_samples": 0}
LONG = {"max_steps": 0, "warmup__training_args__max_steps": 100_000, "logging_steps": 10_000}
LIMIT = 30
"""Seconds within which a job has ended after whatever happened to it."""


@pytest.fixture(scope="module")
def two_machines():
    with cluster(1, 1) as made:
        yield made


def rows(folder: Path) -> list[dict[str, Any]]:
    """What a job has written, without what depends on how fast it was."""
    found = read_metrics(folder / "runs" / "tiny" / "metrics.jsonl")
    return [{key: value for key, value in row.items() if key not in TIMES} for row in found]


def steps_done(folder: Path) -> int:
    metrics = folder / "runs" / "tiny" / "metrics.jsonl"
    return metrics.read_bytes().count(b"\n") if metrics.exists() else 0


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def by_torchrun(folder: Path, job: Path, *, machines: int, each: int) -> None:
    """One agent of torchrun per machine, as Slurm starts them."""
    port = str(free_port())
    agents = []
    (folder / "agents").mkdir()
    import contextlib

    with contextlib.ExitStack() as together:
        for machine in range(machines):
            place = ["--nnodes", str(machines), "--node-rank", str(machine), "--nproc-per-node", str(each)]
            meet = ["--master-addr", "127.0.0.1", "--master-port", port]
            command = ["-m", "torch.distributed.run", *place, *meet, "-m", "roll_batching.cli"]
            own = folder / "agents" / str(machine)
            own.mkdir()
            agents.append(together.enter_context(started(own, *command, "train", "--config", str(job))))
        for machine, agent in enumerate(agents):
            assert agent.wait(timeout=400) == 0, (folder / "agents" / str(machine) / "said").read_text()


def test_two_machines_of_ray_give_the_bits_of_two_machines_of_torchrun(two_machines, tmp_path, report):
    ours, theirs = tmp_path / "ray", tmp_path / "torchrun"
    ours.mkdir(), theirs.mkdir()
    code, said = done(ours, *on_ray(write_job(ours, **SMALL), address=two_machines.address), timeout=400)
    assert code == 0, said
    by_torchrun(theirs, write_job(theirs, **SMALL), machines=2, each=1)
    assert rows(ours) == rows(theirs)
    assert [row["step"] for row in rows(ours)] == [1, 2, 1, 2]
    assert re.search(r"placed by Ray: rank 0 on .*, rank 1 on ", said)
    assert re.search(r"^\(rank 0 pid=\d+\) rl +2/2 .* reward ", said, re.MULTILINE), "progress, with its rank"
    assert "metrics, TensorBoard events and learning_curve.png are in" in said
    assert (ours / "runs" / "tiny" / "learning_curve.png").stat().st_size > 1000
    assert not ranks()
    report("the same rows to the bit: two nodes of Ray, two agents of torchrun")


@pytest.mark.slow
def test_a_killed_rank_ends_the_job(two_machines, tmp_path, report):
    with started(tmp_path, *on_ray(write_job(tmp_path, **LONG), address=two_machines.address)) as driver:
        wait_for(lambda: steps_done(tmp_path) > 5, 300)
        began = time.monotonic()
        os.kill(ranks()[1].pid, signal.SIGKILL)
        assert driver.wait(timeout=LIMIT) == 1
        wait_for(lambda: not ranks(), LIMIT)
    last = (tmp_path / "said").read_text().splitlines()[-1]
    assert re.match(r"error: rank [01] \(process \d+ on .*\) ended without a message: ", last), last
    report(f"a killed rank ended the job in {time.monotonic() - began:.1f} s: {last}")


@pytest.mark.slow
@pytest.mark.parametrize("address", ["local", "auto"])
def test_a_killed_driver_leaves_no_actor(address, request, tmp_path):
    if address != "local":
        address = request.getfixturevalue("two_machines").address
    with started(tmp_path, *on_ray(write_job(tmp_path, **LONG), address=address)) as driver:
        wait_for(lambda: steps_done(tmp_path) > 5, 300)
        kill(driver)
        wait_for(lambda: not ranks(), LIMIT)
        wait_for(lambda: not processes(tmp_path), LIMIT)


@pytest.mark.slow
def test_a_rank_that_raises_is_heard_with_its_traceback(two_machines, tmp_path):
    text = "def loss_of(**_):\n    raise RuntimeError('out of ideas')\n"
    (tmp_path / "broken.py").write_text(text)
    job = write_job(tmp_path, **SMALL, loss_function="broken:loss_of")
    path = os.pathsep.join([str(tmp_path), os.environ["PYTHONPATH"]])
    code, said = done(tmp_path, *on_ray(job, address=two_machines.address), PYTHONPATH=path)
    assert code == 1
    assert "out of ideas" in said.splitlines()[-1], said
    assert not ranks()
