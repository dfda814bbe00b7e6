"""`config.json` of NVIDIA's hybrid models as it is published; of Nano-12B-v2, the sizes in Megatron-Bridge."""

from __future__ import annotations

from typing import Any

_SHARED: dict[str, Any] = {
    "architectures": ["NemotronHForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "chunk_size": 128,
    "conv_kernel": 4,
    "expand": 2,
    "head_dim": 128,
    "hidden_dropout": 0.0,
    "initializer_range": 0.02,
    "layer_norm_epsilon": 1e-05,
    "mamba_hidden_act": "silu",
    "mamba_proj_bias": False,
    "mlp_bias": False,
    "mlp_hidden_act": "relu2",
    "model_type": "nemotron_h",
    "n_groups": 8,
    "num_logits_to_keep": 1,
    "pad_token_id": 0,
    "rescale_prenorm_residual": True,
    "residual_in_fp32": False,
    "sliding_window": None,
    "ssm_state_size": 128,
    "tie_word_embeddings": False,
    "time_step_floor": 0.0001,
    "time_step_max": 0.1,
    "time_step_min": 0.001,
    "torch_dtype": "bfloat16",
    "use_bias": False,
    "use_cache": True,
    "use_conv_bias": True,
    "use_mamba_kernels": True,
    "vocab_size": 131072,
}
"""Fields of all models."""
_OF_EXPERTS: dict[str, Any] = _SHARED | {
    "eos_token_id": 2,
    "mamba_head_dim": 64,
    "mamba_ssm_cache_dtype": "float32",
    "max_position_embeddings": 262144,
    "n_group": 1,
    "n_shared_experts": 1,
    "norm_eps": 1e-05,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_key_value_heads": 2,
    "partial_rotary_factor": 1.0,
    "rope_theta": 10000,
    "topk_group": 1,
}
"""Fields of the models with experts."""

NEMOTRON: dict[str, dict[str, Any]] = {
    "NVIDIA-Nemotron-Nano-12B-v2": _SHARED
    | {
        "eos_token_id": 12,
        "hidden_size": 5120,
        "hybrid_override_pattern": "M-M-M-M*-M-M-M-M*-M-M-M-M*-M-M-M-M*-M-M-M-M*-M-M-M-M*-M-M-M-M-",
        "intermediate_size": 20480,
        "mamba_head_dim": 80,
        "mamba_num_heads": 128,
        "max_position_embeddings": 131072,
        "num_attention_heads": 40,
        "num_hidden_layers": 62,
        "num_key_value_heads": 8,
    },
    "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": _OF_EXPERTS
    | {
        "hidden_size": 2688,
        "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
        "intermediate_size": 1856,
        "mamba_num_heads": 64,
        "moe_intermediate_size": 1856,
        "moe_shared_expert_intermediate_size": 3712,
        "n_routed_experts": 128,
        "num_experts_per_tok": 6,
        "num_hidden_layers": 52,
        "routed_scaling_factor": 2.5,
    },
    "NVIDIA-Nemotron-3-Super-120B-A12B-BF16": _OF_EXPERTS
    | {
        "hidden_size": 4096,
        "hybrid_override_pattern": "MEMEMEM*" + "EMEMEMEM*" * 2 + "EMEMEMEMEM*" * 4 + "EMEMEMEM*EMEMEMEME",
        "intermediate_size": 2688,
        "mamba_num_heads": 128,
        "moe_intermediate_size": 2688,
        "moe_latent_size": 1024,
        "moe_shared_expert_intermediate_size": 5376,
        "moe_shared_expert_overlap": False,
        "mtp_hybrid_override_pattern": "*E",
        "n_routed_experts": 512,
        "num_experts_per_tok": 22,
        "num_hidden_layers": 88,
        "num_nextn_predict_layers": 1,
        "routed_scaling_factor": 5.0,
    },
}
