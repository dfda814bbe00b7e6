"""Rehearsed jobs of a model with a vision encoder, against real steps on CPUs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from roll_batching.settings.model_parts import VisionConfig
from roll_batching.tools.rehearsal.fake_data import ImageSizes
from tests.support.ranks import run_ranks
from tests.tools.rehearsal.jobs import DELTA_NETS, DYNAMIC, PADDED, job_of, task_of, worst_peak
from tests.tools.rehearsal.test_accuracy import CP2, FULL, KL, PP2, SHARDED, TP2, of_the_model, rehearsed

pytestmark = pytest.mark.rehearse

VISION = {
    "depth": 3,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_heads": 4,
    "patch_size": 4,
    "window_size": 32,
    "fullatt_block_indexes": [1],
    "mrope_section": [4, 6, 6],
    "image_token_id": 507,
    "video_token_id": 508,
    "vision_start_token_id": 509,
    "vision_end_token_id": 510,
}


DEEPSTACK = {name: value for name, value in VISION.items() if name not in ("window_size", "fullatt_block_indexes")} | {
    "type": "qwen3_vl",
    "num_position_embeddings": 100,
    "deepstack_visual_indexes": [0, 1],
    "mrope_section": [6, 5, 5],
    "mrope_interleaved": True,
}


RECURRENT = DELTA_NETS | {"vision": DEEPSTACK | {"deepstack_visual_indexes": [], "mrope_section": [2, 1, 1]}}


def vision_job(pixels: int = 8192, vision: Any = VISION, **keys: Any) -> dict[str, Any]:
    """A job whose images have at most `pixels`, 64 of them a token."""
    data = {"file_name": "data.jsonl", "messages": "messages", "images": "images", "image_max_pixels": pixels}
    train = {"data_args": data, **keys.pop("train", {})}
    architecture = keys.pop("architecture", {"vision": vision})
    return job_of(architecture=architecture, train=train, pretrain="Qwen2.5-VL", **keys)


SFT: dict[str, Any] = {"task": "sft", "sequence_length": 200}
RL: dict[str, Any] = {
    "prompt_length": 140,
    "response_length": 60,
    "rollout_batch_size": 4,
    "num_return_sequences_in_group": 2,
}
JOBS: dict[str, tuple[dict[str, Any], int]] = {
    "RL": (vision_job(**RL), 1),
    "deepstack, PP2, full recompute": (vision_job(vision=DEEPSTACK, megatron=PP2 | FULL, **SFT), 2),
    "delta nets, PP2, full recompute": (vision_job(architecture=RECURRENT, megatron=PP2 | FULL, **SFT), 2),
    "PP2": (vision_job(megatron=PP2, **SFT), 2),
    "dynamic, DP2": (vision_job(batching=DYNAMIC, megatron=SHARDED, **SFT), 2),
    "padded, CP2": (vision_job(batching=PADDED, megatron=CP2, **SFT), 2),
    "RL with a reference, TP2, full recompute": (vision_job(megatron=TP2 | FULL, **RL, **KL), 2),
}


def compare_with_real_step(name: str, job: dict[str, Any], world: int, report: Callable[[str], None]) -> None:
    """Memory, FLOPs and collectives of the first and the last rank, rehearsed and on real tensors."""

    def measure() -> list[Any]:
        return run_ranks(world, "tests.tools.rehearsal.jobs:measured", task_of(job, world))

    real = measure()
    for rank in {0, world - 1}:
        found, truth = rehearsed(task_of(job, world, rank)), real[rank]
        assert set(found.peaks) == set(truth.peaks)
        worst = worst_peak(found, truth, lambda rank=rank: measure()[rank], limit=1e-3)
        report(f"{name}, rank {rank}: peaks of memory within {worst:.4%} of the real step; {found.notes}")
        assert worst < 1e-3
        assert found.kept == truth.kept
        assert of_the_model(found) == of_the_model(truth) != {}
        assert found.flops == truth.flops


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name != "RL")) for name in JOBS])
def test_memory_and_flops_equal_those_of_the_real_step(name, report):
    compare_with_real_step(name, *JOBS[name], report)


@pytest.mark.slow
def test_images_cost_memory_and_flops_that_a_job_of_texts_has_not():
    texts = vision_job(**SFT)
    texts["actor_train"]["data_args"] = {"file_name": "data.jsonl", "messages": "messages"}
    for one in (pictures := vision_job(**SFT), texts):
        one["actor_train"]["model_args"]["dtype"] = "bf16"
    shown, plain = (rehearsed(task_of(one, 1, device="cuda")) for one in (pictures, texts))
    assert shown.kept == plain.kept and shown.tokens == plain.tokens
    assert shown.flops["forward"] > 1.5 * plain.flops["forward"]
    assert shown.peaks["backward"].bytes > plain.peaks["backward"].bytes
    assert plain.notes == ("images: none, as actor_train.data_args.images is not set",)
    assert "of at most 128 x 64 pixels = 128 tokens: what fits the sample and the limit of 128 " in shown.notes[0]
    assert not [place for place in shown.host_reads if place.startswith(("forward", "backward"))]


def test_images_are_as_large_as_limits_and_prompts_allow():
    def sizes(**values: Any) -> ImageSizes:
        return ImageSizes(vision=VisionConfig(**VISION), **{"least": 4, "most": 1000, "prompt": None, **values})

    assert sizes().largest(104) == (10, 10) and sizes(most=64).largest(104) == (8, 8)
    assert sizes().largest(103) == (10, 10) and sizes().largest(102) == (9, 11)
    assert sizes(prompt=20).largest(104) == (4, 4)  # one of 17 would be longer than four to one
    assert sizes().largest(7) == (2, 2) and sizes().largest(6) is None
    assert sizes(least=10, most=10).largest(50) == (2, 5)
    for room in range(1, 300):
        height, width = sizes(least=1).largest(room + 3)
        assert 0.85 * room < height * width <= room or room < 12
        assert width <= 4 * height + 3
    assert "none, as no sample has room for 4 tokens" in sizes().note([6, 5])
    assert "each sample with room for 4 tokens has one, of 80 x 80 pixels = 100 tokens" in sizes().note([103, 6])


@pytest.mark.bad_input
def test_an_unknown_size_of_images_is_refused(report):
    from roll_batching.jobs.config import config_from_dict
    from roll_batching.jobs.config.diagnostics import ConfigFileError
    from roll_batching.tools.rehearsal.job import rehearse_job

    job = vision_job(**SFT)
    del job["actor_train"]["data_args"]["image_max_pixels"]
    with pytest.raises(ConfigFileError, match="image_max_pixels.* is missing, and Qwen2.5-VL is not a dir") as caught:
        rehearse_job(config_from_dict(job))
    report(str(caught.value))
