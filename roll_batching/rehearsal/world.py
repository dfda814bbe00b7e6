"""A cluster that consists of this process alone: torch's `fake` process group answers every collective at once.

For processes that do nothing else: nothing here is undone.
"""

from __future__ import annotations

import contextlib
import datetime
import os
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_iter

from roll_batching.distributed import Facts, groups, parallel_layout
from roll_batching.distributed.team import Team
from roll_batching.rehearsal import pretended_cuda
from roll_batching.rehearsal.experts import SelectedByRouter
from roll_batching.samples import SampleBatch


def join(rank: int, world_size: int) -> None:
    """This process becomes `rank` of a world of `world_size` that is not there."""
    os.environ["LOCAL_RANK"] = "0"
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    groups.group_timeout = parallel_layout.group_timeout = lambda group: datetime.timedelta(
        minutes=30
    )  # nobody is waited for
    _without_gloo()
    # What ranks tell each other this one says to itself: others would only say the same.
    groups._host_groups[dist.group.WORLD] = None
    team: Any = Team
    team.agree = _agreed_alone
    # An operator that fake tensors do not know: it writes what it is given.
    library = torch.library.Library("c10d", "IMPL")
    for name in ("reduce_scatter_tensor_coalesced_", "allgather_into_tensor_coalesced_", "allreduce_coalesced_"):
        library.impl(name, _done, "Meta")
    _LIBRARIES.append(library)


_LIBRARIES: list[Any] = []


@contextlib.contextmanager
def _agreed_alone(team: Team, what: str) -> Iterator[Facts]:
    facts = Facts()
    yield facts
    facts.total = facts.counted


def _done(*args: Any, **kwargs: Any) -> Any:
    from torch._C._distributed_c10d import FakeWork

    return FakeWork().boxed()


def _without_gloo() -> None:
    """Groups on gloo would look for the other processes, and objects travel as values that nobody has."""
    distributed: Any = dist
    make = distributed.new_group

    def new_group(ranks: Any = None, timeout: Any = None, backend: Any = None, *args: Any, **kwargs: Any) -> Any:
        if backend == "gloo":
            backend, kwargs = None, {"group_desc": "HOST", **kwargs}
        return make(ranks, timeout, backend, *args, **kwargs)

    def all_gather_object(gathered: list[Any], mine: Any, group: Any = None) -> None:
        gathered[:] = [mine] * len(gathered)

    distributed.new_group = new_group
    distributed.all_gather_object = all_gather_object


def ease_megatron() -> None:
    """What Megatron does with values that fake tensors do not have, left out: random states, swapped parameters."""
    import megatron.core.tensor_parallel.random as randomness

    state = torch.get_rng_state()
    torch.get_rng_state = torch.random.get_rng_state = lambda: state  # type: ignore[assignment]
    torch.set_rng_state = torch.random.set_rng_state = lambda new_state: None  # type: ignore[assignment]
    module: Any = randomness
    module._get_cuda_rng_state = lambda *args, **kwargs: state
    module._set_cuda_rng_state = lambda *args, **kwargs: None
    module.CudaRNGStatesTracker.fork = lambda self, *args, **kwargs: contextlib.nullcontext()
    torch.nn.Module._apply = _apply  # type: ignore[assignment]
    _read_through_python()
    _samples_are_the_hosts()


def _samples_are_the_hosts() -> None:
    """Lengths and offsets of samples are numbers on the host, whatever device is pretended."""
    kind: Any = SampleBatch
    check = kind.__post_init__

    def checked(self: SampleBatch) -> None:
        with _disable_current_modes():
            check(self)

    kind.__post_init__ = checked


def _read_through_python() -> None:
    """What C++ would read of a tensor itself goes through `item`, which a recorder sees and answers."""
    tensor, fake = torch.tensor, FakeTensor

    def read(values: Any) -> Any:
        if isinstance(values, list | tuple):
            return [read(value) for value in values]
        return values.item() if isinstance(values, FakeTensor) and values.numel() == 1 else values

    def listed(shape: tuple[int, ...], value: Any) -> Any:
        return [listed(shape[1:], value) for _ in range(shape[0])] if shape else value

    def tolist(self: FakeTensor) -> Any:
        """One read, however many values."""
        return listed(tuple(self.shape), self.reshape(-1)[0].item() if self.numel() else None)

    module: Any = torch
    module.tensor = lambda data, *args, **kwargs: tensor(read(data), *args, **kwargs)
    fake.tolist = tolist  # type: ignore[method-assign]


def _apply(module: torch.nn.Module, change: Any, recurse: bool = True) -> torch.nn.Module:
    """`Module._apply` (`to`, `bfloat16`), which would swap parameters in place: here modules get new ones."""
    found: dict[int, torch.nn.Parameter] = {}
    for part in module.modules():
        for name, parameter in part._parameters.items():
            if parameter is None:
                continue
            if id(parameter) not in found:
                found[id(parameter)] = _changed(parameter, change)
            part._parameters[name] = found[id(parameter)]
        for name, buffer in part._buffers.items():
            if buffer is not None:
                part._buffers[name] = change(buffer)
    return module


def _changed(parameter: torch.nn.Parameter, change: Any) -> torch.nn.Parameter:
    with torch.no_grad():
        value = change(parameter.detach())
    if value.dtype == parameter.dtype and value.device == parameter.device:
        return parameter
    new = torch.nn.Parameter(value, requires_grad=parameter.requires_grad)
    new.__dict__.update({key: item for key, item in parameter.__dict__.items() if key not in new.__dict__})
    return new


class _HostIsReal(TorchDispatchMode):
    """What only concerns the host is computed: tensors with values stay so, on the device there are none.

    `device`: the type of device that is pretended; where it is the CPU itself, new tensors are the device's.
    """

    def __init__(self, device: str) -> None:
        super().__init__()
        self._makes_host_tensors = device != "cpu"

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        tensors = [x for x in tree_iter((args, kwargs)) if isinstance(x, torch.Tensor)]
        device = kwargs.get("device")
        here = device is None or torch.device(device).type == "cpu"
        if here and (tensors or self._makes_host_tensors) and not any(isinstance(x, FakeTensor) for x in tensors):
            with _disable_current_modes():
                return func(*args, **kwargs)
        return func(*args, **kwargs)


@contextlib.contextmanager
def on_device_without_values(device: str) -> Iterator[None]:
    """Inside, tensors on `device` ("cpu" or "cuda") have shapes alone."""
    with contextlib.ExitStack() as modes:
        modes.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        if device == "cuda":
            modes.enter_context(pretended_cuda.SeenByCpp())
        modes.enter_context(SelectedByRouter())
        modes.enter_context(_HostIsReal(device))
        yield
