"""Megatron's TransformerConfig from validated settings."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import torch.nn.functional as F

from roll_batching.distributed.parallel_layout import ParallelLayout
from roll_batching.modeling.kernels import Kernels, engine_attention
from roll_batching.settings import ArchitectureConfig, MegatronConfig, MoEConfig


def transformer_config(
    architecture: ArchitectureConfig,
    strategy: MegatronConfig,
    layout: ParallelLayout,
    dtype: torch.dtype,
    *,
    kernels: Kernels,
    initialize: bool = True,
) -> Any:
    """Megatron's TransformerConfig for this architecture and layout.

    Packing depends on options that are set here: unbatched p2p (batched pairs mis-match at PP=2 with VPP), no
    deallocation of sent outputs (it corrupts gradients before 0.18), no shape exchange, the all-to-all MoE
    dispatcher (the all-gather one needs equal lengths on all ranks), no dropout.
    """
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

    full_recompute = strategy.recompute_granularity == "full"
    options: dict[str, Any] = {
        **_layer_options(architecture),
        "tensor_model_parallel_size": layout.tp_size,
        "pipeline_model_parallel_size": layout.pp_size,
        "virtual_pipeline_model_parallel_size": layout.vpp_size if layout.vpp_size > 1 else None,
        "context_parallel_size": layout.cp_size,
        "expert_model_parallel_size": layout.ep_size,
        "sequence_parallel": layout.sequence_parallel,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype is torch.bfloat16,
        "fp16": dtype is torch.float16,
        "perform_initialization": initialize,
        "use_cpu_initialization": layout.device.type == "cpu",
        "variable_seq_lengths": layout.pp_size > 1,
        "batch_p2p_comm": False,
        "batch_p2p_sync": False,
        "overlap_p2p_comm": False,
        "deallocate_pipeline_outputs": False,
        "moe_token_dispatcher_type": "alltoall",
        "transformer_impl": kernels.layers,
        "attention_backend": engine_attention(),
        **kernels.options,
        "cuda_graph_scope": [],
        "calculate_per_token_loss": strategy.calculate_per_token_loss,
        "recompute_granularity": strategy.recompute_granularity,
        "recompute_method": strategy.recompute_method or ("uniform" if full_recompute else None),
        "recompute_num_layers": strategy.recompute_num_layers or (1 if full_recompute else None),
    }
    options |= _optional_parts(architecture, strategy, layout, kernels)
    kind = TransformerConfig
    if architecture.multi_latent_attention is not None:
        from roll_batching.modeling.latent_attention import latent_options

        kind, options = MLATransformerConfig, options | latent_options(architecture)
    if architecture.hybrid is not None:
        from roll_batching.modeling.hybrid import HybridTransformerConfig, hybrid_options

        kind, options = HybridTransformerConfig, options | hybrid_options(architecture)
    supported = {field.name for field in dataclasses.fields(kind)}
    # cuda_graph_scope and transformer_impl are missing in some supported versions; everything else is in all of them.
    return kind(**{name: value for name, value in options.items() if name in supported})


def _layer_options(architecture: ArchitectureConfig) -> dict[str, Any]:
    """Options of every model's layers."""
    return {
        "num_layers": architecture.num_layers,
        "hidden_size": architecture.hidden_size,
        "ffn_hidden_size": architecture.ffn_width,
        "num_attention_heads": architecture.num_attention_heads,
        "num_query_groups": architecture.kv_heads,
        "kv_channels": architecture.head_dim,
        "qk_layernorm": bool(architecture.qk_layernorm),
        "add_qkv_bias": architecture.add_qkv_bias,
        "init_method_std": architecture.init_std,
        "layernorm_epsilon": architecture.norm_epsilon,
        "normalization": "RMSNorm",
        "gated_linear_unit": True,
        "layernorm_zero_centered_gamma": architecture.zero_centered_norms,
        "activation_func": _activation(architecture),
        "activation_func_clamp_value": architecture.swiglu_limit,
        "glu_linear_offset": 0.0 if architecture.swiglu_limit is None else 1.0,
        "softmax_type": "learnable" if architecture.attention_sinks else "vanilla",
        "add_bias_linear": architecture.add_bias_linear,
        "hidden_dropout": architecture.hidden_dropout,
        "attention_dropout": 0.0,
        "attention_output_gate": architecture.attention_output_gate,
        "softmax_scale": architecture.query_pre_attn_scalar and architecture.query_pre_attn_scalar**-0.5,
    }


def _optional_parts(
    architecture: ArchitectureConfig, strategy: MegatronConfig, layout: ParallelLayout, kernels: Kernels
) -> dict[str, Any]:
    """Options of parts that some models or trainings have."""
    options: dict[str, Any] = {}
    if architecture.mtp_num_layers:
        options["mtp_num_layers"] = architecture.mtp_num_layers
        options["mtp_loss_scaling_factor"] = strategy.mtp_loss_scaling_factor
    if strategy.fp8 is not None:
        options |= {
            "fp8": strategy.fp8,
            "fp8_recipe": strategy.fp8_recipe,
            "first_last_layers_bf16": strategy.first_last_layers_bf16,
            "num_layers_at_start_in_bf16": strategy.num_layers_at_start_in_bf16,
            "num_layers_at_end_in_bf16": strategy.num_layers_at_end_in_bf16,
        }
    if strategy.has_uneven_stages:
        options |= _uneven_stages(strategy, layout, architecture.mtp_num_layers or 0)
    if architecture.sliding_window is not None and getattr(kernels.attention, "windows", False):
        options["window_size"] = (architecture.sliding_window - 1, 0)  # Megatron counts the tokens to the left
        if architecture.window_layers is not None:
            options["window_attn_skip_freq"] = list(architecture.window_layers)
    if strategy.recompute_modules:
        options["recompute_modules"] = list(strategy.recompute_modules)
    if architecture.moe is not None:
        options |= _expert_options(architecture.moe, architecture.ffn_width, strategy)
    if architecture.gated_delta_net is not None:
        delta = architecture.gated_delta_net
        # Not as Megatron's `experimental_attention_variant`, which refuses context parallelism.
        options["linear_attention_freq"] = list(delta.layers)
        options |= {
            "linear_num_key_heads": delta.num_key_heads,
            "linear_num_value_heads": delta.num_value_heads,
            "linear_key_head_dim": delta.key_head_dim,
            "linear_value_head_dim": delta.value_head_dim,
            "linear_conv_kernel_dim": delta.conv_kernel_dim,
        }
    return options


def _expert_options(moe: MoEConfig, ffn_width: int, strategy: MegatronConfig) -> dict[str, Any]:
    """Options of mixtures of experts."""
    return {
        "num_moe_experts": moe.num_experts,
        "moe_router_topk": moe.router_topk,
        "moe_ffn_hidden_size": moe.ffn_hidden_size or ffn_width,
        "moe_shared_expert_intermediate_size": moe.shared_expert_ffn_hidden_size,
        "moe_shared_expert_gate": moe.shared_expert_gate,
        "moe_layer_freq": moe.layer_freq if isinstance(moe.layer_freq, int) else list(moe.layer_freq),
        "moe_router_pre_softmax": moe.router_pre_softmax,
        "moe_router_score_function": moe.router_score_function,
        "moe_router_enable_expert_bias": moe.router_expert_bias,
        "moe_router_bias_update_rate": moe.router_bias_update_rate
        if strategy.moe_router_bias_update_rate is None
        else strategy.moe_router_bias_update_rate,
        "moe_router_num_groups": moe.router_num_groups,
        "moe_router_group_topk": moe.router_group_topk,
        "moe_router_topk_scaling_factor": None if moe.router_scaling_factor == 1 else moe.router_scaling_factor,
        "moe_router_dtype": strategy.moe_router_dtype or moe.router_dtype,
        "moe_aux_loss_coeff": moe.aux_loss_coeff,
        "moe_z_loss_coeff": moe.z_loss_coeff or None,
        "moe_router_load_balancing_type": "aux_loss" if moe.aux_loss_coeff else "none",
    }


def _activation(architecture: ArchitectureConfig) -> Any:
    """The activation of the gate of feed-forward layers."""
    if architecture.swiglu_limit is not None:
        from megatron.core.fusions.fused_bias_geglu import quick_gelu

        return quick_gelu
    if architecture.activation == "gelu_tanh":
        from roll_batching.modeling.layer_modules import gelu_tanh

        return gelu_tanh
    return F.silu


def _uneven_stages(strategy: MegatronConfig, layout: ParallelLayout, heads: int) -> dict[str, Any]:
    options: dict[str, Any] = {
        "num_layers_in_first_pipeline_stage": strategy.num_layers_in_first_pipeline_stage,
        "num_layers_in_last_pipeline_stage": strategy.num_layers_in_last_pipeline_stage,
        "account_for_embedding_in_pipeline_split": strategy.account_for_embedding_in_pipeline_split,
        "account_for_loss_in_pipeline_split": strategy.account_for_loss_in_pipeline_split,
    }
    if strategy.pipeline_model_parallel_layout is not None:
        from roll_batching.modeling.layer_layout import RankLayerLayout  # few models have one

        options["pipeline_model_parallel_layout"] = RankLayerLayout(
            strategy.pipeline_model_parallel_layout, layout, heads
        )
    return options
