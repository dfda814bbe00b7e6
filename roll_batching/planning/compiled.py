"""The compiled helper: numba, where it is switched on.

Kernels are plain Python functions over int64 arrays and scalars. With `NUMBA_DISABLE_JIT=1` in the
environment (numba's own switch) the same functions run interpreted and give the same plans, slower:
integers stay below 2^62 and random numbers come from a multiplicative generator that needs no overflow.

What is compiled is kept: beside the source, or where numba keeps it for a user (`NUMBA_CACHE_DIR` names another
place), or, where neither can be written, in this user's folder among the temporary files. Of the processes of one
machine one compiles and the others wait and load.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar, cast

import numba
from numba.core import event

F = TypeVar("F", bound=Callable[..., Any])

logger = logging.getLogger(__name__)
_numba: Any = numba.config


def compiled(function: F) -> F:
    """`function` compiled on first use and kept on disk."""
    try:
        return cast(F, numba.njit(cache=True, nogil=True)(function))
    except RuntimeError:  # numba finds no place that it may write
        folder = _own_folder()
        if folder is None:
            return cast(F, numba.njit(nogil=True)(function))
        _numba.CACHE_DIR = str(folder / "numba")
        return cast(F, numba.njit(cache=True, nogil=True)(function))


SAID_SECONDS = 60.0
"""Within them one process says for all that the planner is compiled."""

_here: set[str] = set()
"""Kinds of plans whose code this process has compiled or loaded."""


@contextlib.contextmanager
def compiled_once(kind: str) -> Iterator[None]:
    """Where the first plan of a `kind` is made: of all processes of this user on this machine one compiles for it.

    Says that it compiles, once for the processes of a job, as a warning of this module's logger.
    """
    if kind in _here:
        yield
        return
    with event.install_listener("numba:compile", _FirstCompilation()), contextlib.ExitStack() as held:
        done = _wait_for_turn(kind, held)
        yield
        if done is not None:
            with contextlib.suppress(OSError):  # a full disk costs the next process a second look, no plan
                done.touch()
    _here.add(kind)


def _wait_for_turn(kind: str, held: contextlib.ExitStack) -> Path | None:
    """The file to make once `kind` is compiled, its lock in `held`; None where it is, or nothing can be locked."""
    folder = _own_folder()
    if folder is None:
        return None
    done = folder / f"{_stamp(kind)}.compiled"
    if done.exists():
        return None
    try:
        lock = held.enter_context(open(folder / "compiling.lock", "w"))
        fcntl.flock(lock, fcntl.LOCK_EX)
    except OSError:  # a full disk, a file system without locks: every process compiles for itself
        return None
    return done


class _FirstCompilation(event.Listener):
    said = False

    def on_start(self, event: Any) -> None:
        if not _FirstCompilation.said:
            _FirstCompilation.said = True
            _say_once()

    def on_end(self, event: Any) -> None:
        pass


def _say_once() -> None:
    """Warns that the planner is compiled, unless a process of this user has said so within `SAID_SECONDS`.

    The ranks of a job take turns: each may compile another kind of plan.
    """
    folder = _own_folder()
    if folder is not None:
        with contextlib.suppress(OSError):
            mark = folder / "said"
            is_recent = mark.exists() and time.time() - mark.stat().st_mtime < SAID_SECONDS
            mark.touch()
            if is_recent:
                return
    logger.warning("compiling the planner, once on this machine (about ten seconds; later plans do without)")


def _own_folder() -> Path | None:
    """This user's folder among the temporary files; None where there is none that nobody else may write."""
    folder = Path(tempfile.gettempdir()) / f"roll-batching-{os.getuid()}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        status = folder.lstat()
    except OSError:
        return None
    private = status.st_uid == os.getuid() and not status.st_mode & 0o077 and os.access(folder, os.W_OK)
    return folder if private and folder.is_dir() and not folder.is_symlink() else None


def _stamp(kind: str) -> str:
    """A name for `kind` with this code, numba and place to keep what is compiled."""
    here = Path(__file__).parent
    sources = [(str(path), path.stat().st_mtime_ns, path.stat().st_size) for path in sorted(here.rglob("*.py"))]
    text = repr((kind, sources, numba.__version__, _numba.CACHE_DIR, _numba.CPU_NAME))
    return hashlib.sha256(text.encode()).hexdigest()[:24]


@compiled
def next_random(state: int) -> int:
    """The next state of Lehmer's generator (multiplier 48271, modulus 2^31 - 1): 1 to 2^31 - 2."""
    return state * 48271 % 2147483647


@compiled
def seed_state(seed: int) -> int:
    """A first state from any seed of at least 0."""
    state = (seed * 7919 + 12345) % 2147483646 + 1
    for _ in range(4):
        state = next_random(state)
    return state


@compiled
def draw(state: int, bound: int) -> int:
    """An index below `bound` (at most 2^31) from a state of the generator."""
    return state * bound >> 31
