"""Prefetch: a thread makes the next item, and copies it to the device, while the current one is used."""

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
"""Alignment of tensors in a buffer, in bytes."""


Move = Callable[[T], tuple[T, Callable[[], None]]]
"""Start to copy an item to the device; returns the copy, and a function that must be called before its use."""


def prefetch(make: Callable[[int], T], count: int, move: Move[T] | None) -> Generator[T]:
    """Yield `make(0)`, ..., `make(count - 1)`, each moved by `move`.

    A thread makes and moves each item while the previous one is used; errors are raised where the item is requested.
    Without `move` there is no thread: each item is made when it is requested.
    """
    if move is None:
        yield from map(make, range(count))
        return
    for item, wait_for_copy in prefetch_items(move(make(number)) for number in range(count)):
        wait_for_copy()
        yield item


def prefetch_items(items: Iterable[T]) -> Generator[T]:
    """Yield `items`, each made by a thread while the previous one is used.

    Errors are raised where the item is requested.
    """
    source, end = iter(items), object()
    with ThreadPoolExecutor(1, thread_name_prefix="prefetch") as worker:
        future = worker.submit(next, source, end)
        while (item := future.result()) is not end:
            future = worker.submit(next, source, end)
            yield item  # type: ignore[misc]  # it is not the end


def copy_to_cuda(item: T, device: torch.device) -> tuple[T, Callable[[], None]]:
    """Copy the tensors of `item` to `device`, in one copy from pinned memory on a side stream.

    Returns the item on the device, and a function that makes the current stream wait for the copy.
    """
    buffer, rebuild = flatten_tensors(item, pin=True)
    stream = _copy_stream(device)
    with torch.cuda.device(device), torch.cuda.stream(stream):
        on_device = buffer.to(device, non_blocking=True)
        copied = stream.record_event()

    def wait_for_copy() -> None:
        current = torch.cuda.current_stream(device)
        current.wait_event(copied)
        # The allocator must not reuse the memory, which belongs to the side stream, while this stream reads it.
        on_device.record_stream(current)

    return rebuild(on_device), wait_for_copy


@functools.cache
def _copy_stream(device: torch.device) -> torch.cuda.Stream:
    """One stream for all copies to a device: the allocator keeps memory by stream, and can then reuse it."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def flatten_tensors(item: T, *, pin: bool) -> tuple[torch.Tensor, Callable[[torch.Tensor], T]]:
    """Copy all tensors of `item` into one buffer of bytes.

    Returns the buffer, and a function that rebuilds the item from the buffer or a copy of it. A tensor that occurs
    twice is stored once.
    """
    tensors: dict[int, torch.Tensor] = {}
    map_tensors(item, lambda tensor: tensors.setdefault(id(tensor), tensor))
    offsets, size = {}, 0
    for key, tensor in tensors.items():
        offsets[key] = size
        size += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
    buffer = torch.empty(size, dtype=torch.uint8, pin_memory=pin)

    def views_of(source: torch.Tensor) -> dict[int, torch.Tensor]:
        return {
            key: source[offsets[key] : offsets[key] + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            for key, tensor in tensors.items()
        }

    for key, view in views_of(buffer).items():
        view.copy_(tensors[key])

    def rebuild(source: torch.Tensor) -> T:
        views = views_of(source)
        rebuilt: T = map_tensors(item, lambda tensor: views[id(tensor)])
        return rebuilt

    return buffer, rebuild


def map_tensors(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """`value` with `change` applied to all tensors in dicts, lists, tuples and dataclasses.

    Dataclasses without changed tensors are returned as they are, not copied.
    """
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, dict):
        return {key: map_tensors(item, change) for key, item in value.items()}
    if isinstance(value, list | tuple):
        items = [map_tensors(item, change) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return value
    changed = {}
    for field in dataclasses.fields(value):
        old = getattr(value, field.name)
        new = map_tensors(old, change)
        if new is not old:
            changed[field.name] = new
    if not changed:
        return value
    result = copy.copy(value)
    for name, new in changed.items():
        object.__setattr__(result, name, new)
    return result
