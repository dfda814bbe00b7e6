"""A fake CUDA device: tensors on it have shapes but no values. Works with every build of torch, without a GPU.

FakeTensorMode alone is not enough without a GPU: a backward pass in torch's C++ code asks the driver for streams, which
a CPU build does not have. Therefore C++ sees these tensors on "meta", for which it asks nothing, while Python sees
"cuda". Tensors that C++ then makes on "meta" are moved to the fake device.
"""

from __future__ import annotations

import contextlib
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch._subclasses.fake_tensor as fake_tensors
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from roll_batching.megatron_patches.cpu_platform import replace_streams

DEVICE = torch.device("cuda", 0)
_META = torch.device("meta")
_CAPABILITY = (9, 0)
"""Compute capability of the H100."""


def install() -> None:
    """Patch torch to report an H100 until the process ends; each rehearsal has its own process.

    Raises `RuntimeError` if CUDA is available.
    """
    if torch.cuda.is_available():
        raise RuntimeError("a rehearsal needs a process without CUDA: set CUDA_VISIBLE_DEVICES=''")
    _patch_torch_cuda()
    _avoid_driver_calls()
    _use_foreach_optimizers()
    _patch_kernels()
    _PythonDeviceMode().__enter__()


def _patch_torch_cuda() -> None:
    cuda: Any = torch.cuda
    state = torch.get_rng_state()

    def answer(value: Any) -> Callable[..., Any]:
        return lambda *args, **kwargs: value

    for name, value in {
        "is_available": True,
        "is_initialized": True,
        "device_count": 8,
        "current_device": DEVICE,
        "set_device": None,
        "synchronize": None,
        "manual_seed": None,
        "manual_seed_all": None,
        "empty_cache": None,
        "get_rng_state": state,
        "set_rng_state": None,
        "get_device_capability": _CAPABILITY,
        "get_device_name": "NVIDIA H100 80GB HBM3 (fake)",
        "memory_allocated": 0,
        "_lazy_init": None,
        "_lazy_call": None,
    }.items():
        setattr(cuda, name, answer(value))
    cuda.nvtx.range_push = cuda.nvtx.range_pop = answer(0)
    cuda.random.get_rng_state, cuda.random.set_rng_state = answer(state), answer(None)
    cuda.default_generators = [torch.default_generator]
    torch.Generator = lambda device=None: torch.default_generator  # type: ignore[assignment,misc]
    replace_streams()
    cuda.default_stream = cuda.current_stream
    cuda.device = lambda *args: contextlib.nullcontext()


def _avoid_driver_calls() -> None:
    """Keep FakeTensorMode from initializing CUDA for the fake device."""
    module: Any = fake_tensors
    module.init_gpu_context = lambda *args: None
    mode: Any = FakeTensorMode
    mode.avoid_device_init = property(lambda self: True)
    torch._C._ensureCUDADeviceGuardSet = lambda: None
    kind: Any = FakeTensor
    kind.is_cuda = property(lambda self: self.fake_device.type == "cuda")
    kind.is_meta = property(lambda self: self.fake_device.type == "meta")


def _use_foreach_optimizers() -> None:
    """Make torch's optimizers choose foreach, as on CUDA; they do not for subclasses such as FakeTensor."""
    import torch.optim.adam as adam

    module, optimizer = adam, torch.optim.Optimizer
    module._default_to_fused_or_foreach = lambda *args, **kwargs: (False, True)  # type: ignore[assignment]
    for name in ("_accelerator_graph_capture_health_check", "_cuda_graph_capture_health_check"):
        if hasattr(optimizer, name):
            setattr(optimizer, name, lambda self: None)


def _patch_kernels() -> None:
    """Replace functions that are one fused kernel on CUDA by ones without intermediate tensors, which would be counted.

    They are torch's RMSNorm and attention, Triton kernels of this package, and functions that Megatron compiles. Fla's
    kernels take no fake tensors: gated delta nets are rehearsed in plain torch.
    """
    import megatron.core.fusions.fused_bias_swiglu as swiglu

    from roll_batching.modeling import delta_kernels
    from roll_batching.registry import module_with

    functional: Any = torch.nn.functional
    rms_norm: Any = lambda x, shape, weight=None, eps=None: _RMSNorm.apply(x, weight)  # noqa: E731
    for name, kernel in (("rms_norm", rms_norm), ("scaled_dot_product_attention", _attention)):
        setattr(functional, name, _on_cuda(kernel, getattr(functional, name)))
    with _triton():
        for kernels in ("roll_batching.losses.tile_kernels", "roll_batching.modeling.rotary_kernel"):
            module_with("triton", kernels)
    module: Any = delta_kernels
    module.kernel = lambda: None
    module = swiglu
    module.swiglu = lambda y: y.new_empty(*y.shape[:-1], y.shape[-1] // 2)
    module.bias_swiglu = lambda y, bias: y.new_empty(*y.shape[:-1], y.shape[-1] // 2)
    module.weighted_swiglu = lambda y, weights: y.new_empty(*y.shape[:-1], y.shape[-1] // 2)
    module.swiglu_back = lambda g, y: torch.empty_like(y)
    module.bias_swiglu_back = lambda g, y, bias: torch.empty_like(y)
    module.weighted_swiglu_back = lambda g, y, weights: (torch.empty_like(y), torch.empty_like(weights))


@contextlib.contextmanager
def _triton() -> Iterator[None]:
    """Provide an empty module `triton` if it is not installed: kernels are defined, but never run."""
    if importlib.util.find_spec("triton") is not None:
        yield
        return
    names = ("triton", "triton.language")
    for name in names:
        sys.modules[name] = types.ModuleType(name)
        sys.modules[name].__spec__ = importlib.machinery.ModuleSpec(name, None)
    package: Any = sys.modules["triton"]
    package.jit, package.language = lambda function: function, sys.modules["triton.language"]
    try:
        yield
    finally:
        for name in names:
            del sys.modules[name]


class CppDeviceMode(TorchDispatchMode):
    """Shows C++ "meta" where Python sees the fake device; enter above a FakeTensorMode."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        if func is torch.ops.prim.device.default:
            # C++ sees fake CUDA tensors as meta, because they have no storage.
            fake_device = args[0].fake_device if isinstance(args[0], FakeTensor) else torch.device("cpu")
            return _META if fake_device.type == "cuda" else fake_device
        kwargs = kwargs or {}
        device = kwargs.get("device")
        if device is not None and torch.device(device).type == "meta":
            # What C++ then creates on meta, like such a tensor, belongs on the fake CUDA device.
            kwargs = {**kwargs, "device": DEVICE}
        return func(*args, **kwargs)


class _PythonDeviceMode(TorchFunctionMode):
    """Gives Python "cuda" as the device of a fake tensor where C++ would say "meta"."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        device = kwargs.get("device")
        if isinstance(device, int) or (device is not None and str(device) == "cuda"):
            kwargs = {**kwargs, "device": DEVICE}
        if func is torch.Tensor.cuda:
            func, args = torch.Tensor.to, (args[0], DEVICE)
        if func is torch.Tensor.to and _on_device(args[0]):
            args, kwargs = _without_same_device(args, kwargs)
            if len(args) == 1 and not kwargs:
                return args[0]
        if func is torch.Tensor.type and len(args) == 1 and not kwargs and _on_device(args[0]):
            return "torch.cuda." + func(*args).rsplit(".", 1)[1]
        return func(*args, **kwargs)


def _on_device(tensor: Any) -> bool:
    return isinstance(tensor, FakeTensor) and tensor.fake_device.type == "cuda"


def _without_same_device(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments of `x.to(...)` without a device that equals the device of x: C++ would see another one and copy."""

    def is_same(value: Any) -> bool:
        return isinstance(value, torch.device | str) and torch.device(value).type == "cuda"

    kept = {name: value for name, value in kwargs.items() if not is_same(value)}
    if len(kept) < len(kwargs) or any(is_same(value) for value in args[1:]):
        kept.pop("non_blocking", None)
    return (args[0], *(value for value in args[1:] if not is_same(value))), kept


def _on_cuda(kernel: Callable[..., torch.Tensor], otherwise: Callable[..., torch.Tensor]) -> Callable[..., Any]:
    """`kernel` for tensors on the fake device, `otherwise` for others.

    Not a function mode, because recomputation in a backward pass runs outside function modes.
    """

    def dispatch(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return (kernel if _on_device(x) else otherwise)(x, *args, **kwargs)

    return dispatch


class _RMSNorm(torch.autograd.Function):
    """Fused RMSNorm of CUDA, which C++ would decompose on "meta"; it saves input, weight and one number per row."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        ctx.save_for_backward(x, weight, x.new_empty(x.shape[:-1], dtype=torch.float32))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), None if weight is None else torch.empty_like(weight)


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Kernel of scaled_dot_product_attention on CUDA: flash attention; memory-efficient with a mask or other values."""
    ops = torch.ops.aten
    is_even = query.shape[-1] == value.shape[-1]  # flash attention takes values as wide as keys only
    if attn_mask is None and is_even and query.dtype in (torch.bfloat16, torch.float16):
        return ops._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal, scale=scale)[0]
    repeats = query.shape[1] // key.shape[1]
    if enable_gqa and repeats > 1:
        key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
    if attn_mask is not None and attn_mask.dtype is torch.bool:
        attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill_(~attn_mask, float("-inf"))
    if attn_mask is not None:
        attn_mask = attn_mask.expand(*query.shape[:3], key.shape[2])
    return ops._scaled_dot_product_efficient_attention(
        query, key, value, attn_mask, True, dropout_p, is_causal, scale=scale
    )[0]
