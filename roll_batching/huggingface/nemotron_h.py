"""The family Nemotron-H: layers with one part each, in the names of its publisher's files.

Sources: transformers' `nemotron_h` and the index files of NVIDIA-Nemotron-Nano-12B-v2 and NVIDIA-Nemotron-3.
"""

from __future__ import annotations

from typing import Any

from roll_batching.huggingface.family import Family
from roll_batching.huggingface.layer_rules import LATENT_EXPERTS, MAMBA, PLAIN_ATTENTION, PLAIN_MIXTURE, PLAIN_MLP
from roll_batching.huggingface.tensors import TensorRule

NEMOTRON_H = Family(
    model_type="nemotron_h",
    architecture="NemotronHForCausalLM",
    defaults={
        "vocab_size": 131072,
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 21504,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "initializer_range": 0.02,
    },
    always={
        "mlp_hidden_act": "relu2",
        "mamba_hidden_act": "silu",
        "use_conv_bias": True,
        "use_bias": False,
        "mamba_proj_bias": False,
        "residual_in_fp32": False,
        "hidden_dropout": 0.0,
        "n_shared_experts": 1,
        "output_router_logits": False,
        "sliding_window": None,
    },
    hybrid={
        "M": MAMBA,
        "*": PLAIN_ATTENTION,
        "-": PLAIN_MLP,
        "E": PLAIN_MIXTURE,
    },
    prefixes=(
        ("model.embed_tokens.", "backbone.embeddings."),
        ("model.norm.", "backbone.norm_f."),
        ("model.layers.", "backbone.layers."),
    ),
    untrained=("mtp.",),
)


def hybrid_layer(family: Family, architecture: Any, layer: int) -> list[TensorRule]:
    """The rules of a layer of an `ArchitectureConfig` with `hybrid`."""
    kind = architecture.hybrid.pattern[layer]
    rules = family.hybrid[kind]
    if kind == "E" and architecture.hybrid.moe_latent_size is not None:
        rules = (*rules, *LATENT_EXPERTS)
    experts = range(architecture.moe.num_experts) if kind == "E" else range(1)
    return [rule.at(layer, expert) for rule in rules for expert in (experts if "{expert}" in rule.ours else range(1))]
