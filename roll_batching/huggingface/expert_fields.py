"""Translates the fields of mixtures of experts in a `config.json`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from roll_batching.huggingface.families import Family
from roll_batching.huggingface.translation import Translation


def translate_experts(values: Mapping[str, Any], family: Family, result: Translation) -> None:
    """Translates the experts of Mixtral, Qwen3-MoE and others whose router is a softmax."""
    moe: dict[str, Any] = dict(family.router)
    names = {"num_local_experts": "num_experts", "num_experts_per_tok": "router_topk"}
    if family.experts_share_ffn:
        names["intermediate_size"] = "ffn_hidden_size"
    else:
        names["moe_intermediate_size"] = "ffn_hidden_size"
    values = {"num_local_experts": values.get("num_experts"), **values}
    for name, ours in names.items():
        if values.get(name) is None:
            result.problems.append(f"{name} is missing")
        else:
            moe[ours] = values[name]
    if values.get("output_router_logits"):
        result.problems.append(
            "output_router_logits: true is not supported: set it to false, and moe.aux_loss_coeff in the architecture "
            "for a load-balancing loss"
        )
    moe["router_pre_softmax"] = not (family.normalised_experts or values["norm_topk_prob"])
    if moe.get("router_topk") == 1 and not moe["router_pre_softmax"]:
        result.problems.append(
            "num_experts_per_tok: 1 with norm_topk_prob gives every token the weight 1: the router would not be trained"
        )
    layers = values.get("num_hidden_layers")
    if not family.experts_share_ffn and isinstance(layers, int):
        dense, step = set(values["mlp_only_layers"] or ()), values["decoder_sparse_step"]
        pattern = [int(layer not in dense and (layer + 1) % step == 0) for layer in range(layers)]
        if not any(pattern):
            result.problems.append("mlp_only_layers and decoder_sparse_step leave no mixture-of-experts layer")
        if not all(pattern):
            moe["layer_freq"] = pattern
    if family.shared_expert:
        width = values.get("shared_expert_intermediate_size")
        if width is None:
            result.problems.append("shared_expert_intermediate_size is missing")
        moe |= {"shared_expert_ffn_hidden_size": width, "shared_expert_gate": True}
    elif values.get("shared_expert_intermediate_size"):
        result.problems.append(f"shared_expert_intermediate_size has no effect with model_type {family.model_type}")
    result.architecture["moe"] = moe


def translate_sigmoid_experts(values: Mapping[str, Any], result: Translation) -> None:
    """Translates the experts of DeepSeek-V3, GLM-4.5 and others with its router."""
    values = {"num_local_experts": values.get("n_routed_experts"), **values}
    moe: dict[str, Any] = {
        "router_score_function": "sigmoid",
        "router_expert_bias": True,
        "router_dtype": "fp32",
        "router_scaling_factor": values["routed_scaling_factor"],
    }
    names = {"num_local_experts": "num_experts", "num_experts_per_tok": "router_topk"}
    for name, ours in (names | {"moe_intermediate_size": "ffn_hidden_size"}).items():
        if values.get(name) is None:
            result.problems.append(f"{'n_routed_experts' if name == 'num_local_experts' else name} is missing")
        else:
            moe[ours] = values[name]
    if values["norm_topk_prob"] is not True or values.get("num_experts_per_tok") == 1:
        result.problems.append(
            "norm_topk_prob: false, or num_experts_per_tok: 1, is not supported: Megatron-Core makes the weights of "
            "several experts sum to one, and not the weight of one"
        )
    shared, width = values["n_shared_experts"], values.get("moe_intermediate_size")
    if isinstance(shared, int) and isinstance(width, int):
        if shared < 1:
            result.problems.append(f"n_shared_experts: {shared!r} is not supported, it must be at least 1")
        moe["shared_expert_ffn_hidden_size"] = shared * width
    for name in ("num_nextn_predict_layers", "num_mtp_layers"):
        if not isinstance(values.get(name) or 0, int):
            result.problems.append(f"{name}: {values[name]!r} is not supported, it must be a number")
    if values.get("output_router_logits"):
        result.problems.append("output_router_logits: true is not supported: set it to false")
    translate_groups(values, moe, result)
    dense, layers = values["first_k_dense_replace"], values.get("num_hidden_layers")
    if (kinds := values.get("mlp_layer_types")) is not None:  # precedes first_k_dense_replace, as in transformers
        if not isinstance(kinds, list) or set(kinds) - {"dense", "sparse"} or len(kinds) != layers:
            result.problems.append(f"mlp_layer_types must name dense or sparse for each of {layers} layers")
        elif "sparse" not in kinds:
            result.problems.append("mlp_layer_types leaves no mixture-of-experts layer")
        else:
            moe["layer_freq"] = [int(kind == "sparse") for kind in kinds]
    elif isinstance(dense, int) and isinstance(layers, int):
        if dense >= layers:
            result.problems.append(f"first_k_dense_replace: {dense} leaves no mixture-of-experts layer")
        elif dense > 0:
            moe["layer_freq"] = [int(layer >= dense) for layer in range(layers)]
    result.architecture["moe"] = moe


def translate_groups(values: Mapping[str, Any], moe: dict[str, Any], result: Translation) -> None:
    """Translates the choice of groups of experts, which has no effect where all groups are chosen."""
    groups, chosen, topk = values["n_group"], values["topk_group"], values.get("num_experts_per_tok")
    if groups == chosen or not all(isinstance(one, int) for one in (groups, chosen, topk)):
        return
    # transformers ranks groups by their two best experts, Megatron by their best topk / chosen.
    if chosen < 1 or topk != 2 * chosen:
        result.problems.append(
            f"topk_group: {chosen!r} is not supported with num_experts_per_tok: {topk!r}: Megatron-Core ranks groups "
            "by their best num_experts_per_tok / topk_group experts, and the model by their best two"
        )
    moe |= {"router_num_groups": groups, "router_group_topk": chosen}
