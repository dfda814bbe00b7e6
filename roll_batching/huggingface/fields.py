"""Fields of `config.json`: those of all families, those of parts of a model, and those without effect."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

RENAMED: Mapping[str, str] = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_attention_heads",
    "num_key_value_heads": "num_query_groups",
    "head_dim": "kv_channels",
    "intermediate_size": "ffn_hidden_size",
    "max_position_embeddings": "max_position_embeddings",
    "rms_norm_eps": "norm_epsilon",
    "tie_word_embeddings": "tie_word_embeddings",
    "initializer_range": "init_std",
}
"""Fields of every family, and their names in `model_args.architecture`."""
OPTIONAL = ("num_key_value_heads", "head_dim")
"""Fields of `RENAMED` that may be null: num_attention_heads and hidden_size / num_attention_heads then apply."""

ROPE = ("rope_theta", "rope_scaling", "rope_parameters")
LOCAL_ROPE = ("rope_local_base_freq", "sliding_window_pattern", "_sliding_window_pattern")
"""Fields of families whose layers with a window have RoPE of their own. The patterns say which layers these are where
`layer_types` is absent."""
SLIDING = ("sliding_window", "use_sliding_window", "max_window_layers", "layer_types")
DELTA_NET_FIELDS: Mapping[str, str] = {
    "linear_num_key_heads": "num_key_heads",
    "linear_num_value_heads": "num_value_heads",
    "linear_key_head_dim": "key_head_dim",
    "linear_value_head_dim": "value_head_dim",
    "linear_conv_kernel_dim": "conv_kernel_dim",
}
"""Fields of gated delta nets, and their names in `architecture.gated_delta_net`."""
LAYER_KINDS = ("layer_types", "full_attention_interval", "use_sliding_window", "sliding_window", "max_window_layers")
"""Fields that say which layers are gated delta nets, and fields of windows, which such families do not have."""
EXPERTS = (
    "num_local_experts",
    "num_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "norm_topk_prob",
    "decoder_sparse_step",
    "mlp_only_layers",
    "router_aux_loss_coef",
    "output_router_logits",
    "shared_expert_intermediate_size",
)
SIGMOID_EXPERTS = (
    "n_routed_experts",
    "num_local_experts",
    "n_shared_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "norm_topk_prob",
    "routed_scaling_factor",
    "n_group",
    "topk_group",
    "first_k_dense_replace",
    "mlp_layer_types",
    "num_nextn_predict_layers",
    "num_mtp_layers",
    "router_aux_loss_coef",
    "output_router_logits",
    "seq_aux",  # with aux_loss_alpha: the publisher's own training
    "aux_loss_alpha",
    "ep_size",
)
"""Fields of families whose router is DeepSeek-V3's."""
LATENT_ATTENTION = (
    "q_lora_rank",
    "kv_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "qk_head_dim",
    "v_head_dim",
    "rope_interleave",
)
"""Fields of families with multi-latent attention."""

ALWAYS: Mapping[str, Any] = {
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "pretraining_tp": 1,
    "attention_dropout": 0.0,
    "router_jitter_noise": 0.0,
    "is_encoder_decoder": False,
    "is_decoder": False,
    "add_cross_attention": False,
    "use_mrope": False,
    "partial_rotary_factor": 1.0,
    "quantization_config": None,
    "chunk_size_feed_forward": 0,
    "pruned_heads": {},
    "output_attentions": False,
    "output_hidden_states": False,
}
"""Fields with the only value that is supported; any other value is an error."""

NEXT_TOKENS = ("mtp_num_hidden_layers", "mtp_use_dedicated_embeddings")
"""Fields of Qwen3.5's layers of multi-token prediction, which are not trained."""
IMAGE_AXES = ("mrope_section", "mrope_interleaved")
"""Fields of RoPE for the axes of images; positions of texts are equal on all axes."""
BESIDE_TEXT = frozenset(
    {
        "text_config",
        "vision_config",
        "tie_word_embeddings",  # that of the text model
        "initializer_range",
        "image_token_id",
        "video_token_id",
        "vision_start_token_id",
        "vision_end_token_id",
        "image_token_index",
        "boi_token_index",
        "eoi_token_index",
        "mm_tokens_per_image",
        "language_model_only",
    }
)
"""Fields of directories with a vision encoder that do not belong to the text model."""
TOKENS = ("eos_token_id", "bos_token_id", "pad_token_id")
WITHOUT_EFFECT = frozenset(
    {
        "_name_or_path",
        "_attn_implementation",
        "_attn_implementation_autoset",
        "attn_implementation",
        "auto_map",
        "architectures",  # checked against Family.architecture
        "model_type",
        "dtype",  # precision of the files, see `stored_dtype`
        "torch_dtype",
        "transformers_version",
        "use_cache",
        "return_dict",
        "torchscript",
        "id2label",
        "label2id",
        "problem_type",
        "finetuning_task",
        "task_specific_params",
        "tokenizer_class",
        "prefix",
        "experts_per_token",  # gpt-oss: num_experts_per_tok again
        "initial_context_length",  # gpt-oss: of rope_scaling again
        "cache_implementation",  # of generation in transformers
        *TOKENS,
    }
)
"""Fields that do not change what the model computes."""
