"""Reasons why a model cannot be built on a device with the installed libraries, known before it is built.

Reasons that concern FP8 are also checked for a model that the caller has built.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from roll_batching.modeling.kernels import Kernels
from roll_batching.modeling.requirements import ModelDemands, recomputed_modules
from roll_batching.settings import ArchitectureConfig, MegatronConfig
from roll_batching.settings.fp8 import NO_HISTORY, TOKEN_MULTIPLES, device_problems, fp8_problems
from roll_batching.settings.model import ModelArgs
from roll_batching.settings.support import ROLE_REFUSALS, Parts, refused_pairs


def build_problems(
    architecture: ArchitectureConfig,
    strategy: MegatronConfig,
    kernels: Kernels,
    *,
    device: torch.device,
    dtype: torch.dtype,
    tp_size: int,
    cp_size: int,
    value_head: bool,
) -> list[str]:
    """Messages with their remedies; empty if the model can be built. Needs no process group."""
    demands = ModelDemands(
        dtype=dtype,
        head_dim=architecture.head_dim,
        backend=kernels.attention,
        engine_layers=kernels.layers == "transformer_engine",
        recomputed=recomputed_modules(strategy),
        latent_attention=architecture.multi_latent_attention is not None,
        attention_sinks=architecture.attention_sinks,
        value_dim=architecture.value_dim,
        has_window=architecture.sliding_window is not None,
    )
    problems = demands.refusals_here(device)
    parts = Parts(
        ModelArgs(value_head=value_head), architecture, strategy, kernels.layers, rotates=kernels.attention.rotates
    )
    problems += [refusal.error(parts) for refusal in refused_pairs(ROLE_REFUSALS, parts)]
    if architecture.vision is not None:
        from roll_batching.settings.contradictions import encoder_problem  # few models take images

        problems += [problem] if (problem := encoder_problem()) is not None else []
    if strategy.fp8 is not None:
        problems += fp8_build_problems(architecture, strategy, device, dtype)
    if architecture.gated_delta_net is not None or architecture.hybrid is not None:
        from roll_batching.settings.contradictions import recurrent_misfit  # few models need it

        divide = strategy.recurrent_context_parallel
        misfit = recurrent_misfit(architecture, tp_size=tp_size, cp_size=cp_size, divide=divide)
        problems += [] if misfit is None else [misfit[1]]
    return problems


# ---- FP8


def fp8_build_problems(
    architecture: ArchitectureConfig, megatron: MegatronConfig, device: torch.device, dtype: torch.dtype
) -> list[str]:
    """Reasons why a model with the FP8 keys of `megatron` cannot be built on `device`."""
    problems = [f"strategy_config.{key} {problem}" for key, problem in fp8_problems(megatron, architecture)]
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
