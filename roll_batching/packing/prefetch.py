"""Made on the host while the device computes: one thing ahead, moved in one copy beside what runs."""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch

T = TypeVar("T")

_ALIGNMENT = 64
"""Bytes: every tensor of a buffer begins at a multiple."""


Move = Callable[[T], tuple[T, Callable[[], None]]]
"""From a thing to what it is on the device, and what to call before it is used there."""


def ahead(make: Callable[[int], T], count: int, move: Move[T] | None) -> Generator[T]:
    """`make(0)`, ..., `make(count - 1)`, each moved.

    A thread makes and moves each thing while the one before it is used. What `make` raises comes out here. With None
    there is nowhere to move to: each thing is made when it is asked for.
    """
    if move is None:
        yield from map(make, range(count))
        return
    for thing, arrive in one_ahead(move(make(number)) for number in range(count)):
        arrive()
        yield thing


def one_ahead(things: Iterable[T]) -> Generator[T]:
    """`things`, each made by a thread while the one before it is used. What making one raises comes out here."""
    makes, end = iter(things), object()
    with ThreadPoolExecutor(1, thread_name_prefix="ahead") as worker:
        coming = worker.submit(next, makes, end)
        while (thing := coming.result()) is not end:
            coming = worker.submit(next, makes, end)
            yield thing  # type: ignore[misc]  # it is not the end


def to_cuda(thing: T, device: torch.device) -> tuple[T, Callable[[], None]]:
    """`thing` with its tensors on `device`: through one pinned buffer, in one copy on a stream of its own.

    Whoever uses it has its stream wait for the copy (the second result); nobody else waits.
    """
    buffer, place = flattened(thing, pin=True)
    stream = _side_stream(device)
    with torch.cuda.device(device), torch.cuda.stream(stream):
        there = buffer.to(device, non_blocking=True)
        arrived = stream.record_event()

    def arrive() -> None:
        user = torch.cuda.current_stream(device)
        user.wait_event(arrived)
        there.record_stream(user)

    return place(there), arrive


@functools.cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """One for all copies to a device: memory of the allocator belongs to the stream that asked for it."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def flattened(thing: T, *, pin: bool) -> tuple[torch.Tensor, Callable[[torch.Tensor], T]]:
    """(all tensors of `thing` in one buffer of bytes, `thing` again from that buffer or its copy anywhere).

    A tensor that is there twice is there once.
    """
    tensors: dict[int, torch.Tensor] = {}
    mapped(thing, lambda tensor: tensors.setdefault(id(tensor), tensor))
    offsets, size = {}, 0
    for key, tensor in tensors.items():
        offsets[key] = size
        size += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
    buffer = torch.empty(size, dtype=torch.uint8, pin_memory=pin)

    def within(where: torch.Tensor) -> dict[int, torch.Tensor]:
        return {key: _within(where, offsets[key], tensor) for key, tensor in tensors.items()}

    for key, room in within(buffer).items():
        room.copy_(tensors[key])

    def place(where: torch.Tensor) -> T:
        placed = within(where)
        again: T = mapped(thing, lambda tensor: placed[id(tensor)])
        return again

    return buffer, place


def _within(buffer: torch.Tensor, offset: int, like: torch.Tensor) -> torch.Tensor:
    """A tensor like `like` in the bytes of `buffer` from `offset` on."""
    return buffer[offset : offset + like.nbytes].view(like.dtype).view(like.shape)


def mapped(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """`value` with every tensor in it changed, inside dicts, lists, tuples and dataclasses; itself without any."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, dict):
        return {key: mapped(item, change) for key, item in value.items()}
    if isinstance(value, list | tuple):
        items = [mapped(item, change) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return value
    found = {}
    for field in dataclasses.fields(value):
        held = getattr(value, field.name)
        new = mapped(held, change)
        if new is not held:
            found[field.name] = new
    if not found:
        return value
    result = copy.copy(value)
    for name, new in found.items():
        object.__setattr__(result, name, new)
    return result
