"""A fake cluster of one process: torch's `fake` process group completes every collective at once.

Patches of torch, Megatron and this package stay for the rest of the process.
"""

from __future__ import annotations

import contextlib
import datetime
import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_iter

from roll_batching.distributed import Facts, groups, parallel_layout
from roll_batching.distributed.team import Team
from roll_batching.jobs.config import JobConfig
from roll_batching.planning.arrays import Ints
from roll_batching.samples import SampleBatch
from roll_batching.tools.rehearsal import fake_cuda


def join(rank: int, world_size: int) -> None:
    """Initialize torch.distributed as `rank` of a fake process group of `world_size`."""
    os.environ["LOCAL_RANK"] = "0"
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    # Megatron asks for a timeout, but the fake backend never waits: any value serves.
    groups.group_timeout = parallel_layout.group_timeout = lambda group: datetime.timedelta(minutes=30)
    _replace_gloo()
    # Ranks exchange facts on the host. All ranks of a rehearsal would state the same, so this rank's suffice.
    groups._groups[dist.group.WORLD, "host"] = None
    team: Any = Team
    team.agree = _agree_alone
    # Operators without a meta implementation; they write into tensors that they are given.
    from torch._C._distributed_c10d import FakeWork

    library = torch.library.Library("c10d", "IMPL")
    for name in ("reduce_scatter_tensor_coalesced_", "allgather_into_tensor_coalesced_", "allreduce_coalesced_"):
        library.impl(name, lambda *args, **kwargs: FakeWork().boxed(), "Meta")
    _LIBRARIES.append(library)


_LIBRARIES: list[Any] = []


@contextlib.contextmanager
def _agree_alone(team: Team, what: str) -> Iterator[Facts]:
    facts = Facts()
    yield facts
    facts.total = facts.counted


def _replace_gloo() -> None:
    """Make gloo groups fake too, and gather objects from this rank only: gloo would wait for the other ranks."""
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


def patch_for_fake_tensors() -> None:
    """Replace functions that need tensor values, for the rest of the process; check samples on the host.

    Replaced are RNG states, the in-place `Module._apply`, and reads of tensors by C++.
    """
    import megatron.core.tensor_parallel.random as randomness

    state = torch.get_rng_state()
    torch.get_rng_state = torch.random.get_rng_state = lambda: state  # type: ignore[assignment]
    torch.set_rng_state = torch.random.set_rng_state = lambda new_state: None  # type: ignore[assignment]
    module: Any = randomness
    module._get_cuda_rng_state = lambda *args, **kwargs: state
    module._set_cuda_rng_state = lambda *args, **kwargs: None
    module.CudaRNGStatesTracker.fork = lambda self, *args, **kwargs: contextlib.nullcontext()
    torch.nn.Module._apply = _apply_out_of_place  # type: ignore[assignment]
    _patch_tensor_reads()
    _check_samples_on_host()
    _answer_grad_norm_groups()
    _let_no_gradient_overflow()


def _answer_grad_norm_groups() -> None:
    """Let Megatron's optimizers (0.19.2) see from the parameters at hand which of them have a gradient norm apart.

    Megatron reduces a flag over ranks and reads it; the read of a fake flag would say that some have.
    """
    from megatron.core.optimizer import optimizer

    if not hasattr(optimizer.MegatronOptimizer, "has_grad_norm_group"):
        return

    def has_grad_norm_group(self: Any, grad_norm_group: str) -> bool:
        return any(optimizer._get_param_grad_norm_group(p) == grad_norm_group for p in self.get_parameters())

    optimizer.MegatronOptimizer.has_grad_norm_group = has_grad_norm_group


def _let_no_gradient_overflow() -> None:
    """Let Megatron's optimizers in fp16 step: the read of a fake flag would say that gradients overflow."""
    from megatron.core.optimizer.optimizer import MixedPrecisionOptimizer

    kind: Any = MixedPrecisionOptimizer
    unscale = kind._unscale_main_grads_and_check_for_nan

    def unscale_without_overflow(self: Any) -> bool:
        unscale(self)
        return False

    kind._unscale_main_grads_and_check_for_nan = unscale_without_overflow


def _check_samples_on_host() -> None:
    """Check samples outside the fake modes: their lengths and offsets are real tensors on the host."""
    kind: Any = SampleBatch
    check = kind.__post_init__

    def check_on_host(self: SampleBatch) -> None:
        with _disable_current_modes():
            check(self)

    kind.__post_init__ = check_on_host


def _patch_tensor_reads() -> None:
    """Route reads of tensor values through `item`, which the recorder sees and answers."""
    tensor, fake = torch.tensor, FakeTensor

    def read(values: Any) -> Any:
        if isinstance(values, list | tuple):
            return [read(value) for value in values]
        return values.item() if isinstance(values, FakeTensor) and values.numel() == 1 else values

    def nested_list(shape: tuple[int, ...], value: Any) -> Any:
        return [nested_list(shape[1:], value) for _ in range(shape[0])] if shape else value

    def tolist(self: FakeTensor) -> Any:
        """Count one read for the whole tensor."""
        return nested_list(tuple(self.shape), self.reshape(-1)[0].item() if self.numel() else None)

    module: Any = torch
    module.tensor = lambda data, *args, **kwargs: tensor(read(data), *args, **kwargs)
    fake.tolist = tolist  # type: ignore[method-assign]


def _apply_out_of_place(module: torch.nn.Module, change: Any, recurse: bool = True) -> torch.nn.Module:
    """Replaces `Module._apply` (`to`, `bfloat16`): makes new parameters, because fake ones cannot be swapped."""
    changed: dict[int, torch.nn.Parameter] = {}
    for part in module.modules():
        for name, parameter in part._parameters.items():
            if parameter is None:
                continue
            if id(parameter) not in changed:
                changed[id(parameter)] = _changed(parameter, change)
            part._parameters[name] = changed[id(parameter)]
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


class _RealHostMode(TorchDispatchMode):
    """Computes operators on host tensors for real; only tensors on the rehearsed device are fake.

    `device`: type of the rehearsed device. If it is "cpu", newly made tensors are fake.
    """

    def __init__(self, device: str) -> None:
        super().__init__()
        self._makes_host_tensors = device != "cpu"

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        tensors = [x for x in tree_iter((args, kwargs)) if isinstance(x, torch.Tensor)]
        device = kwargs.get("device")
        on_host = device is None or torch.device(device).type == "cpu"
        if on_host and (tensors or self._makes_host_tensors) and not any(isinstance(x, FakeTensor) for x in tensors):
            with _disable_current_modes():
                return func(*args, **kwargs)
        return func(*args, **kwargs)


@contextlib.contextmanager
def fake_device(device: str) -> Iterator[None]:
    """Make tensors on `device` ("cpu" or "cuda") fake inside."""
    with contextlib.ExitStack() as modes:
        modes.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        if device == "cuda":
            modes.enter_context(fake_cuda.CppDeviceMode())
        modes.enter_context(RouterSelectionMode())
        modes.enter_context(_RealHostMode(device))
        yield


# ---- mixtures of experts
#
# Routing depends on tensor values, and fake tensors have none. Every expert gets the same number of tokens. With an
# imbalance, the experts of this rank get that multiple of their share, but no token twice. Megatron's router,
# dispatcher and experts run; only the counts that Megatron would read from the device are replaced.


def assume_balanced_routing(imbalance: float) -> None:
    """Patch Megatron for the rest of the process: its dispatcher gets the assumed token counts of the experts."""
    from megatron.core.transformer.moe import token_dispatcher

    kind: Any = token_dispatcher.MoEAlltoAllTokenDispatcher
    construct, preprocess, permute = kind.__init__, kind.preprocess, token_dispatcher.permute

    def patched_init(self: Any, *args: Any, **kwargs: Any) -> None:
        with _disable_current_modes():  # reads the chunk order as Python numbers
            construct(self, *args, **kwargs)

    def patched_preprocess(self: Any, routing_map: torch.Tensor) -> torch.Tensor:
        counts = preprocess(self, routing_map)
        counts[0].item()  # stands for the device-to-host copies that are skipped here
        with _disable_current_modes():
            return _set_counts(self, len(routing_map), imbalance)

    def patched_permute(tokens: torch.Tensor, *args: Any, num_out_tokens: Any = None, **kwargs: Any) -> Any:
        with RouterSelectionMode.selecting(num_out_tokens):
            return permute(tokens, *args, num_out_tokens=num_out_tokens, **kwargs)

    kind.__init__, kind.preprocess = patched_init, patched_preprocess
    token_dispatcher.permute = patched_permute


def routing_notes(config: JobConfig, imbalance: float) -> tuple[str, ...]:
    """Notes on the assumed routing of `config`; empty without experts."""
    model = config.actor_train.model_args.architecture
    if model is None or model.moe is None:
        return ()
    size = config.actor_train.strategy_args.strategy_config.expert_model_parallel_size
    experts = f"{model.moe.num_experts // size} of {model.moe.num_experts} experts on a rank"
    share = "an equal share of the tokens" if imbalance == 1 else f"{imbalance:g} times an equal share of the tokens"
    return (f"{experts} get {share}: assumed (--expert-imbalance), because routing depends on tensor values",)


def balanced_counts(tokens: int, topk: int, experts: int) -> Ints:
    """int64 `[experts]`: tokens per expert under balanced routing of `tokens` tokens to `topk` experts each."""
    whole, rest = divmod(tokens * topk, experts)
    return whole + (np.arange(experts) < rest).astype(np.int64)


def _set_counts(dispatcher: Any, tokens: int, imbalance: float) -> torch.Tensor:
    """Set the split sizes of `dispatcher`; returns int64 `[local experts]`, the tokens of this rank's experts.

    All ranks of the group route `tokens` tokens, because the micro-batches of a rehearsal are equal.
    """
    chosen = balanced_counts(tokens, dispatcher.config.moe_router_topk, dispatcher.num_experts)
    ep_size, tp_size = dispatcher.ep_size, dispatcher.tp_size
    local = chosen[dispatcher.local_expert_indices]
    if ep_size == tp_size == 1:  # all tokens are this rank's
        received = local[None]
    else:
        received = np.tile(np.minimum(np.ceil(local * imbalance).astype(np.int64), tokens), (tp_size * ep_size, 1))
        dispatcher.input_splits = chosen.reshape(ep_size, -1).sum(1)
        by_rank = received.sum(1).reshape(tp_size, ep_size)
        dispatcher.output_splits, dispatcher.output_splits_tp = by_rank[dispatcher.tp_rank], by_rank.sum(1)
    if dispatcher.num_local_experts > 1:
        dispatcher.num_global_tokens_per_local_expert = torch.from_numpy(received)
    return torch.from_numpy(received.sum(0))


class RouterSelectionMode(TorchDispatchMode):
    """Gives `masked_select` by a router's map the known number of entries; enter above a FakeTensorMode."""

    _entries: int | None = None

    @classmethod
    @contextlib.contextmanager
    def selecting(cls, entries: int) -> Iterator[None]:
        """Inside, masked selections have `entries` entries."""
        cls._entries = entries
        try:
            yield
        finally:
            cls._entries = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        if func is torch.ops.aten.masked_select.default and self._entries is not None:
            return args[0].new_empty(self._entries)
        return func(*args, **(kwargs or {}))
