"""Models whose layers adapters are not tested with."""

from __future__ import annotations

from typing import Any


def adapter_problems(model: Any, architecture: Any, layers: str, layout: Any) -> list[str]:
    """What adapters are not tested with; empty without any.

    Args:
        model: the `ModelArgs`, with `lora_target`.
        architecture: the model's `ArchitectureConfig`.
        layers: Megatron's layers, local or transformer_engine.
        layout: the `MegatronConfig`, whose `moe_router_bias_update_rate` goes before the architecture's.
    """
    if model.adapter_name_or_path is not None and model.model_name_or_path is None:
        return ["adapter_name_or_path needs the model directory that its adapters belong to (model_name_or_path)"]
    bias_rate, tp_size = layout.moe_router_bias_update_rate, layout.tensor_model_parallel_size
    if bias_rate is None:
        bias_rate = 0 if architecture.moe is None else architecture.moe.router_bias_update_rate
    problems = {
        "the layers of transformer_impl: transformer_engine": layers == "transformer_engine",
        "the value head of a critic": model.value_head,
        "multi-latent attention": architecture.multi_latent_attention is not None,
        "layers of one part each (hybrid)": architecture.hybrid is not None,
        "heads of multi-token prediction (mtp_num_layers)": bool(architecture.mtp_num_layers),
        "a vision encoder": architecture.vision is not None,
        "gated delta nets": architecture.gated_delta_net is not None,
        "gated attention (attention_output_gate)": architecture.attention_output_gate,
        f"TP = {tp_size}, above the {architecture.kv_heads} key-value heads (num_query_groups)": (
            architecture.kv_heads < tp_size
        ),
        "biases of all linear layers (add_bias_linear)": architecture.add_bias_linear,
        "expert biases that training moves (moe_router_bias_update_rate)": architecture.moe is not None
        and bias_rate > 0,
    }
    return [f"adapters (lora_target) are not supported with {name} for now" for name, on in problems.items() if on]
