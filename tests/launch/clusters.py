"""Clusters of Ray on this machine, each machine of theirs a node with processes of its own."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from tests.launch.commands import ROOT, wait_for


@contextlib.contextmanager
def cluster(*cpus: int) -> Iterator[Any]:
    """A cluster of one machine per number, each with so many CPUs of Ray's count; the first is its head."""
    variables = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0"}
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        from ray.cluster_utils import Cluster

        made = Cluster(initialize_head=True, head_node_args={"num_cpus": cpus[0], "include_dashboard": False})
        try:
            for more in cpus[1:]:
                made.add_node(num_cpus=more)
            yield made
        finally:
            made.shutdown()
            wait_for(lambda: not ranks(), 30)
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


def ranks() -> list[psutil.Process]:
    """The processes of all ranks that are actors, on this machine, oldest first."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess, psutil.AccessDenied, IndexError):
            if process.cmdline()[0].startswith("ray::Rank"):
                found.append(process)
    return sorted(found, key=lambda process: process.create_time())


def on_ray(job: Path, *overrides: str, ranks: int = 2, address: str, restarts: int = 0) -> list[str]:
    """Arguments of python that train `job` on the Ray at `address`."""
    options = ["--nproc", str(ranks), "--launcher", "ray", "--address", address, "--max-restarts", str(restarts)]
    return ["-m", "roll_batching.cli", "train", "--config", str(job), *options, *overrides]
