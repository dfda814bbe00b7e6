"""Options of a layout that have no effect with its other options, or with the model. Needs no torch.

Configurations of jobs and strategies in Python refuse the same ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from roll_batching.settings import fp8
from roll_batching.settings.megatron_config import OPTIMIZER_DTYPES, MegatronConfig


def idle_options(layout: MegatronConfig) -> Iterator[tuple[str, str]]:
    """(key, problem) of options that need another option of `layout`. For FP8 see `settings.fp8.idle_options`."""
    for key, needed in (
        ("recompute_method", "full"),
        ("recompute_num_layers", "full"),
        ("recompute_modules", "selective"),
    ):
        if getattr(layout, key) is not None and layout.recompute_granularity != needed:
            yield key, f"is read only with recompute_granularity: {needed}; leave it out"
    if layout.overlap_param_gather and not (layout.use_distributed_optimizer and layout.overlap_grad_reduce):
        yield "overlap_param_gather", "needs use_distributed_optimizer: true and overlap_grad_reduce: true"
    if layout.use_precision_aware_optimizer and not layout.use_distributed_optimizer:
        yield "use_precision_aware_optimizer", "needs use_distributed_optimizer: true"
    for key in OPTIMIZER_DTYPES:
        if (dtype := getattr(layout, key)) != "fp32" and not layout.use_precision_aware_optimizer:
            text = f"is {dtype}; other precisions than fp32 need the optimizer of use_precision_aware_optimizer: true"
            yield key, f"{text}; set that, or leave this out"
    if layout.main_grads_dtype != "fp32" and layout.grad_reduce_in_fp32:
        text = f"is true, but main_grads_dtype is {layout.main_grads_dtype}: gradients are summed in one precision"
        yield "grad_reduce_in_fp32", f"{text}; leave it out, or set main_grads_dtype: fp32"
    if layout.microbatch_group_size_per_vp_stage is not None and layout.vpp_size == 1:
        text = "is read only with virtual_pipeline_model_parallel_size above 1; leave it out"
        yield "microbatch_group_size_per_vp_stage", text


def idle_options_of_model(layout: MegatronConfig, architecture: Any) -> Iterator[tuple[str, str]]:
    """(key, problem) of options for parts that the model, an `ArchitectureConfig`, lacks."""
    heads = layout.mtp_num_layers
    if not (architecture.mtp_num_layers if heads is None else heads):
        for key in ("mtp_loss_scaling_factor", "mtp_detach_heads"):
            if getattr(layout, key) != MegatronConfig.model_fields[key].default:
                yield key, "has no effect without heads: set mtp_num_layers, or leave it out"
    if layout.recurrent_context_parallel != "auto" and architecture.gated_delta_net is architecture.hybrid is None:
        text = "has no effect: the model has no gated delta nets or Mamba layers; leave it out"
        yield "recurrent_context_parallel", text
    for key in ("freeze_moe_router", "moe_router_bias_update_rate"):
        if not getattr(layout, key):
            continue
        if architecture.moe is None:
            yield key, "has no effect: the model has no mixture of experts; leave it out"
        elif key == "moe_router_bias_update_rate" and not architecture.moe.router_expert_bias:
            yield key, "has no effect: the model's routers have no expert biases; leave it out"
    if layout.recompute_granularity == "selective":
        missing = _missing_parts(architecture)
        for name in layout.recompute_modules or ():
            if name in missing:
                yield "recompute_modules", f"names {name}, and the model has no {missing[name]}; leave it out"


def _missing_parts(architecture: Any) -> dict[str, str]:
    """Parts that the model lacks, by their names in `recompute_modules`."""
    missing: dict[str, str] = {}
    if architecture.moe is None:
        missing |= dict.fromkeys(("moe", "moe_act", "shared_experts"), "mixture of experts")
    elif not architecture.moe.shared_expert_ffn_hidden_size:
        missing["shared_experts"] = "shared expert"
    if architecture.multi_latent_attention is None:
        missing["mla_up_proj"] = "multi-latent attention"
    return missing


def idle_options_of_role(role: Any) -> list[str]:
    """Problems of the options of a `RoleSettings` that trains, as texts.

    A critic is given its policy's options, whose heads and routers it may lack.
    """
    layout, model = role.strategy_args.strategy_config, role.model_args
    problems = [*idle_options(layout), *fp8.idle_options(layout)]
    if model.architecture is not None and not model.value_head:
        problems += idle_options_of_model(layout, model.architecture)
    return [f"strategy_config.{key} {text}" for key, text in problems]
