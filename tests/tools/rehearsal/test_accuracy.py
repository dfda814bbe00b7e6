"""Rehearsed memory, FLOPs and collectives against real steps on CPUs, and against formulas."""

from __future__ import annotations

from typing import Any

import pytest

from roll_batching.tools.rehearsal.stages import extrapolate_layers
from roll_batching.tools.rehearsal.task import PREFILL, REFERENCE, RankReport, RankTask
from tests.support.ranks import run_ranks
from tests.tools.rehearsal.jobs import (
    ARCHITECTURE,
    DELTA_NETS,
    DYNAMIC,
    EXPERTS,
    HYBRID,
    LATENT,
    LIMIT,
    PADDED,
    SANDWICH,
    SINKS,
    job_of,
    task_of,
    worst_peak,
)

pytestmark = pytest.mark.rehearse

SELECTIVE = {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}
FULL = {"recompute_granularity": "full"}
TP2 = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
PP2_VPP2 = {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2}
PP2 = {"pipeline_model_parallel_size": 2}
CP2 = {"context_parallel_size": 2}
AUTO = {"context_parallel_size": "auto"}
UNEVEN = {"pipeline_model_parallel_size": 2, "pipeline_model_parallel_layout": "E|t|tt|tL"}
PAIRS = {"training_args": {"per_device_train_batch_size": 2}}
ADAPTERS = {"model_args": {"architecture": ARCHITECTURE, "dtype": "fp32", "lora_target": "all-linear"}}
KL = {"use_kl_loss": True, "kl_loss_coef": 0.1, "reference": {}}
GROUPS = {"prompt_length": 100, "response_length": 100, "num_return_sequences_in_group": 4, "rollout_batch_size": 4}
SHARING = {"max_packed_sequence_length_train": 512}
SHARDED = {"use_distributed_optimizer": True, "overlap_grad_reduce": True}

JOBS: dict[str, tuple[dict[str, Any], int]] = {
    "packed": (job_of(), 1),
    "dynamic, selective recompute": (job_of(batching=DYNAMIC, megatron=SELECTIVE), 1),
    "padded, full recompute": (job_of(batching=PADDED, megatron=FULL), 1),
    "TP2": (job_of(megatron=TP2), 2),
    "PP2 x VPP2": (job_of(megatron=PP2_VPP2), 2),
    "PP2 x VPP2, uneven": (job_of(megatron=UNEVEN), 2),
    "CP2, padded": (job_of(batching=PADDED, megatron=CP2), 2),
    "experts": (job_of(architecture=EXPERTS), 1),
    "multi-latent attention and sigmoid routing": (job_of(architecture=LATENT), 1),
    "attention sinks and windows": (job_of(architecture=SINKS), 1),
    "norms behind layers, two RoPEs": (job_of(architecture=SANDWICH), 1),
    "gated delta nets": (job_of(architecture=DELTA_NETS), 1),
    "layers with one part each": (job_of(architecture=HYBRID), 1),
    "experts, EP2": (job_of(architecture=EXPERTS, megatron={"expert_model_parallel_size": 2}), 2),
    "shared prompts": (job_of(**GROUPS), 1),
    "shared prompts, gated delta nets": (job_of(architecture=DELTA_NETS, **GROUPS), 1),
    "shared prompts, TP2": (job_of(megatron=TP2, **GROUPS), 2),
    "adapters and their reference, TP2": (job_of(megatron=TP2, train=ADAPTERS, **KL), 2),
    "DPO": (job_of(task="dpo", sequence_length=200, train=PAIRS), 1),
    "distributed optimizer, full recompute": (job_of(megatron=SHARDED | FULL), 2),
    "a size per pack, CP 2": (job_of(task="sft", sequence_length=200, megatron=AUTO), 2),
    "a size per pack, CP 1 of 4 ranks": (job_of(megatron=AUTO | SHARDED), 4),
    "a size per pack, CP 2 of 4 ranks, TP2": (job_of(megatron=AUTO | TP2, **GROUPS), 8),
    "a size per pack, CP 2, PP2": (job_of(task="sft", sequence_length=600, megatron=AUTO | PP2), 4),
    "slices, PP2": (job_of(task="sft", sequence_length=600, megatron=PP2 | {"pipeline_slices": 4}), 2),
}
"""Jobs with their number of processes."""
CP_SIZES = {
    "a size per pack, CP 2": 2,
    "a size per pack, CP 1 of 4 ranks": 1,
    "a size per pack, CP 2 of 4 ranks, TP2": 2,
    "a size per pack, CP 2, PP2": 2,
}
"""Context-parallel size of the rehearsed packs of jobs whose packs have their own."""
SAMPLED = set(JOBS) - {
    *("PP2 x VPP2", "PP2 x VPP2, uneven", "CP2, padded", "DPO"),
    *("a size per pack, CP 2", "a size per pack, CP 2, PP2", "slices, PP2"),
}
"""Jobs with rollouts of the training model."""


def rehearsed(task: RankTask) -> RankReport:
    (report,) = run_ranks(1, "tests.tools.rehearsal.jobs:rehearsed", task)
    assert isinstance(report, RankReport)
    return report


def of_the_model(report: RankReport) -> dict[str, tuple[float, float]]:
    """Collectives of the model, without the agreements of ranks on the host, which a rehearsal does not run."""
    return {key: calls for key, calls in report.collectives.items() if "GROUP" in key}


REFERRING = ("DPO", "adapters and their reference, TP2")
"""Jobs with a reference."""
SLOW = {
    "PP2 x VPP2, uneven",
    "multi-latent attention and sigmoid routing",
    "attention sinks and windows",
    "norms behind layers, two RoPEs",
    "gated delta nets",
    "layers with one part each",
    "adapters and their reference, TP2",
    "shared prompts, gated delta nets",
    "shared prompts, TP2",
    "TP2",
    "distributed optimizer, full recompute",
    "experts, EP2",
    "DPO",
    "padded, full recompute",
    "dynamic, selective recompute",
    "CP2, padded",
    "a size per pack, CP 1 of 4 ranks",
    "a size per pack, CP 2 of 4 ranks, TP2",
    "a size per pack, CP 2, PP2",
    "slices, PP2",
}


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in JOBS])
def test_memory_flops_and_collectives_equal_those_of_the_real_step(name, report):
    (job, world), cp_size = JOBS[name], CP_SIZES.get(name, 1)
    target, task = "tests.tools.rehearsal.jobs:measured", task_of(job, world, cp_size=cp_size)
    real = run_ranks(world, target, task)
    for rank in {0, world - 1}:
        found, truth = rehearsed(task_of(job, world, rank, cp_size=cp_size)), real[rank]
        assert set(found.peaks) == set(truth.peaks) > {"inputs", "forward", "backward", "optimizer"}
        assert (PREFILL in truth.peaks) == (name in SAMPLED) and (REFERENCE in truth.peaks) == (name in REFERRING)
        worst = worst_peak(found, truth, lambda rank=rank: run_ranks(world, target, task)[rank])
        report(f"{name}, rank {rank}: peaks of memory within {worst:.2%} of the real step")
        assert worst < LIMIT
        assert found.kept == truth.kept
        assert of_the_model(found) == of_the_model(truth) != {}
        assert found.flops == truth.flops


@pytest.mark.parametrize(
    ("device", "lengths"), [("cuda", (150, 200, 162)), ("cpu", (128,) * 4)], ids=["varlen", "dense"]
)
def test_flops_equal_the_formula(device, lengths):
    """Forward: 2 FLOPs per weight and token, and 4 per attended pair and channel of a query head. Backward: twice the
    former with a recomputed head, and 10 per pair and channel."""
    task = task_of(job_of(train={"model_args": _model("bf16")}), 1, device=device, lengths=lengths)
    found = rehearsed(task)
    hidden, heads, groups, ffn, vocab, layers = 128, 4, 2, 320, 512, 4
    head_dim, tokens = hidden // heads, sum(lengths)
    layer = hidden * (heads + 2 * groups) * head_dim + heads * head_dim * hidden + 3 * hidden * ffn
    head = vocab * hidden * (tokens - len(lengths))  # the last token of a sample has no label
    pairs = sum(length * (length + 1) // 2 for length in lengths)
    attention = layers * pairs * heads * head_dim
    forward = 2 * (layers * layer * tokens + head) + 4 * attention
    backward = 4 * (layers * layer * tokens + head) + 2 * head + 10 * attention
    assert found.tokens["training"] == tokens
    model = 6 * (layers * layer + vocab * hidden) * tokens + 6 * layers * heads * head_dim * sum(n * n for n in lengths)
    assert found.training.model_flops == model and found.training.padding == 0 and found.training.in_step == 1
    assert found.flops["forward"] == found.micro_batches * forward
    assert found.flops["backward"] == found.micro_batches * backward


def test_packs_of_groups_compute_a_prompt_once():
    """Of 512 tokens: a prompt of 100 with four answers of 100, then what is left; without sharing, 200 + 200 + 112."""
    grouped, single = (
        rehearsed(
            task_of(
                job_of(train={"sequence_packing_args": packing, "model_args": _model("bf16")}, **GROUPS),
                1,
                device="cuda",
            )
        )
        for packing in (SHARING, SHARING | {"share_prefixes": False})
    )
    assert grouped.tokens == single.tokens == {"old log-probs": 512, "training": 512}
    assert (grouped.training.samples, single.training.samples) == (5, 3)
    assert grouped.training.padding == single.training.padding == 0
    hidden, heads, ffn, vocab, layers = 128, 4, 320, 512, 4
    weights = layers * (hidden * (2 * heads + 4) * 32 + 3 * hidden * ffn) + vocab * hidden
    pairs = 4 * 200**2 - 3 * 99**2 + 9**2
    assert grouped.training.model_flops == 6 * weights * 512 + 6 * layers * hidden * pairs


def _model(dtype: str) -> dict[str, Any]:
    return job_of()["actor_train"]["model_args"] | {"dtype": dtype}


@pytest.mark.slow
def test_a_deep_model_is_extrapolated_from_two_shallow_ones(report):
    job = job_of(megatron=TP2 | SHARDED | FULL, train={"model_args": _model("bf16")})
    two, three, nine = (rehearsed(task_of(job, 4, device="cuda", layers=layers)) for layers in (2, 3, 9))
    extrapolated = extrapolate_layers(two, three, (2, 3, 9))
    assert extrapolated.kept == pytest.approx(nine.kept, rel=1e-3)
    for phase, peak in nine.peaks.items():
        if phase == "build":  # its peak is at the embedding or at the layers, depending on their number
            continue
        assert extrapolated.peaks[phase].bytes == pytest.approx(peak.bytes, rel=5e-3), phase
    assert extrapolated.flops == pytest.approx(nine.flops)
    assert {k: v for k, v in extrapolated.collectives.items() if "TENSOR" in k} == {
        k: pytest.approx(v) for k, v in nine.collectives.items() if "TENSOR" in k
    }


def test_a_model_in_fp16_needs_what_one_in_bf16_does():
    tasks = (task_of(job_of(train={"model_args": _model(dtype)}), 1, device="cuda") for dtype in ("bf16", "fp16"))
    bf16, fp16 = (rehearsed(task) for task in tasks)
    assert fp16.kept == pytest.approx(bf16.kept, rel=1e-3) and fp16.kept["optimizer"] > 0
    for phase, peak in bf16.peaks.items():
        assert fp16.peaks[phase].bytes == pytest.approx(peak.bytes, rel=1e-3), phase
    assert fp16.flops == bf16.flops


def test_earlier_micro_batches_leave_nothing():
    job = job_of(train={"model_args": _model("bf16")})
    few, many = (rehearsed(task_of(job, 1, device="cuda", micro_batches=count)) for count in (2, 6))
    packs = many.peaks["backward"].kinds["inputs"] - few.peaks["backward"].kinds["inputs"]
    assert many.peaks["backward"].bytes - few.peaks["backward"].bytes == pytest.approx(
        packs, abs=8192
    )  # and some numbers
