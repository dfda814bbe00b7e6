"""Code paths on a fake CUDA device: no tensor on the wrong device, no host read inside a schedule."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from roll_batching.jobs.config import load_config
from roll_batching.tools.rehearsal.task import RankReport
from tests.support.ranks import RanksFailed, run_ranks
from tests.tools.rehearsal.jobs import ARCHITECTURE, DELTA_NETS, DYNAMIC, PACKED, PADDED, job_of

pytestmark = pytest.mark.rehearse

PATHS = "tests.tools.rehearsal.paths"
CONFIGS = sorted(
    path.stem
    for path in Path("configs").glob("*.yaml")
    if load_config(path).actor_train.model_args.architecture is not None  # otherwise it is in a model directory
)
SELECTIVE = {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}
SUPERVISED = {"task": "sft", "sequence_length": 200}
PREFERENCES = {"task": "dpo", "sequence_length": 200, "reference": {}, "loss_function": "dpo"}


def divided(cp_size: int, what: str) -> dict[str, Any]:
    return {"context_parallel_size": cp_size, "recurrent_context_parallel": what}


MAMBA = {
    "hybrid": {
        "pattern": "M-*M",
        "mamba_num_heads": 8,
        "mamba_head_dim": 16,
        "mamba_num_groups": 2,
        "mamba_state_dim": 32,
    }
}
GROUPS = {"prompt_length": 100, "response_length": 100, "num_return_sequences_in_group": 4, "rollout_batch_size": 4}
TAUGHT = {
    "task": "distill",
    "teacher": {"model_args": {"model_name_or_path": "no/teacher", "architecture": ARCHITECTURE}},
}
FOUR_RANKS = {
    "tensor_model_parallel_size": 2,
    "sequence_parallel": True,
    "context_parallel_size": 2,
    "use_distributed_optimizer": True,
    "overlap_grad_reduce": True,
}


def bf16(**keys: Any) -> dict[str, Any]:
    job = job_of(**keys)
    job["actor_train"]["model_args"]["dtype"] = "bf16"
    return job


JOBS: dict[str, tuple[dict[str, Any], int]] = {
    "CP2 x TP2, packed, full recompute": (bf16(megatron=FOUR_RANKS | {"recompute_granularity": "full"}), 8),
    "CP2, dense": (bf16(megatron={"context_parallel_size": 2, "attention_backend": "dense"}), 2),
    "dense, dynamic, selective recompute": (
        bf16(batching=DYNAMIC, megatron=SELECTIVE | {"attention_backend": "dense"}),
        1,
    ),
    "PP4 x VPP2, padded": (
        bf16(
            batching=PADDED,
            architecture={"num_layers": 8},
            megatron={"pipeline_model_parallel_size": 4, "virtual_pipeline_model_parallel_size": 2},
        ),
        4,
    ),
    "TP4 over two key-value heads, generation": (
        bf16(megatron={"tensor_model_parallel_size": 4, "sequence_parallel": True}),
        4,
    ),
    "CP4 over two groups of Mamba layers": (
        bf16(megatron=divided(4, "heads"), architecture=MAMBA, **SUPERVISED),
        4,
    ),
    "gated delta nets that share prompts, CP2 over the sequence": (
        bf16(megatron=divided(2, "sequence"), architecture=DELTA_NETS | {"moe": None}, **GROUPS),
        2,
    ),
    "Mamba layers that share prompts": (bf16(architecture=MAMBA, **GROUPS), 1),
    "reference and its divergence": (bf16(use_kl_loss=True, reference=PACKED), 1),
    "a teacher": (bf16(**TAUGHT), 1),
    "KTO": (bf16(task="kto", sequence_length=200, loss_function="kto", reference=PACKED), 1),
    "SFT": (bf16(**SUPERVISED), 1),
    "DPO": (bf16(train={"training_args": {"per_device_train_batch_size": 2}}, **PREFERENCES), 1),
}


def inside(report: RankReport) -> list[str]:
    return [words for words in report.host_reads if words.startswith(("forward: ", "backward: "))]


@pytest.mark.parametrize("name", CONFIGS)
def test_every_shipped_configuration(name):
    (report,) = run_ranks(1, f"{PATHS}:shipped", name)
    assert inside(report) == []
    assert {"forward", "backward", "optimizer"} <= set(report.peaks)


@pytest.mark.parametrize("name", JOBS)
def test_jobs(name):
    (report,) = run_ranks(1, f"{PATHS}:job_on_device", JOBS[name])
    assert inside(report) == []
    assert report.flops["backward"] > report.flops["forward"] > 0


def test_evaluation():
    (devices,) = run_ranks(1, f"{PATHS}:evaluation", bf16())
    assert devices == ["cuda:0"]


def test_from_parts():
    (reads,) = run_ranks(1, f"{PATHS}:parts")
    assert reads == {}


def test_a_host_read_in_a_loss_is_reported():
    job = bf16(loss_function=f"{PATHS}:ReadingLoss")
    (report,) = run_ranks(1, f"{PATHS}:job_on_device", (job, 1))
    (read,) = inside(report)
    assert "paths.py" in read and "token_loss" in read


def test_an_index_on_the_wrong_device_fails():
    with pytest.raises(RanksFailed, match="same device|found at least two devices|cpu"):
        run_ranks(1, f"{PATHS}:head_with_an_index_on_the_host")
