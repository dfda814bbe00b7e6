"""config.json of published models with a vision encoder beside the text model; values that say what is computed."""

from __future__ import annotations

from typing import Any


def _qwen3_5(kind: str, layers: int, **sizes: int) -> dict[str, Any]:
    """A directory of Qwen3.5, which holds a vision encoder, too; `kind` is "" or "Moe"."""
    beside = "_moe" if kind else ""
    text = {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "attn_output_gate": True,
        "dtype": "bfloat16",
        "eos_token_id": 248044,
        "full_attention_interval": 4,
        "head_dim": 256,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * (layers // 4),
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_value_head_dim": 128,
        "mamba_ssm_dtype": "float32",
        "max_position_embeddings": 262144,
        "model_type": f"qwen3_5{beside}_text",
        "mtp_num_hidden_layers": 1,
        "mtp_use_dedicated_embeddings": False,
        "num_hidden_layers": layers,
        "rms_norm_eps": 1e-06,
        "rope_parameters": {
            "mrope_interleaved": True,
            "mrope_section": [11, 11, 10],
            "partial_rotary_factor": 0.25,
            "rope_theta": 10000000,
            "rope_type": "default",
        },
        "use_cache": True,
        "vocab_size": 248320,
        **sizes,
    }
    return {
        "architectures": [f"Qwen3_5{kind}ForConditionalGeneration"],
        "image_token_id": 248056,
        "model_type": f"qwen3_5{beside}",
        "text_config": text,
        "tie_word_embeddings": False,
        "video_token_id": 248057,
        "vision_config": {
            "model_type": f"qwen3_5{beside}",
            "out_hidden_size": sizes["hidden_size"],
            "deepstack_visual_indexes": [],
        },
        "vision_end_token_id": 248054,
        "vision_start_token_id": 248053,
    }


WITH_VISION = {
    "Qwen3.5-27B": _qwen3_5(
        "",
        64,
        hidden_size=5120,
        intermediate_size=17408,
        linear_num_value_heads=48,
        num_attention_heads=24,
        num_key_value_heads=4,
    ),
    "Qwen3.5-35B-A3B": _qwen3_5(
        "Moe",
        40,
        hidden_size=2048,
        linear_num_value_heads=32,
        moe_intermediate_size=512,
        num_attention_heads=16,
        num_experts=256,
        num_experts_per_tok=8,
        num_key_value_heads=2,
        shared_expert_intermediate_size=512,
    ),
    "gemma-3-27b-it": {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "boi_token_index": 255999,
        "eoi_token_index": 256000,
        "eos_token_id": [1, 106],
        "image_token_index": 262144,
        "initializer_range": 0.02,
        "mm_tokens_per_image": 256,
        "model_type": "gemma3",
        "text_config": {
            "head_dim": 128,
            "hidden_size": 5376,
            "intermediate_size": 21504,
            "model_type": "gemma3_text",
            "num_attention_heads": 32,
            "num_hidden_layers": 62,
            "num_key_value_heads": 16,
            "query_pre_attn_scalar": 168,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
            "sliding_window": 1024,
        },
        "torch_dtype": "bfloat16",
        "vision_config": {"model_type": "siglip_vision_model"},
    },
}
"""Directories with a vision encoder beside the text model that is trained."""
