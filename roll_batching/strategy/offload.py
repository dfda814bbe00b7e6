"""States of a model on the host for a while: their device memory is free until they come back.

What moves are storages. Everything that is a view of one (Megatron's buffers, the parameters and gradients in them, the
optimizer's flat shards) is empty while it is away, and as before when it is back; nobody has to know the views.
"""

from __future__ import annotations

import contextlib
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from roll_batching.errors import LayoutError
from roll_batching.strategy.out_of_memory import out_of_memory
from roll_batching.strategy.state import ModelState

KINDS = ("parameters", "gradients", "optimizer")
"""What can be moved: the weights; Megatron's gradient buffers; moments and fp32 copies of the weights."""


@dataclass(frozen=True, kw_only=True)
class Moved:
    """What moving states took, on this rank."""

    bytes: int = 0
    """Device memory that was freed, or taken again."""
    seconds: float = 0.0

    def __add__(self, other: Moved) -> Moved:
        return Moved(bytes=self.bytes + other.bytes, seconds=self.seconds + other.seconds)


@dataclass
class _Away:
    """A storage whose memory was freed."""

    storage: torch.UntypedStorage
    size: int
    """Its bytes."""
    host: Tensor | None
    """uint8 `[size]`: what it held; None for what comes back as zeros."""


@dataclass
class HostStates:
    """Which states of one model lie on the host."""

    away: dict[str, list[_Away]] = field(default_factory=dict)
    """By kind."""
    moved: Moved = Moved()
    """In all so far, both ways."""
    _kept: dict[tuple[str, int], Tensor] = field(default_factory=dict)
    """Host memory by kind and number, used again: page-locked memory is slow to get."""

    def offload(self, state: ModelState, kinds: Sequence[str], *, keep: bool = True) -> Moved:
        """Frees the device memory of `kinds`, whose contents go to the host; those that are there stay there.

        Gradients are not kept, and without `keep` nothing is: it comes back as zeros.
        """
        started, freed, device = time.perf_counter(), 0, state.device
        _wait(device)  # nothing may still compute with them
        for kind in _checked(kinds):
            if kind in self.away:
                continue
            storages = list(_storages(_tensors(state, kind), device))
            kept = keep and kind != "gradients"
            gone = [
                _Away(one, one.nbytes(), self._copied(kind, n, one) if kept else None) for n, one in enumerate(storages)
            ]
            _wait(device)  # the copies are whole
            for one in gone:
                one.storage.resize_(0)
                freed += one.size
            self.away[kind] = gone
        if device.type == "cuda":
            torch.cuda.empty_cache()
        return self._counted(freed, started)

    def load(self, state: ModelState, kinds: Sequence[str]) -> Moved:
        """Brings `kinds` back; those that are not away stay as they are."""
        started, taken, device = time.perf_counter(), 0, state.device
        for kind in _checked(kinds):
            with _whole_or_away(kind, self.away.get(kind, [])) as gone:
                for one in gone:
                    one.storage.resize_(one.size)
                    flat = _flat(one.storage)
                    if one.host is None:
                        flat.zero_()
                    else:
                        flat.copy_(one.host, non_blocking=True)
                    taken += one.size
            self.away.pop(kind, None)
        _wait(device)
        return self._counted(taken, started)

    def require(self, kinds: Sequence[str], what: str) -> None:
        """Raises LayoutError, the same on all ranks, when any of `kinds`, which `what` needs, is away."""
        away = [kind for kind in kinds if kind in self.away]
        if away:
            raise LayoutError(f"{what} needs the model's {' and '.join(away)}, which lie on the host: call load_states")

    def _counted(self, size: int, started: float) -> Moved:
        now = Moved(bytes=size, seconds=time.perf_counter() - started)
        self.moved += now
        return now

    def _copied(self, kind: str, number: int, storage: torch.UntypedStorage) -> Tensor:
        flat = _flat(storage)
        host = self._kept.get((kind, number))
        if host is None or host.numel() != flat.numel():
            host = torch.empty(flat.numel(), dtype=torch.uint8, pin_memory=flat.is_cuda)
            self._kept[kind, number] = host
        return host.copy_(flat, non_blocking=True)


class MovableStates(ABC):
    """A strategy's way to the host and back; ranks move their own shares, and need not wait for each other."""

    @cached_property
    def _host(self) -> HostStates:
        return HostStates()

    @property
    @abstractmethod
    def state(self) -> ModelState:
        """The model and everything that belongs to it."""

    @state.setter
    @abstractmethod
    def state(self, state: ModelState) -> None: ...

    def offload_states(self, *kinds: str, keep: bool = True) -> Moved:
        """Frees the device memory of `kinds` (of `KINDS`; none named: all), until `load_states`.

        Weights and optimizer state wait on the host, in page-locked memory beside a GPU; gradients are not kept, and
        are zeros afterwards, as everything is without `keep`, for weights that are about to be copied from elsewhere.
        Whatever needs what is away raises LayoutError. All ranks are to call it alike.
        """
        return self._host.offload(self.state, kinds or KINDS, keep=keep)

    @property
    def moved(self) -> Moved:
        """What moving states, to the host and back, took in all so far."""
        assert self.state  # before there is one, its property says what to call
        return self._host.moved

    def load_states(self, *kinds: str) -> Moved:
        """Brings `kinds` (none named: all) back to the device, to the bit. What is there already stays as it is.

        Raises `DeviceMemoryError` on a rank whose device has no room; a kind that did not come back stays on the host.
        """
        return self._host.load(self.state, kinds or KINDS)

    @contextlib.contextmanager
    def loaded(self, *kinds: str) -> Iterator[None]:
        """`kinds` (none named: all) are on the device inside; those that were not go back to the host afterwards."""
        away = [kind for kind in kinds or KINDS if kind in self._host.away]
        self._host.load(self.state, away)
        try:
            yield
        finally:
            self._host.offload(self.state, away)

    @contextlib.contextmanager
    def offloaded(self, *kinds: str) -> Iterator[None]:
        """`kinds` (none named: all) are on the host inside; those that were not come back afterwards."""
        here = [kind for kind in kinds or KINDS if kind not in self._host.away]
        self._host.offload(self.state, here)
        try:
            yield
        finally:
            self._host.load(self.state, here)


@contextlib.contextmanager
def _whole_or_away(kind: str, gone: list[_Away]) -> Iterator[list[_Away]]:
    """Around bringing `gone` back: where there is no room for all of it, all of it stays on the host."""
    try:
        yield gone
    except torch.OutOfMemoryError as error:
        for one in gone:
            one.storage.resize_(0)
        cure = "Free what was allocated meanwhile, and call load_states again: nothing of it is lost"
        raise out_of_memory(error, f"while the model's {kind} came back from the host", cure) from error


def _checked(kinds: Sequence[str]) -> Sequence[str]:
    unknown = [kind for kind in kinds if kind not in KINDS]
    if unknown:
        raise LayoutError(f"there are no states called {unknown[0]!r}: name some of {', '.join(KINDS)}")
    return kinds


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _flat(storage: torch.UntypedStorage) -> Tensor:
    """uint8 `[bytes]`: the storage itself as a tensor."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _storages(tensors: Iterable[Tensor], device: torch.device) -> Iterator[torch.UntypedStorage]:
    """The storages of `tensors` that have memory on the model's device, each once."""
    seen: set[int] = set()
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage.device.type == device.type and storage.nbytes() and storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            yield storage


def _tensors(state: ModelState, kind: str) -> Iterator[Tensor]:
    parameters = [parameter for chunk in state.chunks for parameter in chunk.parameters()]
    stepped = [parameter for inner in _inner(state.optimizer) for g in inner.param_groups for parameter in g["params"]]
    if kind == "parameters":
        yield from parameters  # views of Megatron's buffers, where it has some
    elif kind == "gradients":
        for chunk in state.chunks:
            if hasattr(chunk, "zero_grad_buffer"):  # Megatron's DDP
                yield from (buffer.grad_data for buffer in [*chunk.buffers, *chunk.expert_parallel_buffers])
        yield from (parameter.grad for parameter in [*parameters, *stepped] if parameter.grad is not None)
    else:
        weights = {parameter.untyped_storage().data_ptr() for parameter in parameters}
        moments = [
            value
            for inner in _inner(state.optimizer)
            for held in inner.state.values()
            for value in held.values()
            if isinstance(value, Tensor)
        ]
        # What is stepped are fp32 copies, or the weights themselves.
        yield from (one for one in [*stepped, *moments] if one.untyped_storage().data_ptr() not in weights)


def _inner(optimizer: Any) -> list[Any]:
    """The optimizers of torch's kind inside of a Megatron optimizer."""
    parts = getattr(optimizer, "chained_optimizers", [optimizer])
    return [part.optimizer for part in parts if getattr(part, "optimizer", None) is not None]
