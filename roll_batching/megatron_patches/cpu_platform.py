"""Lets the unmodified Megatron-Core train on a machine without CUDA.

Megatron calls `torch.cuda` for the current device, streams, events and random states, and creates small tensors with
`device="cuda"`. `install` redirects these calls to the CPU; it is an error where CUDA is available. Replaced for the
rest of the process, for Megatron 0.16 to 0.19:

- functions of `torch.cuda`, `torch.Tensor.cuda` and `torch.Tensor.type`, and what takes `device="cuda"`. A function
  mode would see every call of torch, and takes a quarter of a step's processor time;
- `megatron.core.tensor_parallel.random._set_cuda_rng_state`, which queues states until CUDA is there;
- `all_to_all_single`, `all_gather` and `reduce_scatter` of `torch.distributed`, for mixtures of experts over gloo.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._device import _device_constructors

_CPU = torch.device("cpu")


class _Stream:
    cuda_stream = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
    def wait_stream(self, *args: Any) -> None: ...
    def wait_event(self, *args: Any) -> None: ...
    def synchronize(self) -> None: ...
    def record_event(self, *args: Any) -> _Event:
        return _Event()


class _Event:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
    def record(self, *args: Any) -> None: ...
    def wait(self, *args: Any) -> None: ...
    def synchronize(self) -> None: ...
    def query(self) -> bool:
        return True

    def elapsed_time(self, end: _Event) -> float:
        return 0.0


_installed = False


def install() -> None:
    """Redirects Megatron's CUDA calls to the CPU for the rest of the process; a second call does nothing.

    Raises `RuntimeError` if CUDA is available, where work would silently run on the CPU.
    """
    global _installed
    if torch.cuda.is_available():
        raise RuntimeError("the CPU platform is for machines without CUDA; this one has it")
    if _installed:
        return
    from megatron.core.tensor_parallel import random as megatron_random

    cuda: Any = torch.cuda
    randomness: Any = megatron_random

    def get_state(device: Any = None) -> torch.Tensor:
        return torch.get_rng_state()

    def set_state(state: torch.Tensor, device: Any = None, graph_safe: bool = False) -> None:
        torch.set_rng_state(state)

    cuda.current_device = lambda: _CPU
    cuda.get_rng_state = cuda.random.get_rng_state = get_state
    cuda.set_rng_state = cuda.random.set_rng_state = set_state
    # Megatron's setter queues the state until CUDA is initialised, and its tracker warns when a fork draws on the CPU.
    randomness._set_cuda_rng_state = set_state
    logging.getLogger(randomness.__name__).addFilter(lambda record: "CPU RNG state changed" not in record.getMessage())
    # Megatron's advice on overlapping kernels with communication, which a CPU does not do.
    warnings.filterwarnings("ignore", message="When using .* it is recommended to set the environment variable CUDA_")
    cuda.manual_seed = torch.manual_seed
    cuda.default_generators = [torch.default_generator]
    cuda.synchronize = lambda *args, **kwargs: None
    replace_streams()
    torch.distributed.all_to_all_single = _with_listed_splits(torch.distributed.all_to_all_single)
    torch.distributed.all_gather = _with_unequal_parts(torch.distributed.all_gather)
    torch.distributed.reduce_scatter = _with_unequal_sums(torch.distributed.reduce_scatter)
    _redirect_tensors()
    _installed = True


def replace_streams() -> None:
    """Replace streams and events of `torch.cuda` by ones that order nothing, for the rest of the process."""
    cuda: Any = torch.cuda
    cuda.Stream, cuda.Event = _Stream, _Event
    cuda.current_stream = lambda *args, **kwargs: _Stream()
    cuda.stream = lambda stream: contextlib.nullcontext()


def _redirect_tensors() -> None:
    """Let calls with `device="cuda"` use the CPU, and `type` name the tensor type that clip_grads asserts."""
    like = ("empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "randint_like")
    for name in [*(function.__name__ for function in _device_constructors()), *like]:
        if hasattr(torch, name):
            setattr(torch, name, _on_cpu(getattr(torch, name)))
    tensor: Any = torch.Tensor
    for name in ("to", "new_empty", "new_zeros", "new_ones", "new_full", "new_tensor"):
        setattr(tensor, name, _on_cpu(getattr(tensor, name)))
    tensor.cuda = lambda self, *args, **kwargs: self
    convert = tensor.type

    @functools.wraps(convert)
    def type_or_convert(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        result = convert(self, *args, **kwargs)
        if not isinstance(result, str):
            return result
        return result.replace("torch.", "torch.cuda.").replace("Double", "Float")  # clip_grads knows no fp64

    tensor.type = type_or_convert


def _on_cpu(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        device = kwargs.get("device")
        if device is not None and str(device).startswith("cuda"):
            kwargs["device"] = _CPU
        return function(*args, **kwargs)

    return call


def _with_listed_splits(exchange: Callable[..., Any]) -> Callable[..., Any]:
    """`exchange` that also takes split sizes as tensors: Megatron's MoE dispatcher makes lists only on CUDA."""

    @functools.wraps(exchange)
    def all_to_all_single(
        output: torch.Tensor,
        input: torch.Tensor,
        output_split_sizes: Any = None,
        input_split_sizes: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        splits = (
            sizes.tolist() if isinstance(sizes, torch.Tensor) else sizes
            for sizes in (output_split_sizes, input_split_sizes)
        )
        return exchange(output, input, *splits, *args, **kwargs)

    return all_to_all_single


def _with_unequal_parts(gather: Callable[..., Any]) -> Callable[..., Any]:
    """`gather` for parts of unequal shapes, which tensor-parallel experts need and gloo lacks, by broadcasts."""

    @functools.wraps(gather)
    def all_gather(parts: list[torch.Tensor], tensor: torch.Tensor, group: Any = None, async_op: bool = False) -> Any:
        if async_op or len({part.shape for part in parts}) == 1:
            return gather(parts, tensor, group, async_op)
        group = group or torch.distributed.group.WORLD
        parts[group.rank()].copy_(tensor)
        for rank, part in enumerate(parts):
            torch.distributed.broadcast(part, torch.distributed.get_global_rank(group, rank), group=group)
        return None

    return all_gather


def _with_unequal_sums(original: Callable[..., Any]) -> Callable[..., Any]:
    """Torch's `reduce_scatter` (`original`), also for parts of unequal shapes, which gloo refuses: each is reduced.

    The backward of `_with_unequal_parts` needs it. Asynchronous calls go to `original`: they need a handle.
    """

    @functools.wraps(original)
    def reduce_scatter(
        tensor: torch.Tensor,
        parts: list[torch.Tensor],
        op: Any = torch.distributed.ReduceOp.SUM,
        group: Any = None,
        async_op: bool = False,
    ) -> Any:
        if async_op or len({part.shape for part in parts}) == 1:
            return original(tensor, parts, op, group, async_op)
        group = group or torch.distributed.group.WORLD
        for rank, part in enumerate(parts):
            summed = part.clone()
            torch.distributed.reduce(summed, torch.distributed.get_global_rank(group, rank), op, group=group)
            if rank == group.rank():
                tensor.copy_(summed)
        return None

    return reduce_scatter
