"""The list of checks, and their run over all ranks."""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from roll_batching.distributed.consensus import rank_error
from roll_batching.distributed.parallel_layout import leave_processes
from roll_batching.jobs.launch.devices import raise_open_files_limit
from roll_batching.jobs.launch.rendezvous import rank_info, wait_for_ranks
from roll_batching.lifetime import end_with_parent
from roll_batching.settings import ArchitectureConfig
from roll_batching.tools.doctor import calibration, machine, training
from roll_batching.tools.doctor.session import Answer, Session, Steps

_REPORT = "report it, with the file of --json"
_SEVERAL, _START = "several ranks", "start one per GPU: torchrun --nproc-per-node 8 --no-python roll-batching doctor"
_GPU = "a GPU"
ANSWERS = "an answer of every rank"


Record = dict[str, Any]
"""Result of a check, in the JSON of the report."""


class Check(NamedTuple):
    """A check; the docstring of `run` names the fault that it finds."""

    name: str
    run: Callable[[Session], Steps]
    seconds: float
    """Time limit of the measurement."""
    cure: str
    """What to do when it fails."""
    needs: tuple[str, ...] = ()
    """Conditions and checks without which it cannot run."""


def checks_of(world_size: int, *, full: bool) -> list[Check]:
    """The checks for a number of ranks, in order."""
    slow = 300 if full else 60
    group, several = ("process group",), ("process group", _SEVERAL)
    shared = "folder shared" if world_size > 1 else "folder"
    shm = "docker run --shm-size=16g --ulimit memlock=-1 --ulimit nofile=65536"
    return [
        Check("installed", machine.check_installed, 30, "install the same versions everywhere (docs/installing.md)"),
        Check("clocks", machine.check_clocks, 10, "synchronise the clock of that machine (chrony, ntpd)"),
        Check("limits", machine.check_resources, 10, shm),
        Check("one rank", training.check_one_rank, slow, "read the error; where one rank alone is wrong, test its GPU"),
        Check("attention", training.check_attention, slow, "choose another attention_backend", ("one rank",)),
        Check("process group", training.check_group, 60, "open ports; set NCCL_SOCKET_IFNAME; read NCCL_DEBUG=INFO"),
        Check("speed", training.check_speed, slow, "look for other jobs, heat and power limits on that machine"),
        Check("collectives", training.check_collectives, slow / 2, "set NCCL_DEBUG=INFO; try pairs of ranks", several),
        Check("folder", machine.check_folder, slow, "give --folder a writable folder, on a file system with locks"),
        Check("folder shared", machine.check_sharing, 30, "mount one file system everywhere", ("folder", _SEVERAL)),
        *(
            Check(name, run, slow, f"train in a layout that passes; {_REPORT}", ("one rank", *several))
            for name, run in training.layout_checks(world_size, full=full).items()
        ),
        Check("checkpoint", training.check_checkpoint, slow, f"use another file system; {_REPORT}", (*group, shared)),
        Check("host reads", training.check_host_reads, slow, _REPORT, (*group, _GPU)),
        Check("memory", training.check_memory, 10, _REPORT, group),
    ]


def calibration_checks(shape: ArchitectureConfig) -> list[Check]:
    """The checks that measure rates at the `shape` of a model, in order."""
    needs = ("process group", _SEVERAL, calibration.MEASURED)
    slow = "look for other jobs, heat and power limits on that machine, and measure again"
    slow += "; late on all: give a smaller --model"
    return [
        Check("installed", machine.check_installed, 30, "install the same versions everywhere (docs/installing.md)"),
        Check("rates", partial(calibration.check_rates, shape=shape), 300, slow),
        Check("process group", training.check_group, 60, "open ports; set NCCL_SOCKET_IFNAME; read NCCL_DEBUG=INFO"),
        Check("links", calibration.check_links, 120, "set NCCL_DEBUG=INFO; try pairs of ranks", needs),
    ]


def open_session(path: Path, *, full: bool) -> Session:
    """The session of this rank as the environment describes it, or of this process alone. Waits for all ranks."""
    raise_open_files_limit()
    store, rank, world_size = dist.HashStore(), 0, 1
    if (info := rank_info()) is not None:
        if info.is_supervised:
            end_with_parent(os.getppid())
        store, rank, world_size = wait_for_ranks(info, minutes=2.0), info.rank, info.world_size
    session = Session(store=store, rank=rank, world_size=world_size, folder=path, full=full)
    token = session.exchange("start", Answer("value", uuid.uuid4().hex[:12]), 60.0)[0].value
    session.folder = path / f".doctor-{token}"
    session.passed = {_SEVERAL: world_size > 1, _GPU: torch.cuda.is_available(), ANSWERS: True}
    return session


def examine(session: Session, checks: Sequence[Check]) -> list[Record]:
    """Runs `checks` on all ranks; returns the same records on each. Collective.

    After a check that is late on some rank, the rest is not run. Else this ends the process group. Close the session
    after the report.
    """
    records: list[Record] = []
    for check in checks:
        started, steps, answers = time.monotonic(), check.run(session), []
        if missing := [need for need in (ANSWERS, *check.needs) if not session.passed.get(need)]:
            status, finding = "not possible here", f"needs {missing[0]}"
            cure = {_SEVERAL: _START, _GPU: "run it on a machine with GPUs"}.get(missing[0], "mend that first")
        else:
            answers = session.exchange(check.name, session.call(partial(next, steps), check.seconds), check.seconds)
            problems, summary = _judge(check, steps, answers)
            status, finding = ("failed", "; ".join(problems)) if problems else ("passed", summary)
            cure = check.cure if problems else ""
        session.passed[check.name] = status == "passed"
        session.passed[ANSWERS] &= all(answer.status != "late" for answer in answers)
        record = {"name": check.name, "status": status, "finding": finding, "next": cure}
        record["catches"] = str(getattr(check.run, "func", check.run).__doc__)
        ranks = [answer._asdict() for answer in answers]
        records.append({**record, "seconds": round(time.monotonic() - started, 2), "ranks": ranks})
    machine.remove_files(session)
    if session.passed[ANSWERS]:
        leave_processes()
    return records


def _judge(check: Check, steps: Steps, answers: Sequence[Answer]) -> tuple[list[str], str]:
    """(problems, summary) of a check from the answers of all ranks."""
    failures = {rank: str(answer.value) for rank, answer in enumerate(answers) if answer.status != "value"}
    if failures:
        return [str(rank_error(check.name, failures))], ""
    try:
        steps.send([answer.value for answer in answers])
    except StopIteration as end:
        result: tuple[list[str], str] = end.value
    return result
