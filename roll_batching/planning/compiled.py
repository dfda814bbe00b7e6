"""The compiled helper: numba, where it is switched on.

Kernels are plain Python functions over int64 arrays and scalars. With `NUMBA_DISABLE_JIT=1` in the
environment (numba's own switch) the same functions run interpreted and give the same plans, slower:
integers stay below 2^62 and random numbers come from a multiplicative generator that needs no overflow.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar, cast

import numba
from numba.core import event

F = TypeVar("F", bound=Callable[..., Any])


def compiled(function: F) -> F:
    """`function` compiled on first use and cached on disk."""
    return cast(F, numba.njit(cache=True, nogil=True)(function))


def inlined(function: F) -> F:
    """`function` compiled into its callers: for what every step of a search calls with many arrays."""
    return cast(F, numba.njit(inline="always")(function))


class _FirstCompilation(event.Listener):
    def __init__(self, announce: Callable[[], None]) -> None:
        self.announce: Callable[[], None] | None = announce

    def on_start(self, event: Any) -> None:
        announce, self.announce = self.announce, None
        if announce is not None:
            announce()

    def on_end(self, event: Any) -> None:
        pass


@contextmanager
def announced(announce: Callable[[], None]) -> Iterator[None]:
    """Calls `announce` once if anything is compiled inside the block, before it is; loading from disk is none."""
    with event.install_listener("numba:compile", _FirstCompilation(announce)):
        yield


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
