"""Small jobs, and their steps on fake tensors and on real CPU tensors."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from roll_batching.jobs.config import config_from_dict
from roll_batching.tools.rehearsal.task import RankReport, RankTask

ARCHITECTURE = {
    "vocab_size": 512,
    "hidden_size": 128,
    "num_layers": 4,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "ffn_hidden_size": 320,
}
PACKED = {"use_sequence_packing": True, "sequence_packing_args": {"max_packed_sequence_length_train": 512}}
DYNAMIC = {
    "use_dynamic_batching": True,
    "max_tokens_per_microbatch_in_train": 512,
    "max_tokens_per_microbatch_in_infer": 512,
}
PADDED = {"infer_batch_size": 3}

EXPERTS = {
    "moe": {
        "num_experts": 8,
        "router_topk": 2,
        "ffn_hidden_size": 96,
        "shared_expert_ffn_hidden_size": 64,
        "aux_loss_coeff": 0.01,
    }
}

LATENT = {
    "num_query_groups": 4,
    "multi_latent_attention": {
        "q_lora_rank": 48,
        "kv_lora_rank": 32,
        "qk_head_dim": 24,
        "qk_pos_emb_head_dim": 8,
        "v_head_dim": 24,
    },
    "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    "moe": {
        "num_experts": 8,
        "router_topk": 4,
        "ffn_hidden_size": 96,
        "shared_expert_ffn_hidden_size": 64,
        "layer_freq": [0, 1, 1, 1],
        "router_score_function": "sigmoid",
        "router_expert_bias": True,
        "router_num_groups": 4,
        "router_group_topk": 2,
        "router_scaling_factor": 2.5,
        "router_dtype": "fp32",
    },
}
"""DeepSeek-V3's attention and experts."""

SINKS = {
    "add_bias_linear": True,
    "attention_sinks": True,
    "swiglu_limit": 7.0,
    "sliding_window": 64,
    "window_layers": [1, 0, 1, 0],
    "moe": {"num_experts": 8, "router_topk": 2, "ffn_hidden_size": 96},
}
"""gpt-oss's attention and experts."""

SANDWICH = {
    "qk_layernorm": True,
    "zero_centered_norms": True,
    "sandwich_norms": True,
    "scaled_embedding": True,
    "activation": "gelu_tanh",
    "query_pre_attn_scalar": 48.0,
    "sliding_window": 64,
    "window_layers": [1, 0, 1, 1],
    "rotary_local_base": 500.0,
    "tie_word_embeddings": True,
}
"""Gemma 3's layers."""

DELTA_NETS = {
    "qk_layernorm": True,
    "zero_centered_norms": True,
    "attention_output_gate": True,
    "rotary_percent": 0.25,
    "gated_delta_net": {
        "layers": [1, 1, 0, 1],
        "num_key_heads": 2,
        "num_value_heads": 4,
        "key_head_dim": 32,
        "value_head_dim": 24,
    },
    "moe": {
        "num_experts": 8,
        "router_topk": 2,
        "ffn_hidden_size": 96,
        "shared_expert_ffn_hidden_size": 64,
        "shared_expert_gate": True,
    },
}
"""Qwen3-Next's layers."""

HYBRID = {
    "hybrid": {
        "pattern": "ME*M",
        "mamba_num_heads": 8,
        "mamba_head_dim": 16,
        "mamba_num_groups": 2,
        "mamba_state_dim": 32,
        "moe_latent_size": 48,
    },
    "moe": {
        "num_experts": 8,
        "router_topk": 2,
        "ffn_hidden_size": 96,
        "shared_expert_ffn_hidden_size": 64,
        "layer_freq": [0, 1, 0, 0],
        "router_score_function": "sigmoid",
        "router_expert_bias": True,
    },
}
"""The layers of Nemotron-H."""


def job_of(
    *,
    batching: dict[str, Any] | None = None,
    megatron: dict[str, Any] | None = None,
    architecture: dict[str, Any] | None = None,
    train: dict[str, Any] | None = None,
    **keys: Any,
) -> dict[str, Any]:
    """Settings of a job; `batching` and `train` go into actor_train, `megatron` into its strategy_config."""
    model = {**ARCHITECTURE, **(architecture or {})}
    return {
        "max_steps": 4,
        "prompt_length": 50,
        "response_length": 150,
        "actor_train": {
            "model_args": {"architecture": model, "dtype": "fp32"},
            "training_args": {"learning_rate": 1e-3, "per_device_train_batch_size": 3},
            "strategy_args": {"strategy_config": megatron or {}},
            **(batching if batching is not None else PACKED),
            **(train or {}),
        },
        **keys,
    }


def task_of(job: dict[str, Any], world_size: int, rank: int = 0, device: str = "cpu", **options: Any) -> RankTask:
    return RankTask(config=config_from_dict(job), rank=rank, world_size=world_size, device=device, **options)


def rehearsed(task: RankTask) -> RankReport:
    """Rehearse `task`; runs in its own process."""
    from roll_batching.tools.rehearsal.rank import rehearse_rank

    return rehearse_rank(task)


def measured(task: RankTask) -> RankReport:
    """Run the passes of `task` on real tensors, as the rank of the environment."""
    from roll_batching.distributed.parallel_layout import start_processes
    from roll_batching.jobs.config.auto_caps import with_value
    from roll_batching.tools.rehearsal.rank import observe

    start_processes()
    if task.config.actor_train.model_args.architecture.moe is not None:
        _route_evenly()
    assert int(os.environ["WORLD_SIZE"]) == task.world_size
    if task.config.actor_train.data_args.images is not None:
        task = replace(task, config=with_value(task.config, "actor_train.model_args.model_name_or_path", None))
        if task.config.reference is not None:
            task = replace(task, config=with_value(task.config, "reference.model_args.model_name_or_path", None))
    if task.config.teacher is not None:  # its directory does not exist: random weights instead
        task = replace(task, config=with_value(task.config, "teacher.model_args.model_name_or_path", None))
    return observe(task, with_values=True)


LIMIT = 0.015
"""Largest relative difference of a phase's peak of memory."""
MEASUREMENTS = 6
"""Most real steps that a rehearsed one is compared with: with two ranks, gloo was seen to add 1% in one of three."""


def worst_peak(
    found: RankReport, real: RankReport, measure_again: Callable[[], RankReport], limit: float = LIMIT
) -> float:
    """Largest relative difference of the peaks of phases.

    A thread of gloo can hold the tensors of an exchange past its end, at random. That adds to a peak, so that a
    difference counts if it is there each of `MEASUREMENTS` times.
    """

    def difference(truth: RankReport) -> float:
        # Real weights are initialized during build, and gloo holds copies while gradients are summed.
        phases = [phase for phase in truth.peaks if phase != "build" and not phase.endswith("gradient sync")]
        return max(abs(found.peaks[phase].bytes / truth.peaks[phase].bytes - 1) for phase in phases)

    worst = difference(real)
    for _ in range(MEASUREMENTS - 1):
        if worst < limit:
            break
        worst = difference(measure_again())
    return worst


def _route_evenly() -> None:
    """Make token i choose the experts after those of token i - 1."""
    import torch
    from megatron.core.transformer.moe.router import TopKRouter

    gating: Any = TopKRouter.gating

    def evenly(self: Any, hidden: torch.Tensor) -> torch.Tensor:
        logits = gating(self, hidden)
        experts, tokens = logits.shape[-1], logits.shape[:-1].numel()
        first = torch.arange(tokens)[:, None] * self.topk + torch.arange(self.topk)
        chosen = torch.zeros(tokens, experts).scatter_(1, first % experts, 1e4)
        return logits + chosen.view_as(logits).to(logits.dtype)

    TopKRouter.gating = evenly  # type: ignore[method-assign]
