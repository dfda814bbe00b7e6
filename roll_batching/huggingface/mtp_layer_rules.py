"""Names and shapes of multi-token prediction heads in model directories.

DeepSeek-V3 and GLM-4.5 number heads like further layers of the model; Qwen3-Next and Qwen3.5 name their one head `mtp`.
Sources: the index of safetensors files of these models, and vLLM's `deepseek_mtp.py` and `qwen3_next_mtp.py`. All of
them join the embedding and the hidden state in this order, as Megatron's `eh_proj` does.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from roll_batching.errors import ConfigError
from roll_batching.huggingface.family import Family
from roll_batching.huggingface.layer_rules import DENSE, EMBEDDING, HEAD
from roll_batching.huggingface.tensors import TensorRule

_NUMBERED = {
    "enorm": "enorm.weight",
    "hnorm": "hnorm.weight",
    "eh_proj": "eh_proj.weight",
    "final_layernorm": "shared_head.norm.weight",
}
_NAMED = {
    "enorm": "mtp.pre_fc_norm_embedding.weight",
    "hnorm": "mtp.pre_fc_norm_hidden.weight",
    "eh_proj": "mtp.fc.weight",
    "final_layernorm": "mtp.norm.weight",
}
_COPIES = {"embed_tokens.weight": EMBEDDING, "shared_head.head.weight": HEAD}
"""Tensors of a numbered head that repeat the model's embedding and output layer."""


def count_mtp_heads(family: Family, config: Mapping[str, Any]) -> int:
    """Number of heads by a directory's `config.json`; 0 for families whose heads are not supported."""
    if family.sigmoid_routing and not family.hybrid:
        count = config.get("num_nextn_predict_layers") or config.get("num_mtp_layers")
        return count if isinstance(count, int) else 0
    if family.delta_net:
        text = config.get("text_config")
        fields = text if isinstance(text, Mapping) else config
        return 1 if fields.get("mtp_num_hidden_layers", 1) else 0  # Qwen3-Next has no such field, and one head
    return 0


def mtp_heads_problem(family: Family, config: Mapping[str, Any], wanted: int) -> str | None:
    """Problem of a directory whose `config.json` counts fewer than `wanted` heads; None if it counts enough."""
    there = count_mtp_heads(family, config)
    if there >= wanted:
        return None
    return f"is {wanted}, and the model directory has {there} heads of multi-token prediction; lower it to that"


def mtp_layer_rules(family: Family, architecture: Any, attention: Sequence[TensorRule]) -> list[TensorRule]:
    """Rules of all heads, with the rules `attention` of a layer. Raises `ConfigError` for families without heads."""
    if not (family.sigmoid_routing or family.delta_net) or family.hybrid:
        raise ConfigError(
            f"{family.architecture} has no heads of multi-token prediction here: leave mtp_num_layers out"
        )
    rules: list[TensorRule] = []
    for number in range(architecture.mtp_num_layers):
        layer, ours = architecture.num_layers + number, f"mtp.layers.{number}"
        theirs = f"model.layers.{layer}" if family.sigmoid_routing else ours
        for name, stored in (_NUMBERED if family.sigmoid_routing else _NAMED).items():
            stored = f"{theirs}.{stored}" if family.sigmoid_routing else stored
            joins = name == "eh_proj"
            shape = ("hidden", "hidden_pair") if joins else ("hidden",)
            rules.append(TensorRule(f"{ours}.{name}.weight", "rows" if joins else "copy", ((stored, shape),)))
        for rule in (*attention, *(DENSE if architecture.moe is None else family.mixture)):
            experts: Sequence[int | None] = range(architecture.moe.num_experts) if "{expert}" in rule.ours else [None]
            for expert in experts:
                placed = rule.at(layer, expert).renamed([(f"model.layers.{layer}.", f"{theirs}.")])
                name = placed.ours.replace(f"decoder.layers.{layer}.", f"{ours}.transformer_layer.")
                rules.append(dataclasses.replace(placed, ours=name, fused=None))
    return rules


def copies_in_heads(family: Family, architecture: Any, names: Iterable[str]) -> dict[str, str]:
    """Copies of the model's tensors in trained heads, among `names`: the copied tensor by the copy's name."""
    if not architecture.mtp_num_layers or not family.sigmoid_routing:
        return {}
    layers = range(architecture.num_layers, architecture.num_layers + architecture.mtp_num_layers)
    of = {f"model.layers.{n}.{name}": rule.theirs[0][0] for n in layers for name, rule in _COPIES.items()}
    return {name: of[name] for name in names if name in of}
