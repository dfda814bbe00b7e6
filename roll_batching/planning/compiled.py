"""Compilation by numba, by one process of a machine.

Compiled functions are plain Python functions of int64 arrays and scalars. With `NUMBA_DISABLE_JIT=1` in the environment
(numba's own switch) they run interpreted, slower, and make equal plans: integers stay below 2^62, and the random number
generator needs no overflow.

One process of a machine compiles; the others wait and load what it has left in the cache of the user (`code_cache`).
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar, cast

import numba
from numba.core import event
from numba.core.registry import cpu_target

from roll_batching.planning.code_cache import CodeCache, cache_folder, private_folder, warn_once

F = TypeVar("F", bound=Callable[..., Any])


def compiled(function: F) -> F:
    """`function`, compiled on first use and cached on disk."""
    dispatcher: Any = numba.njit(nogil=True)(function)
    if dispatcher is not function and (folder := cache_folder()) is not None:
        dispatcher._cache = CodeCache(function, folder)  # as `cache=True`, which would key on the path of the source
    return cast(F, dispatcher)


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
    cache, private = cache_folder(), private_folder()
    if cache is None or private is None:
        return None
    stamp = repr((kind, cpu_target.target_context.codegen().magic_tuple()))
    done = cache / f"{hashlib.sha256(stamp.encode()).hexdigest()[:24]}.compiled"
    if done.exists():
        return None
    try:
        lock = locks.enter_context(open(private / "compiling.lock", "w"))
        fcntl.flock(lock, fcntl.LOCK_EX)
    except OSError:  # on a full disk or without file locks, each process compiles for itself
        return None
    return done


class _FirstCompilation(event.Listener):
    """Warns when numba starts to compile, once per process."""

    has_warned = False

    def on_start(self, event: Any) -> None:
        if not _FirstCompilation.has_warned:  # ranks of a job may each compile another kind, one after the other
            _FirstCompilation.has_warned = True
            warn_once("compilation", "compiling the planner, once on this machine (about ten seconds)")

    def on_end(self, event: Any) -> None:
        pass


@compiled
def next_random(state: int) -> int:
    """Next state of a Lehmer generator (multiplier 48271, modulus 2^31 - 1): 1 to 2^31 - 2."""
    return state * 48271 % 2147483647


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
