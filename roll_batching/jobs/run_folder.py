"""The folder of a run, `output_dir/exp_name`: one run at a time writes into it, and nothing in it is lost.

Whoever writes holds a lock of the kernel on one file in it, freed by the kernel when its processes are gone: an
exclusive one first, so that nobody else is there, then a shared one, which the launcher and rank 0 of the same run hold
both. So a folder is in use as long as either lives. (`filelock` knows exclusive locks only.)
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import shutil
import socket
import time
from collections.abc import Iterator
from pathlib import Path

from roll_batching.errors import RollBatchingError
from roll_batching.files import cause
from roll_batching.jobs.config import JobConfig

logger = logging.getLogger(__name__)

HELD = "ROLL_BATCHING_HELD_FOLDER"
"""Variable by which rank 0 hears that its launcher holds the folder already."""
PREVIOUS = "previous"
"""Folder for what earlier runs of the same name left, one folder each."""
CONFIG = "config.yaml"
"""The run's settings, resolved."""
MODEL = "model"
"""Folder of the trained model, where the run started from a model directory."""
_LOCK = ".lock"


def folder_of(config: JobConfig) -> Path:
    """Where a run leaves its files."""
    return Path(config.output_dir) / config.exp_name


@contextlib.contextmanager
def held(folder: Path, *, temporary: bool = False) -> Iterator[dict[str, str]]:
    """Holds `folder`, made where it is missing, for this run. Yields the variables by which rank 0 hears of it.

    `temporary`: it is removed at the end, where nothing is left in it.
    Raises RollBatchingError, naming who holds it, when another run does, or when the folder cannot be written to.
    """
    place = str(folder.resolve())
    lock = _taken(folder, together=os.environ.get(HELD) == place)
    children = _Children(lock)
    try:
        yield {HELD: place}
    finally:
        if temporary:
            with contextlib.suppress(OSError):  # something else lies there
                (folder / _LOCK).unlink()
                folder.rmdir()
        children.lock = None
        os.close(lock)


def _taken(folder: Path, *, together: bool) -> int:
    """The file of the lock, which is held. `together` as `_take` has it."""
    while True:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT, 0o666)
        except OSError as error:
            raise RollBatchingError(
                f"the run's folder {folder} cannot be written to: {cause(error)}. Give another output_dir or exp_name"
            ) from None
        try:
            _take(lock, folder, together=together)
            if os.fstat(lock).st_nlink:  # else who held it has removed it meanwhile: nobody would meet us there
                return lock
        except BaseException:
            os.close(lock)
            raise
        os.close(lock)


def mark_of(folder: Path) -> tuple[str, str]:
    """A file that whoever holds `folder` has written there, and its text: tells whether others see this folder.

    Whoever holds it later, together with the first, adds to the text.
    """
    mark = folder.resolve() / _LOCK
    return str(mark), mark.read_text(encoding="utf-8", errors="replace")


class _Children:
    """Closes a lock's file in forked processes: one that outlives its parent would hold the lock on."""

    def __init__(self, lock: int) -> None:
        self.lock: int | None = lock
        os.register_at_fork(after_in_child=self._close)

    def _close(self) -> None:
        if self.lock is not None:
            with contextlib.suppress(OSError):
                os.close(self.lock)
            self.lock = None


def _take(lock: int, folder: Path, *, together: bool) -> None:
    """`together`: with the launcher of the same run, which holds a shared lock."""
    try:
        if not together:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(lock, 0)
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        raise RollBatchingError(
            f"{folder} is in use by another run ({_holders(lock)}). Wait for it or end it, or give this run another "
            "exp_name or output_dir"
        ) from None
    except OSError as error:
        logger.warning(
            "%s cannot be locked on this file system (%s): nothing keeps a second run of this name from writing into "
            "it as well",
            folder,
            cause(error),
        )
    os.lseek(lock, 0, os.SEEK_END)
    who = {"pid": os.getpid(), "host": socket.gethostname(), "since": time.strftime("%Y-%m-%d %H:%M:%S")}
    with contextlib.suppress(OSError):  # a full disk: only the other run's message is poorer
        os.write(lock, (json.dumps(who) + "\n").encode())


def _holders(lock: int) -> str:
    said = []
    for line in os.pread(lock, 4096, 0).decode(errors="replace").splitlines():
        with contextlib.suppress(ValueError, KeyError, TypeError):
            who = json.loads(line)
            said.append(f"process {who['pid']} on {who['host']} since {who['since']}")
    return ", ".join(said) or "which left no name"


class EarlierRun:
    """Takes what an earlier run of the same name left in `folder` out of the way, into a folder of its own.

    Its name has a running number and the time of what was taken first. It is made when something is taken.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.place: Path | None = None
        """Where things were put; None while nothing was."""

    def take(self, path: Path) -> None:
        """Moves `path`, something below the folder, where there is such a thing."""
        if path.exists():
            path.rename(self._target(path))

    def keep(self, path: Path) -> None:
        """Copies the file `path`, which is about to be changed."""
        shutil.copy2(path, self._target(path))

    def _target(self, path: Path) -> Path:
        if self.place is None:
            above = self.folder / PREVIOUS
            above.mkdir(exist_ok=True)
            numbers = [int(name) for one in above.iterdir() if (name := one.name.partition("-")[0]).isdigit()]
            moment = time.strftime("%Y%m%d-%H%M%S", time.localtime(path.stat().st_mtime))
            self.place = above / f"{max(numbers, default=0) + 1:03d}-{moment}"
            self.place.mkdir()
        target = self.place / path.relative_to(self.folder)
        target.parent.mkdir(parents=True, exist_ok=True)
        return target

    def told(self) -> str | None:
        """What to say of it: where it is, and how large; None when nothing was taken."""
        if self.place is None:
            return None
        size = sum(file.stat().st_size for file in self.place.rglob("*") if file.is_file())
        return (
            f"what an earlier run of this name left is now in {self.place} ({size / 1e6:,.1f} MB): "
            "delete it when nobody needs it"
        )
