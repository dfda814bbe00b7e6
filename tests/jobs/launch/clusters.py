"""Ray clusters on this machine, whose machines are nodes with processes of their own."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from tests.jobs.launch.commands import ROOT, wait_for


@contextlib.contextmanager
def cluster(*cpus: int, gpus: int = 0) -> Iterator[Any]:
    """A cluster of one machine per number, each with so many CPUs, and so many GPUs, of Ray's count."""
    variables = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0"}
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        made = _started([{"num_cpus": number, "num_gpus": gpus} for number in cpus])
        try:
            yield made
        finally:
            made.shutdown()
            wait_for(lambda: not ranks(), 30)
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


def _started(machines: list[dict[str, int]], tries: int = 4) -> Any:
    """Retries: Ray gives each of its processes 30 s to start, which can be too short on a busy machine."""
    from ray.cluster_utils import Cluster

    made = Cluster()
    try:
        for number, machine in enumerate(machines):
            made.add_node(**machine, **({} if number else {"include_dashboard": False}))
    except Exception:
        for process in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                if any("ray" in word for word in process.cmdline()[:2]):
                    process.kill()
        if tries == 1:
            raise
        return _started(machines, tries - 1)
    return made


def ranks() -> list[psutil.Process]:
    """The processes of all rank actors on this machine, those of roles included, oldest first."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess, psutil.AccessDenied, IndexError):
            if process.cmdline()[0].startswith(("ray::Rank", "ray::RoleRank")):
                found.append(process)
    return sorted(found, key=lambda process: process.create_time())


def on_ray(job: Path, *overrides: str, ranks: int = 2, address: str, restarts: int = 0) -> list[str]:
    """Arguments of python that train `job` on the Ray at `address`."""
    options = ["--nproc", str(ranks), "--launcher", "ray", "--address", address, "--max-restarts", str(restarts)]
    return ["-m", "roll_batching.cli", "train", "--config", str(job), *options, *overrides]
