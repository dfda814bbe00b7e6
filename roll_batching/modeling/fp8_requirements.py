"""Requirements of FP8 training, checked before a model is built or taken from the caller."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from roll_batching.settings import ArchitectureConfig, MegatronConfig
from roll_batching.settings.fp8 import NO_HISTORY, TOKEN_MULTIPLES, device_problems, layout_problems, model_problems


def fp8_build_problems(
    architecture: ArchitectureConfig, megatron: MegatronConfig, device: torch.device, dtype: torch.dtype
) -> list[str]:
    """Reasons why a model with the FP8 keys of `megatron` cannot be built on `device`."""
    key_problems = [*layout_problems(megatron), *model_problems(megatron, architecture)]
    problems = [f"strategy_config.{key} {problem}" for key, problem in key_problems]
    if dtype is not torch.bfloat16:
        name = str(dtype).removeprefix("torch.")
        problems.append(f"strategy_config.fp8 needs weights in bf16, not in {name}: set model_args.dtype to bf16")
    return [*problems, *_device_problems(device, megatron.fp8_recipe)]


def _device_problems(device: torch.device, recipe: str | None) -> list[str]:
    if device.type != "cuda":
        return [f"fp8 computes on CUDA, not on {device.type}: leave it out"]
    if recipe not in TOKEN_MULTIPLES:
        return []
    return device_problems(recipe, torch.cuda.get_device_capability(device), torch.version.cuda)


def fp8_config_problems(config: Any, device: torch.device, engine_layers: bool) -> list[str]:
    """Reasons why a caller's model with `fp8` or `fp4` in its TransformerConfig cannot be trained."""
    return list(_problems_of_config(config, device, engine_layers))


def _problems_of_config(config: Any, device: torch.device, engine_layers: bool) -> Iterator[str]:
    if getattr(config, "fp4", None):
        yield "fp4 is not supported for now: unset it"
    if not config.fp8:
        return
    recipe = getattr(config.fp8_recipe, "value", config.fp8_recipe)
    if recipe == "delayed":
        yield f"fp8_recipe={NO_HISTORY}"
    elif recipe not in TOKEN_MULTIPLES:
        yield f"fp8_recipe={recipe!r} is not supported: set {', '.join(TOKEN_MULTIPLES)}"
    if config.fp8_param:
        yield "fp8_param=True, weights in FP8, is not supported for now: set it to False"
    if config.fp8_dot_product_attention or config.fp8_multi_head_attention:
        yield (
            "attention over packs is not tested in FP8: set fp8_dot_product_attention and fp8_multi_head_attention to "
            "False"
        )
    if not engine_layers:
        yield (
            "fp8 has no effect on Megatron's local layers, which compute in the precision of the weights: build the "
            "model from TransformerEngine's layer spec (packed_layer_spec(layers_of='transformer_engine')), or unset it"
        )
    if not config.bf16:
        yield "fp8 needs weights in bf16: set bf16=True and params_dtype=torch.bfloat16"
    yield from _device_problems(device, recipe)
