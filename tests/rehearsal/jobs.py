"""Small jobs, and the two ways to go through their step: for real on CPUs, and rehearsed."""

from __future__ import annotations

import os
from typing import Any

from roll_batching.config import config_from_dict
from roll_batching.rehearsal.task import RankReport, RankTask

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


def job_of(
    *,
    batching: dict[str, Any] | None = None,
    megatron: dict[str, Any] | None = None,
    architecture: dict[str, Any] | None = None,
    train: dict[str, Any] | None = None,
    **keys: Any,
) -> dict[str, Any]:
    """A job as plain data: `batching` and `train` in actor_train, `megatron` its strategy_config."""
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
    return RankTask(job=config_from_dict(job), rank=rank, world_size=world_size, device=device, **options)


def rehearsed(task: RankTask) -> RankReport:
    """In a process of its own."""
    from roll_batching.rehearsal.rank import rehearse_rank

    return rehearse_rank(task)


def for_real(task: RankTask) -> RankReport:
    """As the rank that the environment names."""
    from roll_batching.distributed.parallel_layout import start_processes
    from roll_batching.rehearsal.rank import observe

    start_processes()
    assert int(os.environ["WORLD_SIZE"]) == task.world_size
    return observe(task, with_values=True)
