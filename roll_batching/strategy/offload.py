"""Offloading model states to host memory, which frees their device memory until they are loaded again.

What moves are storages. All views of a storage (Megatron's buffers, the parameters and gradients in them, the
optimizer's flat shards) are empty while it is on the host and valid again afterwards, so that no view has to be known.
"""

from __future__ import annotations

import contextlib
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from roll_batching.errors import LayoutError
from roll_batching.strategy.fault_messages import device_memory_error
from roll_batching.strategy.model_state import ModelState
from roll_batching.strategy.optimizer_step import optimizer_parts

KINDS = ("parameters", "gradients", "optimizer")
"""Kinds of states: weights; Megatron's gradient buffers; moments and fp32 copies of the weights."""


@dataclass(frozen=True, kw_only=True)
class OffloadStats:
    """Bytes and seconds of offloading and loading, on this rank."""

    bytes: int = 0
    """Device memory that was freed, or allocated again."""
    seconds: float = 0.0

    def __add__(self, other: OffloadStats) -> OffloadStats:
        return OffloadStats(bytes=self.bytes + other.bytes, seconds=self.seconds + other.seconds)


@dataclass
class _OffloadedStorage:
    """A storage whose device memory was freed."""

    storage: torch.UntypedStorage
    size: int
    """Bytes on the device."""
    host: Tensor | None
    """uint8 `[size]`: its contents; None: it is loaded as zeros."""


@dataclass
class OffloadedStates:
    """The states of one model that are on the host."""

    storages: dict[str, list[_OffloadedStorage]] = field(default_factory=dict)
    """Storages on the host, by kind."""
    stats: OffloadStats = OffloadStats()
    """Bytes and seconds of all transfers so far, in both directions."""
    _host_buffers: dict[tuple[str, int], Tensor] = field(default_factory=dict)
    """Host memory by kind and number of the storage. Reused, as allocating page-locked memory is slow."""

    def offload(self, state: ModelState, kinds: Sequence[str], *, keep: bool = True) -> OffloadStats:
        """Copies `kinds` to the host and frees their device memory; kinds on the host already stay there.

        Gradients are dropped, and without `keep` everything is: they are loaded as zeros.
        """
        started, freed, device = time.perf_counter(), 0, state.device
        _synchronize(device)  # kernels that still read these storages
        for kind in _require_kinds(kinds):
            if kind in self.storages:
                continue
            keeps_contents = keep and kind != "gradients"
            offloaded = [
                _OffloadedStorage(
                    storage, storage.nbytes(), self._copy_to_host(kind, n, storage) if keeps_contents else None
                )
                for n, storage in enumerate(_storages(_tensors(state, kind), device))
            ]
            _synchronize(device)  # the copies above are asynchronous
            for offloaded_storage in offloaded:
                offloaded_storage.storage.resize_(0)
                freed += offloaded_storage.size
            self.storages[kind] = offloaded
        if device.type == "cuda":
            torch.cuda.empty_cache()
        return self._add_stats(freed, started)

    def load(self, state: ModelState, kinds: Sequence[str]) -> OffloadStats:
        """Loads `kinds` onto the device; kinds that are there already stay as they are."""
        started, allocated, device = time.perf_counter(), 0, state.device
        for kind in _require_kinds(kinds):
            with _all_or_none(kind, self.storages.get(kind, [])) as offloaded:
                for offloaded_storage in offloaded:
                    offloaded_storage.storage.resize_(offloaded_storage.size)
                    flat = _flat(offloaded_storage.storage)
                    if offloaded_storage.host is None:
                        flat.zero_()
                    else:
                        flat.copy_(offloaded_storage.host, non_blocking=True)
                    allocated += offloaded_storage.size
            self.storages.pop(kind, None)
        _synchronize(device)
        return self._add_stats(allocated, started)

    def require(self, kinds: Sequence[str], what: str) -> None:
        """Raises `LayoutError`, the same on all ranks, if any of `kinds`, which `what` needs, is on the host."""
        offloaded = [kind for kind in kinds if kind in self.storages]
        if offloaded:
            raise LayoutError(
                f"{what} needs the model's {' and '.join(offloaded)}, which are offloaded to the host: call load_states"
            )

    def _add_stats(self, size: int, started: float) -> OffloadStats:
        stats = OffloadStats(bytes=size, seconds=time.perf_counter() - started)
        self.stats += stats
        return stats

    def _copy_to_host(self, kind: str, number: int, storage: torch.UntypedStorage) -> Tensor:
        flat = _flat(storage)
        host = self._host_buffers.get((kind, number))
        if host is None or host.numel() != flat.numel():
            host = torch.empty(flat.numel(), dtype=torch.uint8, pin_memory=flat.is_cuda)
            self._host_buffers[kind, number] = host
        return host.copy_(flat, non_blocking=True)


class OffloadMixin(ABC):
    """Offload methods of a strategy. Each rank moves its own shards, without communication."""

    @cached_property
    def _offload(self) -> OffloadedStates:
        return OffloadedStates()

    @property
    @abstractmethod
    def state(self) -> ModelState:
        """The model and everything that belongs to it."""

    @state.setter
    @abstractmethod
    def state(self, state: ModelState) -> None: ...

    def offload_states(self, *kinds: str, keep: bool = True) -> OffloadStats:
        """Frees the device memory of `kinds` (of `KINDS`; none named: all), until `load_states`.

        Weights and optimizer state are copied to the host, into page-locked memory beside a GPU. Gradients are dropped
        and loaded as zeros, as is everything without `keep`, for weights that are about to be copied from elsewhere.
        Methods that need offloaded states raise LayoutError. Call it with the same kinds on all ranks.
        """
        return self._offload.offload(self.state, kinds or KINDS, keep=keep)

    @property
    def offload_stats(self) -> OffloadStats:
        """Bytes and seconds of all offloading and loading so far."""
        assert self.state  # without a model its property raises the error that says what to call
        return self._offload.stats

    def load_states(self, *kinds: str) -> OffloadStats:
        """Loads `kinds` (none named: all) back onto the device, bit for bit. Kinds that are there stay as they are.

        Raises `DeviceMemoryError` on a rank whose device has no room; that kind stays on the host as a whole.
        """
        return self._offload.load(self.state, kinds or KINDS)

    @contextlib.contextmanager
    def loaded(self, *kinds: str) -> Iterator[None]:
        """Context with `kinds` (none named: all) on the device; offloaded ones are offloaded again afterwards."""
        offloaded = [kind for kind in kinds or KINDS if kind in self._offload.storages]
        self._offload.load(self.state, offloaded)
        try:
            yield
        finally:
            self._offload.offload(self.state, offloaded)

    @contextlib.contextmanager
    def offloaded(self, *kinds: str) -> Iterator[None]:
        """Context with `kinds` (none named: all) on the host; those that were on the device are loaded afterwards."""
        on_device = [kind for kind in kinds or KINDS if kind not in self._offload.storages]
        self._offload.offload(self.state, on_device)
        try:
            yield
        finally:
            self._offload.load(self.state, on_device)


@contextlib.contextmanager
def _all_or_none(kind: str, offloaded: list[_OffloadedStorage]) -> Iterator[list[_OffloadedStorage]]:
    """Context for loading: all storages are allocated, or for lack of memory none."""
    try:
        yield offloaded
    except torch.OutOfMemoryError as error:
        for offloaded_storage in offloaded:
            offloaded_storage.storage.resize_(0)
        cure = "Free what was allocated meanwhile, and call load_states again: nothing of it is lost"
        raise device_memory_error(error, f"while the model's {kind} came back from the host", cure) from error


def _require_kinds(kinds: Sequence[str]) -> Sequence[str]:
    unknown = [kind for kind in kinds if kind not in KINDS]
    if unknown:
        raise LayoutError(f"there are no states called {unknown[0]!r}: name some of {', '.join(KINDS)}")
    return kinds


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _flat(storage: torch.UntypedStorage) -> Tensor:
    """uint8 `[bytes]`: a view of the whole storage."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _storages(tensors: Iterable[Tensor], device: torch.device) -> Iterator[torch.UntypedStorage]:
    """The distinct storages of `tensors` that have memory on `device`."""
    pointers: set[int] = set()
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage.device.type == device.type and storage.nbytes() and storage.data_ptr() not in pointers:
            pointers.add(storage.data_ptr())
            yield storage


def _tensors(state: ModelState, kind: str) -> Iterator[Tensor]:
    """The tensors of one of `KINDS`; several may be views of one storage."""
    parameters = [parameter for chunk in state.chunks for parameter in chunk.parameters()]
    parts = optimizer_parts(state.optimizer)
    optimizers = [part.optimizer for part in parts if getattr(part, "optimizer", None) is not None]  # torch's
    stepped = [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]
    if kind == "parameters":
        yield from parameters  # under DDP views of Megatron's buffers
    elif kind == "gradients":
        for chunk in state.chunks:
            if hasattr(chunk, "zero_grad_buffer"):  # Megatron's DDP
                yield from (buffer.grad_data for buffer in [*chunk.buffers, *chunk.expert_parallel_buffers])
        yield from (parameter.grad for parameter in [*parameters, *stepped] if parameter.grad is not None)
    else:
        weights = {parameter.untyped_storage().data_ptr() for parameter in parameters}
        moments = [
            value
            for optimizer in optimizers
            for parameter_state in optimizer.state.values()
            for value in parameter_state.values()
            if isinstance(value, Tensor)
        ]
        # An fp32 model has no fp32 copies: its optimizer steps the weights themselves, which are another kind.
        yield from (tensor for tensor in [*stepped, *moments] if tensor.untyped_storage().data_ptr() not in weights)
