"""Locks a run's folder (`output_dir/exp_name`), and moves files that an earlier run of the same name left in it.

One run at a time writes into the folder. It holds a kernel lock (flock) on one file there, which the kernel releases
when the processes are gone: first an exclusive lock, which proves that no other run is there, then a shared lock, which
the launcher and rank 0 of the same run hold together. So the folder is locked while one of the two lives. (`filelock`
has exclusive locks only.)
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

logger = logging.getLogger(__name__)

LOCKED_FOLDER = "ROLL_BATCHING_HELD_FOLDER"
"""Environment variable that tells rank 0 which folder its launcher has locked."""
PREVIOUS = "previous"
"""Folder for files of earlier runs of the same name, one folder each."""
CONFIG = "config.yaml"
"""The run's settings, resolved."""
MODEL = "model"
ADAPTER = "adapter"
"""Folder of the trained model, where the run started from a model directory."""
_LOCK = ".lock"


@contextlib.contextmanager
def lock_folder(folder: Path, *, temporary: bool = False) -> Iterator[dict[str, str]]:
    """Creates `folder` and locks it for this run. Yields environment variables that let rank 0 share the lock.

    `temporary`: the folder is removed at the end, if it is empty then. Raises RollBatchingError, naming the other run,
    when another run has locked it, or when it cannot be written to.
    """
    path = str(folder.resolve())
    lock = _open_lock(folder, shared=os.environ.get(LOCKED_FOLDER) == path)
    guard = _ForkGuard(lock)
    try:
        yield {LOCKED_FOLDER: path}
    finally:
        if temporary:
            with contextlib.suppress(OSError):  # not empty
                (folder / _LOCK).unlink()
                folder.rmdir()
        guard.lock = None
        os.close(lock)


def _open_lock(folder: Path, *, shared: bool) -> int:
    """Opens and locks the lock file; returns its descriptor. `shared` as in `_acquire`."""
    while True:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT, 0o666)
        except OSError as error:
            raise RollBatchingError(
                f"the run's folder {folder} cannot be written to: {cause(error)}. Set another output_dir or exp_name"
            ) from None
        try:
            _acquire(lock, folder, shared=shared)
            if os.fstat(lock).st_nlink:  # 0: its last holder has removed the file, so our lock would protect nothing
                return lock
        except BaseException:
            os.close(lock)
            raise
        os.close(lock)


def read_lock(folder: Path) -> tuple[str, str]:
    """Path and text of the lock file of `folder`: another machine that reads the same text sees the same folder.

    A later holder of the shared lock appends to the text.
    """
    path = folder.resolve() / _LOCK
    return str(path), path.read_text(encoding="utf-8", errors="replace")


class _ForkGuard:
    """Closes a lock file in forked processes: a fork that outlives its parent would keep the lock."""

    def __init__(self, lock: int) -> None:
        self.lock: int | None = lock
        os.register_at_fork(after_in_child=self._close)

    def _close(self) -> None:
        if self.lock is not None:
            with contextlib.suppress(OSError):
                os.close(self.lock)
            self.lock = None


def _acquire(lock: int, folder: Path, *, shared: bool) -> None:
    """Locks the file, and adds this process to its text, for the error of another run.

    `shared`: together with the launcher of the same run, which holds a shared lock.
    """
    try:
        if not shared:
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
            "%s cannot be locked on this file system (%s): a second run of this name would write into it as well",
            folder,
            cause(error),
        )
    os.lseek(lock, 0, os.SEEK_END)
    holder = {"pid": os.getpid(), "host": socket.gethostname(), "since": time.strftime("%Y-%m-%d %H:%M:%S")}
    with contextlib.suppress(OSError):  # a full disk only makes the other run's message poorer
        os.write(lock, (json.dumps(holder) + "\n").encode())


def _holders(lock: int) -> str:
    """The processes that hold the lock, by the text of the file."""
    holders = []
    for line in os.pread(lock, 4096, 0).decode(errors="replace").splitlines():
        with contextlib.suppress(ValueError, KeyError, TypeError):
            holder = json.loads(line)
            holders.append(f"process {holder['pid']} on {holder['host']} since {holder['since']}")
    return ", ".join(holders) or "which left no name"


class PreviousRun:
    """Moves or copies files of an earlier run in `folder` to `folder`/previous/NUMBER-TIME.

    NUMBER counts up; TIME is the modification time of the first file. The folder is created with it.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.target: Path | None = None
        """The folder of the moved files; None while there are none."""

    def move(self, path: Path) -> None:
        """Move `path`, a file or folder below `folder`, if it exists."""
        if path.exists():
            path.rename(self._target_of(path))

    def copy(self, path: Path) -> None:
        """Copy the file `path`, before it is changed."""
        shutil.copy2(path, self._target_of(path))

    def _target_of(self, path: Path) -> Path:
        if self.target is None:
            parent = self.folder / PREVIOUS
            parent.mkdir(exist_ok=True)
            prefixes = (child.name.partition("-")[0] for child in parent.iterdir())
            number = max((int(prefix) for prefix in prefixes if prefix.isdigit()), default=0) + 1
            moment = time.strftime("%Y%m%d-%H%M%S", time.localtime(path.stat().st_mtime))
            self.target = parent / f"{number:03d}-{moment}"
            self.target.mkdir()
        target = self.target / path.relative_to(self.folder)
        target.parent.mkdir(parents=True, exist_ok=True)
        return target

    def notice(self) -> str | None:
        """A sentence with the path and size of the moved files; None without any."""
        if self.target is None:
            return None
        size = sum(file.stat().st_size for file in self.target.rglob("*") if file.is_file())
        return (
            f"files of an earlier run of this name are now in {self.target} ({size / 1e6:,.1f} MB): delete them when "
            "they are no longer needed"
        )
