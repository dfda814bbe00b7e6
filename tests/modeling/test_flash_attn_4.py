"""The call of flash-attn-4 on the real package, where `pip install '.[flash-attn]'` has put it; no kernel runs."""

from __future__ import annotations

import ctypes.util
import inspect
import json
import os
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch

from roll_batching.errors import LayoutError
from roll_batching.modeling.attention import packages

ROOT = Path(__file__).resolve().parents[2]
HEADS, GROUPS = 4, 2


def core_and_inputs(device: str, dim: int, values: int, window: int | None, has_sinks: bool) -> tuple[Any, ...]:
    """A core without its constructor, and queries, keys and spans of two sequences on a rank of CP 2."""
    from roll_batching.modeling.attention.varlen import VarlenSpans
    from roll_batching.packing.collectives import LocalKeys

    def draw(*shape: int) -> torch.Tensor:
        return torch.zeros(*shape, dtype=torch.bfloat16, device=device, requires_grad=True)

    core: Any = object.__new__(packages.FlashFourCore)
    torch.nn.Module.__init__(core)
    core.window, core.scale, core.value_dim = window, dim**-0.5, values
    core.softmax_offset = torch.nn.Parameter(draw(HEADS).detach()) if has_sinks else None
    spans = VarlenSpans(
        cu_queries=torch.tensor([0, 3, 7], dtype=torch.int32, device=device),
        cu_keys=torch.tensor([0, 6, 14], dtype=torch.int32, device=device),
        max_queries=4,
        max_keys=8,
        key_rows=None,
    )
    groups = GROUPS if values == dim else HEADS  # multi-latent attention has no groups
    return core, draw(7, HEADS, dim), LocalKeys(draw(14, groups, dim), draw(14, groups, values)), spans


CASES = {
    "causal": (64, 64, None, False),
    "window": (128, 128, 5, False),
    "sinks": (64, 64, 5, True),
    "values of MLA": (192, 128, None, False),
}


@pytest.mark.parametrize("case", CASES)
def test_the_arguments_fit_the_signature(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """That of the installed package, or of the stand-in, which the next test compares with it."""
    from tests.support.own_attention import cute_flash_attn_varlen_func

    try:
        from flash_attn.cute import flash_attn_varlen_func as function
    except ImportError:
        function = cute_flash_attn_varlen_func
    calls = []

    def recorded(*arguments: Any, **keywords: Any) -> Any:
        bound = inspect.signature(function).bind(*arguments, **keywords)
        calls.append(bound.arguments)
        return keywords["q"].new_zeros(*keywords["q"].shape[:2], keywords["v"].shape[-1]), None

    monkeypatch.setattr(packages, "installed_function", lambda: recorded)
    core, query, keys, spans = core_and_inputs("cpu", *CASES[case])
    dim, values, window, has_sinks = CASES[case]
    assert core.attend(query, keys, spans).shape == (7, HEADS * values)
    (arguments,) = calls
    assert arguments["q"] is query and "qv" not in arguments and arguments["v"].shape[-1] == values
    assert arguments["cu_seqlens_q"] is spans.cu_queries and arguments["cu_seqlens_k"] is spans.cu_keys
    assert (arguments["max_seqlen_q"], arguments["max_seqlen_k"]) == (4, 8) and arguments["causal"] is True
    assert arguments.get("window_size") == (None if window is None else (window - 1, 0))
    assert ("learnable_sink" in arguments) == has_sinks


def test_the_stand_in_has_the_signature_of_the_package() -> None:
    from tests.support.own_attention import cute_flash_attn_varlen_func

    real = pytest.importorskip("flash_attn.cute", reason="needs pip install '.[flash-attn]'").flash_attn_varlen_func
    parameters = inspect.signature(cute_flash_attn_varlen_func).parameters
    copied = [(name, one.default) for name, one in parameters.items() if one.kind is one.POSITIONAL_OR_KEYWORD]
    found = [(name, one.default) for name, one in inspect.signature(real).parameters.items()]
    assert found[: len(copied)] == copied
    assert packages.installed_function() is real


COMPILE = """
import json, sys
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from tests.modeling.test_flash_attn_4 import core_and_inputs

with FakeTensorMode():
    core, query, keys, spans = core_and_inputs("cuda", *json.loads(sys.argv[1]))
    out = core.kernel(query, keys, spans)
    # Not through torch's engine, which asks the driver for the device.
    gradients = [one for one in out.grad_fn.apply(torch.empty_like(out), None) if one is not None]
print(json.dumps([list(x.shape) for x in (out, *gradients)]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["sm_90a", "sm_100a"])
@pytest.mark.parametrize("case", CASES)
def test_kernels_compile_for_a_gpu_that_is_not_here(case: str, architecture: str) -> None:
    """Forward and backward under fake tensors: the package compiles for the GPU it is told, and launches nothing."""
    pytest.importorskip("flash_attn.cute", reason="needs pip install '.[flash-attn]'")
    if architecture == "sm_100a" and ctypes.util.find_library("cuda") is None:
        pytest.skip("its tile scheduler asks NVIDIA's driver for the device")
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "FLASH_ATTENTION_ARCH": architecture.rstrip("a"),
        "CUTE_DSL_ARCH": architecture,
        "FLASH_ATTENTION_NUM_SMS": "132",
    }
    command = [sys.executable, "-c", COMPILE, json.dumps(CASES[case])]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stderr[-3000:]
    dim, values, _, has_sinks = CASES[case]
    groups = GROUPS if values == dim else HEADS
    shapes = [[7, HEADS, values], [7, HEADS, dim], [14, groups, dim], [14, groups, values]] + [[HEADS]] * has_sinks
    assert json.loads(done.stdout.splitlines()[-1]) == shapes


def test_a_version_without_an_argument_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = types.ModuleType("flash_attn.cute")
    monkeypatch.setitem(sys.modules, "flash_attn", types.ModuleType("flash_attn"))
    monkeypatch.setitem(sys.modules, "flash_attn.cute", module)
    with pytest.raises(LayoutError, match="cannot be imported .*pip install 'roll-batching.flash-attn.'"):
        packages.installed_function.__wrapped__()
    module.flash_attn_varlen_func = lambda q, k, v, cu_seqlens_q, cu_seqlens_k, softmax_scale, causal, window_size: q
    with pytest.raises(
        LayoutError, match="has no argument learnable_sink, max_seqlen_k, max_seqlen_q in the installed"
    ):
        packages.installed_function.__wrapped__()
