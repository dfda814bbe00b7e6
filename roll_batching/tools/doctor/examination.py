"""The list of checks, and their run over all ranks."""

from __future__ import annotations

import json
import os
import time
import uuid
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist

from roll_batching.distributed.consensus import rank_error
from roll_batching.distributed.parallel_layout import leave_processes
from roll_batching.jobs.launch.devices import raise_open_files_limit
from roll_batching.jobs.launch.rendezvous import rank_info, wait_for_ranks
from roll_batching.lifetime import end_with_parent
from roll_batching.tools.doctor import machine, training
from roll_batching.tools.doctor.session import GRACE_SECONDS, Answer, Session, Steps

_RENDEZVOUS_MINUTES = 2.0
_REPORT = "report it, with the file of --json"


class Check(NamedTuple):
    """One check."""

    name: str
    run: Callable[[Session], Steps]
    """Its docstring names the fault that it finds."""
    seconds: float
    """Time limit of the measurement."""
    cure: str
    """What to do when it fails."""
    stops: bool = False
    """Whether nothing can follow when it fails."""


Record = dict[str, Any]
"""Outcome of a check: name, status, finding, next, catches, seconds, and the answers of all ranks."""


def checks_of(world_size: int, *, full: bool) -> list[Check]:
    """The checks for a number of ranks, in order."""
    slow = 300 if full else 60
    layouts = training.layout_checks(world_size, full=full)
    same = "install the same versions on all machines (docs/installing.md)"
    raised = "raise them: docker run --shm-size=16g --ulimit memlock=-1 --ulimit nofile=65536"
    kernel = "choose another attention_backend (docs/kernels.md), or reinstall its package on that machine"
    ports = "open the ports between the machines, set NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME, NCCL_DEBUG=INFO"
    network = "see where each rank waits; run on one machine, then on pairs, with NCCL_DEBUG=INFO"
    writable = "give --folder a writable folder with locks, on a file system that all machines share"
    mounted = "mount one file system on all machines, with locks (NFS: neither nolock nor local_lock)"
    return [
        Check("installed", machine.check_installed, 30, same),
        Check("clocks", machine.check_clocks, 10, "synchronise the clock of that machine (chrony, ntpd)"),
        Check("limits", machine.check_resources, 10, raised),
        Check("one rank", training.check_one_rank, slow, "read the error; where one rank alone is wrong, test its GPU"),
        Check("attention", training.check_attention, slow, kernel),
        Check("process group", training.check_group, 60, ports, stops=True),
        Check("speed", training.check_speed, slow, "look for other jobs, heat and power limits on that machine"),
        Check("collectives", training.check_collectives, slow / 2, network),
        Check("folder", machine.check_folder, slow, writable),
        Check("folder shared", machine.check_sharing, 30, mounted),
        *(Check(name, run, slow, f"train in a layout that passes; {_REPORT}") for name, run in layouts.items()),
        Check("checkpoint", training.check_checkpoint, slow, f"keep runs on another file system; {_REPORT}"),
        Check("memory", training.check_memory, 10, _REPORT),
    ]


def open_session(path: Path, *, full: bool) -> Session:
    """The session of this rank as the environment describes it, or of this process alone. Waits for all ranks."""
    raise_open_files_limit()
    store, rank, world_size = dist.HashStore(), 0, 1
    if (info := rank_info()) is not None:
        if info.is_supervised:
            end_with_parent(os.getppid())
        rank, world_size = info.rank, info.world_size
        store = wait_for_ranks(info, _RENDEZVOUS_MINUTES)
    session = Session(store=store, rank=rank, world_size=world_size, folder=path, full=full)
    token = session.exchange("start", Answer("value", uuid.uuid4().hex[:12]), 60.0)[0].value
    session.folder = path / f".doctor-{token}"
    return session


def examine(session: Session, checks: Sequence[Check]) -> list[Record]:
    """Runs `checks` on all ranks; returns the same records on each. Collective.

    After a check that hangs on some rank, or without which no other makes sense, the rest is not run. Ends the process
    group unless a rank hangs.
    """
    records: list[Record] = []
    broken = ""
    for check in checks:
        started = time.monotonic()
        steps, answer = check.run(session), Answer("impossible", f"{broken!r} failed: mend that first")
        answers = [answer] * session.world_size
        if not broken:
            answers = session.exchange(check.name, session.call(partial(next, steps), check.seconds), check.seconds)
        status, finding, cure = _conclude(check, steps, answers)
        session.passed[check.name] = status == "passed"
        records.append(
            {
                "name": check.name,
                "status": status,
                "finding": finding,
                "next": cure,
                "catches": str(getattr(check.run, "func", check.run).__doc__),
                "seconds": round(time.monotonic() - started, 2),
                "ranks": [answer._asdict() for answer in answers],
            }
        )
        if any(answer.is_late for answer in answers) or (check.stops and status == "failed"):
            broken = broken or check.name
    machine.remove_files(session)
    if not has_late_rank(records):
        leave_processes()
    session.store.set(f"doctor/end/{session.rank}", json.dumps(Answer("value")))
    if session.rank == 0:  # it may hold the store, which the others still read
        session.collect("end", GRACE_SECONDS)
    return records


def _conclude(check: Check, steps: Steps, answers: Sequence[Answer]) -> tuple[str, str, str]:
    """(status, finding, what to do) of a check from the answers of all ranks."""
    failures = {rank: str(a.value) for rank, a in enumerate(answers) if a.status not in ("value", "impossible")}
    if failures:
        return "failed", str(rank_error(check.name, failures)), check.cure
    if reasons := [str(answer.value) for answer in answers if answer.status == "impossible"]:
        reason, _, cure = reasons[0].partition(": ")
        return "not possible here", reason, cure
    try:
        steps.send([answer.value for answer in answers])
    except StopIteration as end:
        problems, summary = end.value
    return ("failed", "; ".join(problems), check.cure) if problems else ("passed", summary, "")


def has_late_rank(records: Sequence[Record]) -> bool:
    """Whether a rank hangs or is gone, so that this process cannot end by itself."""
    return any(Answer(**answer).is_late for record in records for answer in record["ranks"])
