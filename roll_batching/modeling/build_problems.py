"""Reasons why a model cannot be built on a device with the installed libraries, known before it is built."""

from __future__ import annotations

import torch

from roll_batching.modeling.kernels import Kernels
from roll_batching.modeling.requirements import EXPERT_BIASES, recomputed_modules, refusals_here
from roll_batching.settings import ArchitectureConfig, MegatronConfig


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
    problems = refusals_here(
        device=device,
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
    if architecture.add_bias_linear and architecture.moe is not None and tp_size > 1:
        problems.append(EXPERT_BIASES)
    engine_layers = kernels.layers == "transformer_engine"
    if architecture.sandwich_norms and engine_layers:
        problems.append("sandwich norms are built around Megatron's local layers: set transformer_impl: local")
    if architecture.gated_delta_net is not None and not kernels.attention.rotates:
        problems.append(
            "gated delta nets are tested beside attention that rotates only: choose an attention_backend that does "
            "(dense, varlen or flash_attn)"
        )
    if architecture.hybrid is not None and (engine_layers or not kernels.attention.rotates):
        problems.append(
            "layers with one part each (architecture.hybrid) are tested beside Megatron's local layers and attention "
            "that can rotate itself only: set transformer_impl: local, and choose attention_backend dense, varlen or "
            "flash_attn"
        )
    if architecture.mtp_num_layers:
        from roll_batching.settings.model_parts import problems_of_heads  # few models have heads

        problems += problems_of_heads(
            architecture,
            engine_layers=engine_layers,
            rotates=kernels.attention.rotates,
            stages=strategy.pipeline_model_parallel_size,
        )
    if architecture.vision is not None:
        from roll_batching.settings.model_parts import vision_problems  # few models take images

        problems += vision_problems(
            engine_layers=engine_layers, rotates=kernels.attention.rotates, value_head=value_head, fp8=strategy.fp8
        )
    if strategy.fp8 is not None:
        from roll_batching.modeling.fp8_requirements import fp8_build_problems  # few models train in FP8

        problems += fp8_build_problems(architecture, strategy, device, dtype)
    problems += _indivisible(architecture, tp_size, cp_size)
    return problems


def _indivisible(architecture: ArchitectureConfig, tp_size: int, cp_size: int) -> list[str]:
    """Units of recurrent layers that tensor- and context-parallel ranks cannot divide."""
    delta, ranks = architecture.gated_delta_net, tp_size * cp_size
    if architecture.hybrid is not None:
        from roll_batching.settings.model_parts import mamba_misfit  # few models need it

        misfit = mamba_misfit(architecture.hybrid, tp_size, cp_size)
        return [] if misfit is None else [misfit]
    if delta is None or not delta.num_key_heads % ranks:
        return []
    return [
        f"{delta.num_key_heads} key heads of gated delta nets do not divide among TP x CP = {ranks} ranks: lower "
        "tensor_model_parallel_size or context_parallel_size"
    ]
