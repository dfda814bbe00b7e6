"""Compilation by numba, with a cache on disk.

Compiled functions are plain Python functions of int64 arrays and scalars. With `NUMBA_DISABLE_JIT=1` in the environment
(numba's own switch) they run interpreted, slower, and make equal plans: integers stay below 2^62, and the random number
generator needs no overflow.

The cache lies in the user's cache folder (`NUMBA_CACHE_DIR` or `XDG_CACHE_HOME` name another), in a folder named after
the contents of `planning` and the CPU, so that copies of the package share it, such as those that Ray makes for each
job. If it cannot be written, the cache lies where numba looks then: beside the source, else in a private folder among
the temporary files. One process of a machine compiles; the others wait and load.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import logging
import os
import pickle
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar, cast

import llvmlite.binding as llvm
import numba
from numba.core import caching, event

F = TypeVar("F", bound=Callable[..., Any])

logger = logging.getLogger(__name__)
_numba: Any = numba.config


def compiled(function: F) -> F:
    """`function`, compiled on first use and cached on disk."""
    dispatcher: Any = numba.njit(nogil=True)(function)
    if not hasattr(dispatcher, "_cache"):  # NUMBA_DISABLE_JIT=1
        return function
    try:
        dispatcher._cache = _Cache(function)  # type: ignore[no-untyped-call]
    except RuntimeError:  # numba finds no folder that it may write to
        folder = _private_folder()
        if folder is not None:
            _numba.CACHE_DIR = str(folder / "numba")
            dispatcher._cache = _Cache(function)  # type: ignore[no-untyped-call]
    return cast(F, dispatcher)


@functools.cache
def _sources_digest() -> str:
    """Hash of the sources of `planning`, 24 hex digits: compiled code of one file contains that of others."""
    root, digest = Path(__file__).parent, hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:24]


class _ContentLocator(caching._SourceFileBackedLocatorMixin, caching._CacheLocator):
    """Cache folder named after the contents of `planning` and the CPU, not after a path.

    Machines with unlike CPUs and one home folder would overwrite each other's index in one folder.
    """

    def __init__(self, function: Any, file: str) -> None:
        self._py_file, self._lineno = file, function.__code__.co_firstlineno

    def get_cache_path(self) -> str:
        """Folder of the compiled functions."""
        home = os.environ.get("XDG_CACHE_HOME") or str(Path("~/.cache").expanduser())
        cpu = str((_numba.CPU_NAME, _numba.CPU_FEATURES, llvm.get_host_cpu_name()))
        name = f"planner-{_sources_digest()}-{hashlib.sha256(cpu.encode()).hexdigest()[:8]}"
        return str(Path(_numba.CACHE_DIR or home) / "roll-batching" / name)

    def get_disambiguator(self) -> str:
        """Folder and line of the function: files of one name share the cache folder."""
        return f"{Path(self._py_file).parent.name}-{self._lineno}"


class _CacheFiles(caching.CompileResultCacheImpl):
    _locator_classes = [_ContentLocator, *caching.CompileResultCacheImpl._locator_classes]  # noqa: RUF012  # numba's


class _Cache(caching.FunctionCache):
    """numba's cache of one function. A damaged file or a full disk makes it compile again, and raises nothing."""

    _impl_class = _CacheFiles

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """The compiled function; None: it is compiled again."""
        with contextlib.suppress(OSError):
            try:
                return super().load_overload(sig, target_context)  # type: ignore[no-untyped-call]
            except (EOFError, pickle.UnpicklingError):
                self.flush()  # type: ignore[no-untyped-call]
        return None

    def save_overload(self, sig: Any, data: Any) -> None:
        """Writes the compiled function, if possible."""
        with contextlib.suppress(OSError):
            super().save_overload(sig, data)  # type: ignore[no-untyped-call]


WARNING_SECONDS = 60.0
"""Within this time one process warns of compilation for all processes of the user."""

_ready_kinds: set[str] = set()
"""Kinds of plans whose code this process has compiled or loaded."""


@contextlib.contextmanager
def compiled_once(kind: str) -> Iterator[None]:
    """Let one process of this user compile for the first plan of a `kind`, while others wait.

    Logs a warning when it compiles, once for the processes of a job.
    """
    if kind in _ready_kinds:
        yield
        return
    with event.install_listener("numba:compile", _FirstCompilation()), contextlib.ExitStack() as locks:
        done = _wait_for_turn(kind, locks)
        yield
        if done is not None:
            with contextlib.suppress(OSError):  # on a full disk the next process looks again
                done.touch()
    _ready_kinds.add(kind)


def _wait_for_turn(kind: str, locks: contextlib.ExitStack) -> Path | None:
    """Lock compilation of `kind`; returns the file to create once it is compiled.

    None if it is compiled already, or if no file can be locked.
    """
    folder = _private_folder()
    if folder is None:
        return None
    done = folder / f"{_stamp(kind)}.compiled"
    if done.exists():
        return None
    try:
        lock = locks.enter_context(open(folder / "compiling.lock", "w"))
        fcntl.flock(lock, fcntl.LOCK_EX)
    except OSError:  # on a full disk or without file locks, each process compiles for itself
        return None
    return done


class _FirstCompilation(event.Listener):
    """Warns when numba starts to compile, once per process."""

    has_warned = False

    def on_start(self, event: Any) -> None:
        if not _FirstCompilation.has_warned:
            _FirstCompilation.has_warned = True
            _warn_once()

    def on_end(self, event: Any) -> None:
        pass


def _warn_once() -> None:
    """Warn of compilation, unless a process of this user has warned within `WARNING_SECONDS`.

    Ranks of one job may each compile another kind of plan, one after the other.
    """
    folder = _private_folder()
    if folder is not None:
        with contextlib.suppress(OSError):
            last_warning = folder / "last_warning"
            is_recent = last_warning.exists() and time.time() - last_warning.stat().st_mtime < WARNING_SECONDS
            last_warning.touch()
            if is_recent:
                return
    logger.warning("compiling the planner, once on this machine (about ten seconds)")


def _private_folder() -> Path | None:
    """Folder of this user among the temporary files; None if other users may write to it."""
    folder = Path(tempfile.gettempdir()) / f"roll-batching-{os.getuid()}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        status = folder.lstat()
    except OSError:
        return None
    private = status.st_uid == os.getuid() and not status.st_mode & 0o077 and os.access(folder, os.W_OK)
    return folder if private and folder.is_dir() and not folder.is_symlink() else None


def _stamp(kind: str) -> str:
    """Name of `kind` for this source, version of numba and Python, and cache folder."""
    folder = os.environ.get("XDG_CACHE_HOME"), _numba.CACHE_DIR
    text = repr((kind, _sources_digest(), numba.__version__, sys.version_info[:2], folder, _numba.CPU_NAME))
    return hashlib.sha256(text.encode()).hexdigest()[:24]


@compiled
def next_random(state: int) -> int:
    """Next state of a Lehmer generator (multiplier 48271, modulus 2^31 - 1): 1 to 2^31 - 2."""
    product = state * 48271
    folded = (product & 2147483647) + (product >> 31)  # 2^31 = 1 in this modulus: as the remainder, in half the time
    return folded - 2147483647 if folded >= 2147483647 else folded


@compiled
def seed_state(seed: int) -> int:
    """First state for a seed of at least 0."""
    state = (seed * 7919 + 12345) % 2147483646 + 1
    for _ in range(4):
        state = next_random(state)
    return state


@compiled
def draw(state: int, bound: int) -> int:
    """Index below `bound` (at most 2^31) from a state of the generator."""
    return state * bound >> 31
