"""A driver's loop gives the bits of ranks without a driver; killed actors and killed drivers."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time

import psutil
import pytest

from tests.jobs.launch.commands import ROOT, done, kill, processes, started, wait_for

pytestmark = [pytest.mark.cluster, pytest.mark.slow]
pytest.importorskip("ray")

EXAMPLE = str(ROOT / "examples" / "ray_driver.py")
LIMIT = 30
"""Seconds within which a loop must end after any failure."""


def actors():
    """The processes of all ranks of worker groups, on this machine, oldest first."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess, psutil.AccessDenied, IndexError):
            if process.cmdline()[0].startswith("ray::StrategyRank"):
                found.append(process)
    return sorted(found, key=lambda process: process.create_time())


def said_in(folder):
    return (folder / "said").read_text()


def test_a_driver_gives_the_bits_of_ranks_without_one(tmp_path, report):
    ours, theirs = tmp_path / "ray", tmp_path / "torchrun"
    ours.mkdir(), theirs.mkdir()
    code, said = done(ours, EXAMPLE, timeout=400)
    assert code == 0, said
    code, by_ranks = done(theirs, "-m", "torch.distributed.run", "--nproc-per-node", "4", EXAMPLE, timeout=400)
    assert code == 0, by_ranks
    lines = re.findall(r"^(?:step \d: loss|log-prob) .*$", said, re.MULTILINE)
    assert len(lines) == 4
    assert all(int(shared) > 100 for shared in re.findall(r"(\d+) shared$", "\n".join(lines[:3]), re.MULTILINE)), lines
    assert lines == re.findall(r"^(?:step \d: loss|log-prob) .*$", by_ranks, re.MULTILINE)
    assert not actors()
    report(f"a driver with TP 2 x DP 2 actors and torchrun, to the bit: {lines[-2]}")


def test_a_killed_actor_ends_the_loop_and_a_shared_error_does_not(tmp_path, report):
    with started(tmp_path, "-m", "tests.jobs.driver.loops", str(tmp_path)) as driver:
        wait_for(lambda: driver.poll() is not None or "loss " in said_in(tmp_path), 400)
        assert driver.poll() is None and len(actors()) == 2, said_in(tmp_path)
        began = time.monotonic()
        os.kill(actors()[1].pid, signal.SIGKILL)
        wait_for(lambda: "RollBatchingError" in said_in(tmp_path), LIMIT)
        seconds = time.monotonic() - began
        assert not actors(), "none is left when the error is raised"
        assert driver.wait(timeout=60) == 1
    said = said_in(tmp_path)
    assert re.search(r"^all ranks: train_step: ranks 0, 1: DataError: .*'response_mask'", said, re.MULTILINE), said
    assert re.search(r"^here: This batch of 20 samples does not hold ids ", said, re.MULTILINE)
    assert "counts [10, 10]" in said, "batch_balance gives every replica as many samples"
    last = [line for line in said.splitlines() if "(raylet)" not in line][-1]  # Ray's own lines come at any time
    assert re.match(r".*RollBatchingError: rank [01] \(process \d+ on .*\) ended without a message: ", last), said
    assert re.search(r"^notice: the log of rank [01] is .*/logs/rank_000[01]\.log$", said, re.MULTILINE)
    report(f"a killed actor ended the driver's loop in {seconds:.1f} s: {last}")


def test_a_killed_driver_leaves_no_actor(tmp_path):
    with started(tmp_path, "-m", "tests.jobs.driver.loops", str(tmp_path)) as driver:
        wait_for(lambda: driver.poll() is not None or "loss " in said_in(tmp_path), 400)
        assert driver.poll() is None and len(actors()) == 2, said_in(tmp_path)
        kill(driver)
        wait_for(lambda: not actors(), LIMIT)
        wait_for(lambda: not processes(tmp_path), LIMIT)
