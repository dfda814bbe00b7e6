"""Jobs on several machines under Ray and torchrun, with Ray nodes and torchrun agents as machines."""

from __future__ import annotations

import os
import re
import signal
import socket
import time
from pathlib import Path
from typing import Any

import pytest

from roll_batching.jobs.observe.run_files import read_metrics
from tests.jobs.launch.clusters import cluster, on_ray, ranks
from tests.jobs.launch.commands import ROOT, done, kill, processes, started, train, trained, wait_for, write_job
from tests.jobs.run.test_resume import TIMES

pytestmark = pytest.mark.cluster

SMALL = {"reward_function": "tests.jobs.rl.jobs:length", "eval_samples": 0}
LONG = {"max_steps": 0, "warmup__training_args__max_steps": 100_000, "logging_steps": 10_000}
SAVING = {
    "max_steps": 0,
    "warmup__training_args__max_steps": 300,
    "logging_steps": 100,
    "save_steps": 100,
    "save_total_limit": 1,
}
LIMIT = 30
"""Seconds within which a job must end after any failure."""


@pytest.fixture(scope="module")
def two_machines():
    with cluster(1, 1) as made:
        yield made


def rows(folder: Path) -> list[dict[str, Any]]:
    """Files of a job, without timings."""
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


@pytest.mark.slow
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
def test_tensor_parallel_groups_lie_on_one_machine_and_change_no_bit(tmp_path):
    ours, theirs = tmp_path / "ray", tmp_path / "here"
    ours.mkdir(), theirs.mkdir()
    layout = {"actor_train__strategy_args__strategy_config__tensor_model_parallel_size": 2}
    with cluster(2, 2) as made:
        job = write_job(ours, **SMALL, **layout)
        code, said = done(ours, *on_ray(job, ranks=4, address=made.address), timeout=600)
    assert code == 0, said
    assert re.search(r"placed by Ray: ranks 0-1 on .*, ranks 2-3 on ", said)
    code, said = done(theirs, *train(write_job(theirs, **SMALL, **layout), ranks=4), timeout=600)
    assert code == 0, said
    assert rows(ours) == rows(theirs)


@pytest.mark.slow
def test_ranks_of_a_machine_see_all_of_its_gpus_and_drive_one_each(tmp_path):
    """GPUs that exist only in Ray's count: their assignment is checked before any rank uses them."""
    names = ("RANK", "LOCAL_RANK", "CUDA_VISIBLE_DEVICES")
    text = f"""
import os
with open("{tmp_path}/seen", "a") as seen:
    print(*[os.environ.get(name) for name in {names}], file=seen)
def reward(completion):
    return 1.0
"""
    (tmp_path / "looking.py").write_text(text)
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    job = write_job(tmp_path, max_steps=1, warmup=None, eval_samples=0, reward_function="looking:reward")
    with cluster(4, gpus=2) as made:
        code, said = done(tmp_path, *on_ray(job, address=made.address), timeout=400, PYTHONPATH=path)
    assert code == 0, said
    seen = {tuple(line.split()) for line in (tmp_path / "seen").read_text().splitlines()}
    devices = {shown for *_, shown in seen - {("None", "None", "None")}}
    assert devices in ({"0,1"}, {"1,0"})
    assert {line[:2] for line in seen} >= {("0", "0"), ("1", "1")}


@pytest.mark.slow
def test_roles_have_actors_of_their_own_which_are_started_again_and_change_no_bit(tmp_path, report):
    """A sampler and a reference on separate devices of any machine; one process is killed, then rank 0."""
    ours, theirs = tmp_path / "ray", tmp_path / "here"
    ours.mkdir(), theirs.mkdir()
    roles = {"use_kl_loss": True, "kl_loss_coef": 0.1, "warmup": None, "max_steps": 6, "rollout_samples": -1}
    roles |= {"actor_train__device_mapping": [0], "reference": {"device_mapping": [3]}}
    roles |= {"actor_infer": {"device_mapping": [1, 2]}}
    code, said = done(theirs, *train(write_job(theirs, **SMALL, **roles), ranks=1), timeout=600)
    assert code == 0, said
    with cluster(2, 2) as made:
        job = write_job(ours, **SMALL, **roles)
        with started(ours, *on_ray(job, ranks=1, address=made.address)) as driver:
            wait_for(lambda: steps_done(ours) > 1, 400)
            assert len(ranks()) == 4
            next(one for one in ranks() if "RoleRank" in one.cmdline()[0]).kill()
            assert driver.wait(timeout=400) == 0, (ours / "said").read_text()
        wait_for(lambda: not ranks(), LIMIT)
        long = write_job(tmp_path, **SMALL, **roles | {"max_steps": 10_000, "exp_name": "long"})
        with started(tmp_path, *on_ray(long, ranks=1, address=made.address)) as driver:
            wait_for((tmp_path / "runs" / "long" / "metrics.jsonl").exists, 400)
            next(one for one in ranks() if "RoleRank" not in one.cmdline()[0]).kill()
            assert driver.wait(timeout=LIMIT) == 1
            wait_for(lambda: not ranks(), LIMIT)
    said = (ours / "said").read_text()
    assert "actor_infer placed by Ray: " in said and "reference placed by Ray: rank 0 on " in said
    assert re.search(r"the (sampler|reference) ended(: rank [01] of its 2)? with its process: ", said), said
    restarts = {"sampler_restarts", "reference_restarts"}
    assert [{k: v for k, v in row.items() if k not in restarts} for row in rows(ours)] == [
        {k: v for k, v in row.items() if k not in restarts} for row in rows(theirs)
    ]
    report("a sampler and a reference as actors of their own, one killed: the rows of processes on one machine")


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
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    code, said = done(tmp_path, *on_ray(job, address=two_machines.address), PYTHONPATH=path)
    assert code == 1
    assert "out of ideas" in said.splitlines()[-1], said
    assert not ranks()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The rows of the job with checkpoints, without a failure."""
    folder = tmp_path_factory.mktemp("undisturbed")
    code, said = trained(folder, **SAVING)
    assert code == 0, said
    return rows(folder)


@pytest.mark.slow
def test_a_killed_rank_is_started_anew_from_the_last_checkpoint(two_machines, undisturbed, tmp_path, report):
    job = write_job(tmp_path, **SAVING)
    with started(tmp_path, *on_ray(job, address=two_machines.address, restarts=2)) as driver:
        wait_for(lambda: steps_done(tmp_path) > 120, 300)
        os.kill(ranks()[0].pid, signal.SIGKILL)
        wait_for(lambda: "restart 1 of 2, from " in (tmp_path / "said").read_text(), LIMIT)
        assert driver.wait(timeout=400) == 0, (tmp_path / "said").read_text()
    assert re.search(r"restart 1 of 2, from .*checkpoints/warmup-000100\n", (tmp_path / "said").read_text())
    assert rows(tmp_path) == undisturbed
    report("a killed rank, started anew from its last checkpoint: the rows of a job that nothing happened to")


@pytest.mark.slow
def test_a_killed_machine_is_replaced_by_another(undisturbed, tmp_path, report):
    job = write_job(tmp_path, **SAVING)
    with cluster(1, 1, 1) as three:
        with started(tmp_path, *on_ray(job, address=three.address, restarts=1)) as driver:
            wait_for(lambda: steps_done(tmp_path) > 120, 300)
            began, parents = time.monotonic(), {rank.ppid() for rank in ranks()}
            raylets = {node.all_processes["raylet"][0].process.pid: node for node in three.worker_nodes}
            three.remove_node(raylets[(parents & raylets.keys()).pop()], allow_graceful=False)
            wait_for(lambda: "restart 1 of 1, from " in (tmp_path / "said").read_text(), LIMIT)
            seconds = time.monotonic() - began
            assert driver.wait(timeout=400) == 0, (tmp_path / "said").read_text()
    assert rows(tmp_path) == undisturbed
    report(f"a killed machine: missed after {seconds:.1f} s, the job went on elsewhere to the same rows")


@pytest.mark.slow
def test_a_checkpoint_of_an_earlier_run_is_not_gone_on_from(two_machines, tmp_path):
    """A rank lost before the first checkpoint restarts the job from its beginning."""
    small = SAVING | {"warmup__training_args__max_steps": 100}
    code, said = trained(tmp_path, **small)
    assert code == 0, said
    job = write_job(tmp_path, **SAVING | {"save_steps": 250})
    with started(tmp_path, *on_ray(job, address=two_machines.address, restarts=1)) as driver:
        wait_for(lambda: len(ranks()) == 2, 300)
        os.kill(ranks()[0].pid, signal.SIGKILL)
        assert driver.wait(timeout=400) == 0, (tmp_path / "said").read_text()
    assert "restart 1 of 1, where it started" in (tmp_path / "said").read_text()
    assert len(rows(tmp_path)) == 300


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--max-restarts", "1"], "--max-restarts needs --launcher ray"),
        (["--launcher", "ray", "--max-restarts", "1"], "the job writes none. Set save_steps"),
        (["--launcher", "ray", "--address", "ray://head:10001"], "is Ray's client, which cannot run a job"),
        (["--launcher", "ray", "--address", "127.0.0.1:1"], "there is no Ray at --address 127.0.0.1:1 ("),
        (["--launcher", "ray", "--address", "head"], "--address head: use auto, local or HOST:PORT"),
    ],
)
def test_what_cannot_be_started_says_so(options, words, tmp_path, report):
    code, said = done(tmp_path, *train(write_job(tmp_path, **SMALL)), *options)
    assert code == 2, said
    assert words in said.splitlines()[-1], said
    report(said.splitlines()[-1])


@pytest.mark.slow
def test_no_room_is_waited_for_and_said(two_machines, tmp_path, report):
    job = write_job(tmp_path, **SMALL, actor_train__backend_timeout=0.25)
    code, said = done(tmp_path, *on_ray(job, ranks=4, address=two_machines.address), timeout=300)
    lines = [line for line in said.splitlines() if "room for 4 ranks (CPUs: one each)" in line]
    assert code == 1 and lines[0].startswith("notice: waiting 10 s so far for room"), said
    assert lines[-1].startswith("error: there was no room for 4 ranks") and "for 0.25 minutes" in lines[-1]
    report(lines[-1])
