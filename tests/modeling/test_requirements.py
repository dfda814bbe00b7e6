"""Models that device or libraries cannot compute are errors at construction, for every way to make a strategy."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.ranks import run_ranks

A100: dict[str, Any] = {
    "versions": {"torch": "2.10.0+cu130"},
    "compute_capability": (8, 0),
}
FINE: dict[str, Any] = {
    "device": "cuda",
    "dtype": "bfloat16",
    "head_dim": 128,
    "backend": "varlen",
    "engine_layers": False,
}
ENGINE = {"versions": {"torch": "2.10.0", "transformer-engine": "2.9.0", "transformer-engine-torch": "2.9.0"}}
FLASH = {"versions": {"flash-attn": "2.8.3"}}
FOUR: dict[str, Any] = {"backend": "flash_attn_4"}
FOUR_ON: dict[int, Any] = {
    number: {"versions": {"flash-attn-4": "4.0.0b36"}, "compute_capability": divmod(number, 10)}
    for number in (80, 90, 100, 103, 120, 130)
}
SAYS: dict[str, tuple[dict[str, Any], dict[str, Any], str | None]] = {
    "bf16": ({}, {}, None),
    "fp16": ({"dtype": "float16"}, {}, None),
    "the widest head": ({"head_dim": 256}, {}, None),
    "the narrowest head": ({"head_dim": 8}, {}, None),
    "fp32": ({"dtype": "float32"}, {}, "not in float32: set model_args.dtype"),
    "fp64": ({"dtype": "float64"}, {}, "not in float64: set model_args.dtype"),
    "a head too wide": ({"head_dim": 264}, {}, "not of 264: change kv_channels"),
    "an odd head": ({"head_dim": 100}, {}, "a multiple of 8, not of 100"),
    "an older torch": ({}, {"versions": {"torch": "2.9.1"}}, "install torch 2.10 or later"),
    "an older GPU": ({}, {"compute_capability": (7, 5)}, "this GPU has 7.5"),
    "no torch": ({}, {"versions": {}}, "torch, which is not installed: install torch 2.10 or later"),
    "a core of its own": ({"backend": None, "dtype": "float32"}, {"versions": {}}, None),
    "the CPU": (
        {"device": "cpu", "dtype": "float64", "head_dim": 300, "backend": "dense"},
        {"versions": {}, "compute_capability": None},
        None,
    ),
    "norms recomputed": ({"recomputed": ("core_attn", "layernorm")}, {}, "['layernorm'] needs TransformerEngine"),
    "attention recomputed": ({"recomputed": ("core_attn", "mlp", "moe")}, {}, None),
    "flash-attn": ({"backend": "flash_attn"}, FLASH, None),
    "flash-attn in fp16": ({"backend": "flash_attn", "dtype": "float16"}, FLASH, None),
    "flash-attn in fp32": ({"backend": "flash_attn", "dtype": "float32"}, FLASH, "not in float32"),
    "no flash-attn": ({"backend": "flash_attn"}, {}, "flash-attn, which is not installed: install flash-attn 2.1"),
    "an older flash-attn": (
        {"backend": "flash_attn"},
        {"versions": {"flash-attn": "2.0.9"}},
        "flash-attn, which is 2.0.9 here",
    ),
    "a head too wide for flash-attn": ({"backend": "flash_attn", "head_dim": 512}, FLASH, "up to 256 channels"),
    "flash-attn on an older GPU": (
        {"backend": "flash_attn"},
        FLASH | {"compute_capability": (7, 5)},
        "later, this GPU",
    ),
    "flash-attn on the CPU": ({"backend": "flash_attn", "device": "cpu"}, FLASH, "flash_attn runs on cuda, not on cpu"),
    "flash-attn instead of 4": (
        {"backend": "flash_attn"},
        FOUR_ON[90],
        "set attention_backend: flash_attn_4 and pip install 'roll-batching[flash-attn]'",
    ),
    "no flash-attn-4": (
        FOUR,
        FOUR_ON[90] | FLASH,
        "flash-attn-4, which is not installed: install flash-attn-4 4.0 or later, or pip",
    ),
    "flash-attn-4 on Hopper": (FOUR | {"head_dim": 256, "has_window": True}, FOUR_ON[90], None),
    "flash-attn-4 and sinks": (FOUR | {"head_dim": 64, "attention_sinks": True}, FOUR_ON[90], None),
    "flash-attn-4 and values of MLA": (FOUR | {"head_dim": 192, "value_dim": 128}, FOUR_ON[90], None),
    "flash-attn-4 on Blackwell": (FOUR | {"head_dim": 128, "has_window": True}, FOUR_ON[103], None),
    "its widest head on Blackwell": (FOUR | {"head_dim": 256}, FOUR_ON[100], None),
    "values of MLA on Blackwell": (FOUR | {"head_dim": 192, "value_dim": 128}, FOUR_ON[100], None),
    "flash-attn-4 on a GeForce": (FOUR, FOUR_ON[120], None),
    "flash-attn-4 on an A100": (FOUR, FOUR_ON[80], "needs compute capability 9.0 or later, this GPU has 8.0"),
    "flash-attn-4 on a later GPU": (FOUR, FOUR_ON[130], "has no kernels for compute capability 13.0"),
    "flash-attn-4 in fp32": (FOUR | {"dtype": "float32"}, FOUR_ON[90], "not in float32"),
    "flash-attn-4 on the CPU": (FOUR | {"device": "cpu"}, FOUR_ON[90], "flash_attn_4 runs on cuda, not on cpu"),
    "a head too wide for flash-attn-4": (FOUR | {"head_dim": 512}, FOUR_ON[90], "up to 256 channels"),
    "wide heads on Blackwell": (FOUR | {"head_dim": 192}, FOUR_ON[100], "not of 192 with values of 192, on compute"),
    "wide heads on a GeForce": (FOUR | {"head_dim": 192}, FOUR_ON[120], "heads of up to 128 channels"),
    "odd values": (FOUR | {"head_dim": 96, "value_dim": 60}, FOUR_ON[90], "not of 96 with values of 60"),
    "windows of wide heads": (
        FOUR | {"head_dim": 256, "has_window": True},
        FOUR_ON[100],
        "no backward pass for sliding windows with heads of 256 channels on compute capability 10.0",
    ),
    "sinks of wide heads": (FOUR | {"head_dim": 256, "attention_sinks": True}, FOUR_ON[100], "for attention sinks of"),
    "sinks on a GeForce": (FOUR | {"attention_sinks": True}, FOUR_ON[120], "for attention sinks of heads of 128"),
    "sinks of flash-attn": (
        {"backend": "flash_attn", "attention_sinks": True},
        FLASH,
        "set attention_backend: dense, or flash_attn_4",
    ),
    "TransformerEngine": ({"backend": "transformer_engine", "engine_layers": True}, ENGINE, None),
    "local attention in its layers": ({"engine_layers": True}, ENGINE, None),
    "its attention in local layers": ({"backend": "transformer_engine"}, ENGINE, None),
    "its layers in fp64": (
        {"backend": None, "engine_layers": True, "dtype": "float64"},
        ENGINE,
        "do not compute in float64: set transformer_impl: local",
    ),
    "its layers on the CPU": (
        {"backend": "dense", "engine_layers": True, "device": "cpu"},
        ENGINE | {"compute_capability": None},
        "compute on CUDA, not on cpu: set transformer_impl: local",
    ),
    "its attention on packs in fp32": (
        {"backend": "transformer_engine", "engine_layers": True, "dtype": "float32"},
        ENGINE,
        "transformer_engine computes in bfloat16 and float16",
    ),
    "its torch part is missing": (
        {"backend": None, "engine_layers": True},
        {"versions": {"transformer-engine": "2.9.0"}},
        "transformer-engine-torch, which is not installed: install transformer-engine-torch 2.9 or later, or set",
    ),
    "an older one": (
        {"backend": "transformer_engine"},
        {"versions": {"transformer-engine": "2.8.0"}},
        "transformer-engine, which is 2.8.0 here",
    ),
    "the wrong device": ({"device": "cpu"}, {}, "varlen runs on cuda, not on cpu"),
}


@pytest.mark.parametrize("case", SAYS)
def test_errors_of_the_first_forward_pass_are_known_before_it(case: str) -> None:
    import torch

    from roll_batching.modeling.requirements import Installed, ModelDemands
    from roll_batching.packing import attention_backend

    model, installed, says = SAYS[case]
    asked = FINE | model
    device = asked.pop("device")
    asked["dtype"] = getattr(torch, asked["dtype"])
    if asked["backend"] is not None:
        asked["backend"] = attention_backend(asked["backend"], device)
    found = ModelDemands(**asked).refusals(device, Installed(**A100 | installed))
    assert len(found) == (says is not None)
    assert says is None or says in found[0]


def made_with_recomputed_norms(_: None) -> list[str]:
    from roll_batching.errors import LayoutError
    from roll_batching.strategy import MegatronInferStrategy, MegatronTrainStrategy
    from tests.support.models import worker_config

    norms = {"recompute_granularity": "selective", "recompute_modules": ["layernorm"]}
    messages = []
    for kind in (MegatronTrainStrategy, MegatronInferStrategy):
        with pytest.raises(LayoutError) as caught:
            kind(worker_config("packed", 64, megatron=norms)).initialize()
        messages.append(str(caught.value))
    return messages


def test_a_model_that_needs_transformer_engine_is_an_error_at_construction() -> None:
    messages = run_ranks(1, "tests.modeling.test_requirements:made_with_recomputed_norms")[0]
    assert all("install transformer-engine, or recompute core_attn" in message for message in messages)
