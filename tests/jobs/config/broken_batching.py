"""Rules of log-probs, router replay and batching: what breaks each, the key that is blamed, the words that matter."""

from __future__ import annotations

from typing import Any

LAYOUT = "actor_train.strategy_args.strategy_config"
SAMPLING = "actor_infer.strategy_args.strategy_config"
ARCHITECTURE = "actor_train.model_args.architecture"
SHARED = {"actor_train.sequence_packing_args.share_prefixes": True}
DELTA = {"num_key_heads": 4, "num_value_heads": 4, "key_head_dim": 8, "value_head_dim": 8, "layers": (1, 0, 1, 0)}
DYNAMIC = {"actor_train.use_sequence_packing": False, "actor_train.use_dynamic_batching_in_train": True}

BROKEN_BATCHING: dict[str, tuple[dict[str, Any], dict[str, str]]] = {
    "log-probs of the sampler at another temperature": (
        {"actor_train.logprob_plan": "rollout", "actor_train.logprob_temperature": 0.5},
        {"actor_train.logprob_temperature": "logprob_plan: train"},
    ),
    "weights from log-probs at another temperature": (
        {"loss_args.engine_ratio_cap": 2.0, "actor_train.logprob_temperature": 0.5},
        {"actor_train.logprob_temperature": "sampling temperature"},
    ),
    "a correction inside the loss and one before it": (
        {"loss_args.engine_ratio_cap": 2.0, "train_infer_correction.is_weight": {}},
        {"loss_args.engine_ratio_cap": "keep one of the two"},
    ),
    "a correction without old log-probs": (
        {"actor_train.logprob_plan": "rollout", "train_infer_correction.is_weight": {}},
        {"actor_train.logprob_plan": "nothing to compare"},
    ),
    "a correction of groups without old log-probs": (
        {"drop_zero_advantage_groups": True, "train_infer_correction.is_weight": {}},
        {"drop_zero_advantage_groups": "without old log-probs"},
    ),
    "a filter without bounds": (
        {"train_infer_correction.filters": [{"agg_type": "sequence"}]},
        {"train_infer_correction.filters.0.agg_type": "has no bound"},
    ),
    "router replay with the experts of samplers": (
        {f"{ARCHITECTURE}.moe": {"num_experts": 4}, "actor_train.router_replay.mode": "R3"},
        {"actor_train.router_replay.mode": "use R2"},
    ),
    "router replay of a dense model": (
        {"actor_train.router_replay.mode": "R2"},
        {"actor_train.router_replay.mode": "no mixture of experts"},
    ),
    "router replay with the experts of samplers, of a dense model": (
        {"actor_train.router_replay.mode": "R3"},
        {"actor_train.router_replay.mode": "no mixture of experts"},
    ),
    "router replay without the pass that records": (
        {
            f"{ARCHITECTURE}.moe": {"num_experts": 4},
            "actor_train.router_replay.mode": "R2",
            "actor_train.logprob_plan": "rollout",
        },
        {"actor_train.router_replay.mode": "set logprob_plan to train or own"},
    ),
    "router replay with a context-parallel size per pack": (
        {
            f"{ARCHITECTURE}.moe": {"num_experts": 4},
            "actor_train.router_replay.mode": "R2",
            f"{LAYOUT}.context_parallel_size": "auto",
        },
        {"actor_train.router_replay.mode": "set context_parallel_size to a number"},
    ),
    "a way to divide recurrent layers that the model lacks": (
        {f"{LAYOUT}.recurrent_context_parallel": "heads", f"{LAYOUT}.context_parallel_size": 2},
        {f"{LAYOUT}.recurrent_context_parallel": "the model has no gated delta nets or Mamba layers"},
    ),
    "prediction heads in packs that must share prefixes": (
        {f"{LAYOUT}.mtp_num_layers": 1, **SHARED},
        {"actor_train.sequence_packing_args.share_prefixes": "heads of multi-token prediction"},
    ),
    "dropout in packs that must share prefixes": (
        {f"{ARCHITECTURE}.hidden_dropout": 0.1, "actor_train.logprob_plan": "own", **SHARED},
        {"actor_train.sequence_packing_args.share_prefixes": "random numbers of hidden_dropout"},
    ),
    "norms that would drop biases": (
        {f"{ARCHITECTURE}.sandwich_norms": True, f"{ARCHITECTURE}.add_bias_linear": True},
        {ARCHITECTURE: "sandwich_norms is not supported with add_bias_linear"},
    ),
    "fewer key-value heads with multi-latent attention": (
        {
            f"{ARCHITECTURE}.multi_latent_attention": {
                "kv_lora_rank": 16,
                "qk_head_dim": 16,
                "qk_pos_emb_head_dim": 8,
                "v_head_dim": 16,
            }
        },
        {ARCHITECTURE: "num_query_groups has no effect with multi_latent_attention"},
    ),
    "frozen modules with adapters": (
        {"actor_train.model_args.lora_target": "all-linear", "actor_train.model_args.freeze_module_prefix": "decoder"},
        {"actor_train.model_args": "freeze_module_prefix has no effect with lora_target"},
    ),
    "an unknown mode of router replay": (
        {"actor_train.router_replay.mode": "R4"},
        {"actor_train.router_replay.mode": "R4"},
    ),
    "packing with dynamic batching in train": (
        {"actor_train.use_dynamic_batching_in_train": True, "actor_train.max_tokens_per_microbatch_in_train": 64},
        {"actor_train.use_sequence_packing": "exclude each other"},
    ),
    "packing with dynamic batching in infer": (
        {"actor_train.use_dynamic_batching_in_infer": True, "actor_train.max_tokens_per_microbatch_in_infer": 64},
        {"actor_train.use_sequence_packing": "use_dynamic_batching_in_infer"},
    ),
    "packing with the short form": (
        {"actor_train.use_dynamic_batching": True},
        {"actor_train.use_sequence_packing": "use_dynamic_batching"},
    ),
    "short form against long form": (
        DYNAMIC | {"actor_train.use_dynamic_batching": False, "actor_train.max_tokens_per_microbatch_in_train": 64},
        {"actor_train.use_dynamic_batching_in_train": "keep one of the two"},
    ),
    "short form without caps": (
        {"actor_train.use_sequence_packing": False, "actor_train.use_dynamic_batching": True},
        {
            "actor_train.max_tokens_per_microbatch_in_train": "missing",
            "actor_train.max_tokens_per_microbatch_in_infer": "missing",
        },
    ),
    "packing without a cap": (
        {"actor_train.sequence_packing_args": {}},
        {"actor_train.sequence_packing_args.max_packed_sequence_length_train": "missing"},
    ),
    "reference packs without a cap": (
        {"reference.use_sequence_packing": True},
        {"reference.sequence_packing_args.max_packed_sequence_length_forward": "missing"},
    ),
    "packing under an engine": (
        {"actor_infer.strategy_args.strategy_name": "vllm", "actor_infer.use_sequence_packing": True},
        {"actor_infer.use_sequence_packing": "megatron_train and megatron_infer, not under vllm"},
    ),
    "training under an engine": (
        {"actor_train.strategy_args.strategy_name": "vllm", "actor_train.use_sequence_packing": False},
        {"actor_train.strategy_args.strategy_name": "use megatron_train"},
    ),
    "round not divisible by TP x CP": (
        DYNAMIC
        | {
            "actor_train.max_tokens_per_microbatch_in_train": 4096,
            "actor_train.sequence_length_round_in_train": 6,
            f"{LAYOUT}.tensor_model_parallel_size": 2,
            f"{LAYOUT}.context_parallel_size": 2,
        },
        {"actor_train.sequence_length_round_in_train": "2 x 2 = 4; use 8"},
    ),
    "cap below the round": (
        DYNAMIC
        | {
            "actor_train.max_tokens_per_microbatch_in_train": 64,
            "actor_train.sequence_length_round_in_train": 128,
        },
        {"actor_train.max_tokens_per_microbatch_in_train": "not even one row"},
    ),
}
