"""Scenes of abuses: earlier and parallel runs, disturbances of a running job, checks for lost data."""

from __future__ import annotations

import contextlib
import json
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.campaigns.abuse.runner import (
    RUN,
    SAVING,
    TRAIN,
    Lost,
    NotReachedError,
    SkippedError,
    finish,
    limit,
    ranks_of,
    reached,
    send,
    started,
    write_job,
)

METRICS = RUN / "metrics.jsonl"
CHECKPOINTS = RUN / "checkpoints"
WAITING_REWARD = """
import pathlib, time
def reward(completion):
    pathlib.Path("here").touch()
    while not pathlib.Path("go").exists():
        time.sleep(0.1)
    return completion.tokens / 10
"""
"""Reward that creates the file `here`, and returns once the file `go` exists."""
WAITING = {"scoring.py": WAITING_REWARD}
RESUMING = {**SAVING, "resume_from_checkpoint": True}
FILLING_REWARD = """
import os, pathlib
def reward(completion):
    if os.environ["RANK"] == "0" and pathlib.Path("runs/own_task/checkpoints/rl-000001").exists():
        with open("runs/filler", "ab") as file:
            room = os.statvfs("runs")
            file.write(bytes(max(0, room.f_bavail * room.f_frsize - 24576)))
    return completion.tokens / 10
"""
"""Reward that fills the disk once a checkpoint exists."""


# ---- checks for lost data


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def faults_of(path: Path, steps: int) -> str:
    """Faults of a metrics file that must have `steps` steps of one run."""
    try:
        found = [row["step"] for row in rows(path)]
    except (OSError, ValueError, KeyError) as error:
        return f"metrics cannot be read: {error}"
    return "" if found == list(range(1, steps + 1)) else f"metrics hold the steps {found}, not {steps} in order"


@contextlib.contextmanager
def complete(home: Path) -> Iterator[Lost]:
    """The job must succeed, with its step in the metrics."""
    yield lambda: faults_of(home / METRICS, 1)


@contextlib.contextmanager
def not_begun(home: Path) -> Iterator[Lost]:
    """The error must come before any rank starts: the run leaves only its lock."""

    def left() -> str:
        found = {path.name for path in (home / RUN).glob("*")} - {".lock"}
        return f"found too late: the run wrote {', '.join(sorted(found))}" if found else ""

    yield left


# ---- several runs of the same name


@contextlib.contextmanager
def other_run(home: Path) -> Iterator[Lost]:
    """Another run of the same name is running; it must finish afterwards."""
    with started(home, *TRAIN, log="other") as other:
        reached((home / "here").exists, other, "the other run's first step")

        def lost() -> str:
            (home / "go").touch()
            try:
                code = other.wait(limit(120))
            except subprocess.TimeoutExpired:
                return "the other run did not end"
            return f"the other run ended with {code}" if code else faults_of(home / METRICS, 1)

        yield lost


@contextlib.contextmanager
def earlier_run(home: Path) -> Iterator[Lost]:
    """An earlier run of the same name is complete; its metrics must be kept."""
    _finished(home, "earlier")
    before = (home / METRICS).read_bytes()

    def lost() -> str:
        kept = [path.read_bytes() for path in (home / RUN / "previous").rglob("metrics.jsonl")]
        return faults_of(home / METRICS, 1) if before in kept else "the earlier run's metrics are gone"

    yield lost


@contextlib.contextmanager
def two_checkpoints(home: Path) -> Iterator[Lost]:
    """A complete run with two checkpoints, shared by the abuses of a campaign."""
    kept = home.parent / "two-checkpoints"
    if not kept.exists():
        making = kept.with_suffix(".partial")
        making.mkdir()
        write_job(making, SAVING, {})
        _finished(making, "earlier")
        making.rename(kept)
    shutil.copytree(kept / RUN, home / RUN)
    yield lambda: ""


def damaged(damage: Callable[[Path], object]) -> Callable[[Path], contextlib.AbstractContextManager[Lost]]:
    """Scene of a run with two checkpoints, the later one changed by `damage`."""

    @contextlib.contextmanager
    def scene(home: Path) -> Iterator[Lost]:
        with two_checkpoints(home):
            first, second = home / CHECKPOINTS / "rl-000001", home / CHECKPOINTS / "rl-000002"
            damage(second)
            before = (home / METRICS).read_bytes()

            def lost() -> str:
                if (home / METRICS).read_bytes() != before:
                    return "metrics.jsonl was changed"
                return finish(home, f"resume_from_checkpoint={first}", "max_steps=2", log="resumed")

            yield lost

    return scene


def cut(checkpoint: Path) -> None:
    """Truncate the largest file to half."""
    largest = max(checkpoint.rglob("*"), key=lambda path: path.stat().st_size if path.is_file() else 0)
    largest.write_bytes(largest.read_bytes()[: largest.stat().st_size // 2])


def scribbled(checkpoint: Path) -> None:
    """Overwrite the index."""
    (checkpoint / ".metadata").write_bytes(b"no index\n")


def _finished(home: Path, log: str, *overrides: str) -> None:
    if wrong := finish(home, *overrides, log=log):
        raise NotReachedError(wrong)


# ---- a full disk


@contextlib.contextmanager
def small_disk(home: Path) -> Iterator[Lost]:
    """Runs are on a small tmpfs; incomplete checkpoints must be removed."""
    place = home / "runs"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(place)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True).returncode:
        raise SkippedError("mounting a file system needs root")

    def lost() -> str:
        found = sorted(path.name for path in (home / CHECKPOINTS).iterdir())
        return f"checkpoints: {', '.join(found)}" if found != ["rl-000001"] else faults_of(home / METRICS, 2)

    try:
        yield lost
    finally:
        subprocess.run(["umount", str(place)], capture_output=True)


# ---- disturbances of a running job


@contextlib.contextmanager
def goes_on(home: Path) -> Iterator[Lost]:
    """The killed run must resume from its checkpoint."""

    def lost() -> str:
        (home / "go").touch()
        return finish(home, "resume_from_checkpoint=true", log="resumed") or faults_of(home / METRICS, 2)

    yield lost


def kill_launcher(home: Path, process: subprocess.Popen[bytes]) -> None:
    """Kill the launcher after the first checkpoint, during the second step's reward."""
    (home / "go").touch()
    reached((home / CHECKPOINTS / "rl-000001").exists, process, "the first checkpoint")
    (home / "go").unlink()
    (home / "here").unlink(missing_ok=True)
    reached((home / "here").exists, process, "the second step")
    send(process, signal.SIGKILL)


def kill_rank(home: Path, process: subprocess.Popen[bytes]) -> None:
    reached((home / "here").exists, process, "the first step")
    ranks_of(process, home)[1].kill()


def press_key(home: Path, process: subprocess.Popen[bytes]) -> None:
    reached((home / "here").exists, process, "the first step")
    time.sleep(0.5)  # so that both ranks wait
    send(process, signal.SIGINT, group=True)
