"""Dispatch mode that records storages, FLOPs, collectives and host reads of a device.

It runs above FakeTensorMode. It also works on real tensors, so that tests compare a rehearsal with the real passes.
"""

from __future__ import annotations

import bisect
import contextlib
import sys
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from torch.utils.flop_counter import flop_registry

_aten = torch.ops.aten


@dataclass
class Block:
    """One storage on the device."""

    size: int
    """Bytes."""
    born: int
    """Clock at its first use, in operations."""
    phase: str
    owner: str
    """Qualified name of the running module, or of the autograd node in a backward pass."""
    tensor: str
    """Dtype and shape of the tensor that it was allocated for."""
    freed: int | None = None
    """Clock at its release; None: still held."""


@dataclass(frozen=True)
class HostRead:
    """A wait of Python for a value on the device."""

    phase: str
    place: str
    """File, line and function."""


class Recorder(TorchDispatchMode):
    """Records the operators that run inside, by phase."""

    def __init__(self, device_type: str) -> None:
        super().__init__()
        self._device_type = device_type
        self.blocks: list[Block] = []
        self.collectives: list[Collective] = []
        self.host_reads: list[HostRead] = []
        self.flops: dict[str, int] = {}
        """FLOPs by phase."""
        self.clock = -1
        """Number of the current operation."""
        self.phases: list[str] = []
        """Phase of every operation."""
        self.base_phase = "build"
        self._override: str | None = None
        self._prefix = ""
        self._known: dict[int, int] = {}
        """Index in `blocks` by the address of a storage that is held."""
        self._names: dict[int, str] = {}
        """Qualified name by id of a module."""
        self._stack: list[str] = []
        """Names of the running modules, the innermost last."""
        self._trail: tuple[list[int], list[str]] = [0], [""]
        """Autograd sequence numbers, ascending, and the module that runs from each on."""

    # ---- phase and module

    @property
    def phase(self) -> str:
        """Current phase; inside Megatron's schedule, forward or backward."""
        if self._override is not None:
            return self._override
        name = self.base_phase
        if name == "step":
            name = "forward" if torch._C._current_graph_task_id() == -1 else "backward"
        return self._prefix + name

    @contextlib.contextmanager
    def prefixed(self, prefix: str) -> Iterator[None]:
        """Put `prefix` before the names of the phases inside."""
        before, self._prefix = self._prefix, prefix
        try:
            yield
        finally:
            self._prefix = before

    @contextlib.contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """Attribute operations inside to `phase`."""
        before, self.base_phase = self.base_phase, phase
        try:
            yield
        finally:
            self.base_phase = before

    @contextlib.contextmanager
    def all_as(self, phase: str) -> Iterator[None]:
        """Attribute all operations inside to `phase`, whatever phases `during` names there."""
        self._override = phase
        try:
            yield
        finally:
            self._override = None

    def name_modules(self, root: torch.nn.Module, prefix: str = "") -> None:
        """Name the modules of `root` by their qualified names, without Megatron's wrappers."""
        for name, module in root.named_modules():
            parts = [part for part in name.split(".") if part != "module"]
            self._names[id(module)] = ".".join(([prefix] if prefix else []) + parts)

    @contextlib.contextmanager
    def tracking_modules(self) -> Iterator[None]:
        """Attribute storages allocated inside to the running modules."""
        hooks = torch.nn.modules.module
        handles = [
            hooks.register_module_forward_pre_hook(self._enter),
            hooks.register_module_forward_hook(self._leave, always_call=True),
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _enter(self, module: torch.nn.Module, args: Any) -> None:
        self._stack.append(self._names.get(id(module), type(module).__name__))
        self._mark()

    def _leave(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        if self._stack:
            self._stack.pop()
        self._mark()

    def _mark(self) -> None:
        """Attribute the autograd nodes from here on to the module on top of the stack.

        Sequence numbers grow with creation, so a backward pass finds the module of a node by bisection.
        """
        self._trail[0].append(torch.autograd._get_sequence_nr())
        self._trail[1].append(self._stack[-1] if self._stack else "")

    def _owner(self) -> str:
        if self._stack:
            return self._stack[-1]
        if torch._C._current_graph_task_id() == -1:
            return ""
        node = torch._C._current_autograd_node()
        if node is None:
            return "autograd"
        number = node._sequence_nr()
        at = bisect.bisect_right(self._trail[0], number) - 1
        # Accumulation of gradients has the largest possible number, and belongs to no module.
        owner = self._trail[1][at] if number < 1 << 60 else ""
        return owner or node.name()

    # ---- operators

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.prim.device.default:
            return func(*args, **kwargs)  # a question, no operation
        self.clock += 1
        self.phases.append(self.phase)
        if func is _aten._local_scalar_dense.default:
            self._note_read(args[0])
            if isinstance(args[0], FakeTensor):
                # 1 or True, so that checks for finite and non-zero numbers pass.
                return True if args[0].dtype is torch.bool else 1.0 if args[0].dtype.is_floating_point else 1
        elif func is _aten._to_copy.default:
            target = kwargs.get("device")
            leaves_device = args[0].device.type != "cpu" and target is not None and torch.device(target).type == "cpu"
            if leaves_device and not kwargs.get("non_blocking", False):
                self._note_read(args[0])
        elif is_collective(func):
            self.collectives.append(collective_of(func, args, self.phase))
        out = func(*args, **kwargs)
        counted = flops_of(func, args, kwargs, out)
        if counted:
            phase = self.phase
            self.flops[phase] = self.flops.get(phase, 0) + counted
        workspace = workspace_of(func, args)
        if workspace:
            block = Block(size=workspace, born=self.clock, phase=self.phase, owner=self._owner(), tensor="workspace")
            block.freed = self.clock
            self.blocks.append(block)
        for tensor in tree_iter(out):
            if isinstance(tensor, torch.Tensor):
                self._record(tensor)
        return out

    def _record(self, tensor: torch.Tensor) -> None:
        if tensor.device.type != self._device_type:
            return
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._known:
            return
        description = f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
        self._known[key] = len(self.blocks)
        self.blocks.append(
            Block(size=storage.nbytes(), born=self.clock, phase=self.phase, owner=self._owner(), tensor=description)
        )
        weakref.finalize(storage, self._release, key)

    def _release(self, key: int) -> None:
        self.blocks[self._known.pop(key)].freed = self.clock

    def block_of(self, tensor: torch.Tensor) -> int | None:
        """Index in `blocks` of the storage of `tensor`; None if it is not on the device."""
        return self._known.get(tensor.untyped_storage()._cdata)

    def _note_read(self, tensor: torch.Tensor) -> None:
        if tensor.device.type == self._device_type:
            self.host_reads.append(HostRead(self.phase, _caller()))


def _caller() -> str:
    """File, line and function of the innermost frame outside torch and this package."""
    frame = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if "/torch/" not in file and "/roll_batching/tools/rehearsal/" not in file and not file.startswith("<"):
            return f"{file}:{frame.f_lineno} ({frame.f_code.co_name})"
        if frame.f_back is None:
            break
        frame = frame.f_back
    return "unknown"


# ---- collectives


@dataclass(frozen=True)
class Collective:
    """One call of a collective."""

    name: str
    """all_reduce, send, barrier, ..."""
    group: str
    """Description of the group, or its ranks if it has none."""
    size: int
    """Number of ranks in the group."""
    bytes: int
    """Bytes of the tensors that this rank sends, or receives if it sends nothing."""
    phase: str


_NAMES = {
    "allreduce_": "all_reduce",
    "broadcast_": "broadcast",
    "reduce_": "reduce",
    "allgather_": "all_gather",
    "_allgather_base_": "all_gather_into_tensor",
    "allgather_into_tensor_coalesced_": "all_gather_into_tensor",
    "reduce_scatter_": "reduce_scatter",
    "_reduce_scatter_base_": "reduce_scatter_tensor",
    "reduce_scatter_tensor_coalesced_": "reduce_scatter_tensor",
    "allreduce_coalesced_": "all_reduce",
    "alltoall_base_": "all_to_all_single",
    "alltoall_": "all_to_all",
    "send": "send",
    "recv_": "recv",
    "barrier": "barrier",
}
_INPUT_SECOND = {"_allgather_base_", "_reduce_scatter_base_", "alltoall_base_", "allgather_", "reduce_scatter_"} | {
    "allgather_into_tensor_coalesced_",
    "reduce_scatter_tensor_coalesced_",
}
"""Operators whose first argument is the output and the second the input."""


def is_collective(func: Any) -> bool:
    """Whether `func` is a communicating operator of torch.distributed."""
    return bool(func.namespace == "c10d" and func._opname in _NAMES)


def collective_of(func: Any, args: tuple[Any, ...], phase: str) -> Collective:
    """Record of one call of the operator `func`."""
    operator = func._opname
    tensors = args[1] if operator in _INPUT_SECOND else args[0]
    size = sum(x.numel() * x.element_size() for x in tree_iter(tensors) if isinstance(x, torch.Tensor))
    boxed = next(x for x in args if isinstance(x, torch.ScriptObject))
    group: Any = dist.ProcessGroup.unbox(boxed)  # type: ignore[attr-defined]
    name = group.group_desc
    if not name or name == "undefined":
        name = "ranks " + ",".join(map(str, dist.get_process_group_ranks(group)))
    return Collective(_NAMES[operator], name, group.size(), size, phase)


# ---- FLOPs
#
# A product of [m, k] and [k, n] is 2mkn. Attention over p pairs of a query and a key that it sees, with h heads of d
# channels, is 4phd forward (scores, and values weighted by them) and 10phd backward, where the kernel computes the
# scores again: five products instead of two.


_PAIRS: dict[int, int] = {}
"""Query-key pairs of a pack, by the storage of its cumulative query lengths."""


def set_attention_pairs(cumulative: torch.Tensor, pairs: int) -> None:
    """Set the number of query-key pairs of the pack whose cumulative query lengths are `cumulative`.

    A fake tensor has no lengths to count them from.
    """
    _PAIRS[cumulative.untyped_storage()._cdata] = pairs


def flops_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> int:
    """FLOPs of one call of an operator."""
    packet = func._overloadpacket
    if packet in _COUNTED:
        return int(flop_registry[packet](*args, **kwargs, out_val=out))
    if packet is torch.ops.aten.addmm_:
        (m, k), n = args[1].shape, args[2].shape[1]
        return int(2 * m * k * n)
    name = str(packet)
    if name.startswith("aten._scaled_dot_product_"):
        return _dense_attention(func, args, kwargs)
    if name == "torch_attn._varlen_attn":
        query, cumulative = args[0], args[3]
        return 4 * _pairs_of(cumulative) * query.shape[1] * query.shape[2]
    if name == "torch_attn._varlen_attn_backward":
        query, cumulative = args[1], args[6]
        return 10 * _pairs_of(cumulative) * query.shape[1] * query.shape[2]
    return 0


def workspace_of(func: Any, args: tuple[Any, ...]) -> int:
    """Bytes of the workspace of flash attention's backward kernel, which fake tensors do not allocate; 0 for others.

    The kernel (`mha_varlen_bwd` in PyTorch's `flash_attn/flash_api.cpp`) allocates an fp32 sum of the queries'
    gradients, one number per row, and if there are fewer key heads than query heads, gradients of keys and values for
    each query head. Every sequence is padded by 128 rows.
    """
    if str(func._overloadpacket) != "torch_attn._varlen_attn_backward":
        return 0
    query, key, cumulative = args[1], args[2], args[6]
    rows, heads, dim = len(query) + 128 * len(cumulative), query.shape[1], query.shape[2]
    expanded = 0 if key.shape[1] == heads else 2 * len(key) * heads * dim * key.element_size()
    return 4 * rows * heads * (dim + 1) + expanded


def _dense_attention(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """FLOPs of a kernel of torch's scaled_dot_product_attention.

    Torch's registry does not serve: it has no CPU kernels, and it counts pairs above the diagonal, which kernels skip.
    """
    named = {argument.name: value for argument, value in zip(func._schema.arguments, args, strict=False)} | kwargs
    batch, heads, queries, dim = named["query"].shape
    keys, value_dim = named["key"].shape[2], named["value"].shape[3]
    square = min(queries, keys)
    pairs = square * (square + 1) // 2 + (queries - square) * keys if named.get("is_causal") else queries * keys
    # Products: scores and values; backward: scores again, gradients of queries, keys (dim), scores, values (value_dim).
    channels = 3 * dim + 2 * value_dim if "backward" in str(func) else dim + value_dim
    return int(2 * batch * heads * pairs * channels)


def _pairs_of(cumulative: torch.Tensor) -> int:
    return _PAIRS.get(cumulative.untyped_storage()._cdata, 0)


_ATEN = torch.ops.aten
_COUNTED = frozenset({_ATEN.mm, _ATEN.addmm, _ATEN.bmm, _ATEN.baddbmm})
