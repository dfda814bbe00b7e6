"""Advice of a rehearsal: the search on a known memory function, and on real rehearsals."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from roll_batching.cli import main
from roll_batching.errors import RollBatchingError
from roll_batching.jobs.config import JobConfig, config_from_dict
from roll_batching.tools.rehearsal.advice import find_limits, largest_fitting_caps, try_changes
from roll_batching.tools.rehearsal.job import Rehearsal, StageReport, margins_of
from roll_batching.tools.rehearsal.report import advice_lines
from roll_batching.tools.rehearsal.task import PhasePeak, RankReport, TrainingBatch
from tests.tools.rehearsal.jobs import DYNAMIC, PACKED, job_of

pytestmark = pytest.mark.rehearse

MIB = 1 << 20
TRAIN = "actor_train.sequence_packing_args.max_packed_sequence_length_train"
FORWARD = "reference.sequence_packing_args.max_packed_sequence_length_forward"


def packed(cap: int = 16384, forward: int = 32768, **keys: Any) -> JobConfig:
    """Job with the given caps, whose longest sample has 2,000 tokens."""
    caps = {"max_packed_sequence_length_train": cap}
    reference = {"use_sequence_packing": True, "sequence_packing_args": {"max_packed_sequence_length_forward": forward}}
    job = job_of(batching=PACKED | {"sequence_packing_args": caps}, use_kl_loss=True, reference=reference, **keys)
    return config_from_dict(job | {"prompt_length": 500, "response_length": 1500})


def peaks_of(job: JobConfig, kept: float = 0.0) -> dict[str, float]:
    """MiB by phase: 0.5 and 0.1 MiB per token of the caps, and a quadratic term."""
    train, forward = job.actor_train.batching().train, job.reference.batching().infer
    megatron = job.actor_train.strategy_args.strategy_config
    share = 0.5 / megatron.tensor_model_parallel_size / (2 if megatron.recompute_granularity == "full" else 1)
    return {
        "forward": kept + share * train.max_tokens + train.max_tokens**2 * 1e-6,
        "reference": kept + 0.1 * forward.max_tokens,
        "optimizer": kept,
    }


class FakeRehearse:
    """Fake `rehearse` with a known memory function; records the jobs."""

    def __init__(self, peaks: Callable[[JobConfig], Mapping[str, float]] = peaks_of, world_size: int = 8) -> None:
        self.peaks, self.world_size, self.jobs = peaks, world_size, []

    def __call__(self, job: JobConfig) -> Rehearsal:
        self.jobs.append(job)
        job.dp_size(self.world_size)
        dims = job.actor_train.strategy_args.strategy_config.parallel_dims(self.world_size)
        peaks = {name: PhasePeak(phase=name, bytes=size * MIB) for name, size in self.peaks(job).items()}
        report = RankReport(
            rank=0, stage=0, parameters=1, kept={}, peaks=peaks, flops={}, collectives={}, host_reads={},
            micro_batches=2, tokens={}, seconds=0.0,
            training=TrainingBatch(samples=4, model_flops=1.0, padding=0.0, in_step=None),
        )  # fmt: skip
        return Rehearsal(config=job, dims=dims, stages=(StageReport(name="the only stage", report=report),))


def memory_for(found: Rehearsal, mib: float) -> float:
    """Bytes of a GPU that just holds peaks of `mib` MiB with their margins."""
    (stage,) = found.stages
    return mib * MIB + sum(margin.bytes for margin in margins_of(stage.report, mib * MIB, stage.communicators))


def test_few_rehearsals_find_the_largest_fitting_cap_to_a_step():
    rehearse = FakeRehearse()
    found = rehearse(packed(cap=65536))
    memory = memory_for(found, 6000)  # 0.5 t + 1e-6 t^2 = 6000: t = 11,726
    (limit,) = find_limits(found, memory, rehearse)
    assert limit.key == TRAIN and limit.value == 65536
    assert limit.fits % 1024 == 0 and limit.fits <= 11726 < limit.too_large <= limit.fits + 1024
    assert len(rehearse.jobs) <= 7
    assert largest_fitting_caps(found, [limit], memory).settings == {TRAIN: limit.fits}


def test_the_largest_training_cap_is_found_for_a_job_that_fits():
    rehearse = FakeRehearse()
    found = rehearse(packed(cap=4096, forward=8192))
    memory = memory_for(found, 6000)
    (limit,) = find_limits(found, memory, rehearse)
    assert limit.fits <= 11726 < limit.too_large <= limit.fits * 1.1
    (line,) = advice_lines(found, [limit], [], memory)
    assert f"{TRAIN} is 4,096: {limit.fits:,} fits" in line


def test_only_the_caps_of_phases_that_do_not_fit_are_lowered():
    rehearse = FakeRehearse()
    reference = rehearse(packed(cap=4096, forward=131072))  # 2.0 and 12.8 GiB
    memory = memory_for(reference, 6000)
    (limit,) = find_limits(reference, memory, rehearse)
    assert limit.key == FORWARD and limit.fits <= 60000 < limit.too_large
    both = rehearse(packed(cap=65536, forward=131072))
    before = len(rehearse.jobs)
    change = largest_fitting_caps(both, find_limits(both, memory, rehearse), memory)
    assert set(change.settings) == {TRAIN, FORWARD} and len(rehearse.jobs) - before <= 6
    assert rehearse(change.of(both.config)).fits(memory)


def test_no_cap_is_advised_if_none_fits():
    rehearse = FakeRehearse(lambda job: peaks_of(job, kept=7000))
    found = rehearse(packed())
    memory = memory_for(found, 6000)
    limits = find_limits(found, memory, rehearse)
    assert [limit.fits for limit in limits] == [None, None]
    assert largest_fitting_caps(found, limits, memory) is None
    output = "\n".join(advice_lines(found, limits, [], memory))
    assert "none of the tried settings fits" in output and f"no {TRAIN} fits" in output


def test_layouts_are_tried_until_one_fits_and_keep_the_mini_batch():
    rehearse = FakeRehearse()
    job = packed(
        forward=8192,
        async_generation_ratio=1,  # rollouts in another process, so that pipelines are tried
        megatron={"use_distributed_optimizer": True},
        architecture={"num_query_groups": 8, "num_attention_heads": 8, "num_layers": 6},
        train={"training_args": {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 6}},
    )
    found = rehearse(job)
    memory = memory_for(found, 2300)  # of 8,460; with recomputation 4,364, halved by twice the tensor parallelism
    ways = try_changes(found, memory, rehearse)
    fits = {str(way.change): way.need <= memory for way in ways}
    layout = "actor_train.strategy_args.strategy_config."
    full, steps = f"{layout}recompute_granularity=full", "actor_train.training_args.gradient_accumulation_steps"
    tensor = f"{layout}tensor_model_parallel_size={{}} {layout}sequence_parallel=true {full} {steps}={{}}"
    pipeline = f"{layout}pipeline_model_parallel_size={{}} {full} {steps}={{}}"
    assert fits == {
        full: False,
        tensor.format(2, 12): False,
        tensor.format(4, 24): True,
        pipeline.format(2, 12): False,  # 4 and 8 stages do not divide 6 layers
    }
    for way in ways:
        dp_size = 8 // (way.change.of(job).actor_train.strategy_args.strategy_config.model_size)
        assert way.change.of(job).mini_batch_size(dp_size) == job.mini_batch_size(8)
        assert way.change.of(job).reference.strategy_args == way.change.of(job).actor_train.strategy_args


def test_layouts_that_fail_are_skipped_and_smallest_caps_are_the_last_resort():
    def without_pipelines(job: JobConfig) -> Mapping[str, float]:
        if job.actor_train.strategy_args.strategy_config.pipeline_model_parallel_size > 1:
            raise RollBatchingError("not this one")
        return peaks_of(job)

    memory = memory_for(FakeRehearse()(packed()), 1000)
    found = FakeRehearse()(packed(forward=65536))
    assert not any("pipeline" in str(way.change) for way in try_changes(found, memory, FakeRehearse()))
    rehearse = FakeRehearse(without_pipelines)
    found = rehearse(packed(forward=65536, async_generation_ratio=1))
    ways = try_changes(found, memory, rehearse)
    assert not any("pipeline" in str(way.change) for way in ways)
    layouts = [job.actor_train.strategy_args.strategy_config for job in rehearse.jobs]
    assert any(layout.pipeline_model_parallel_size > 1 for layout in layouts)
    last = ways[-1].change.settings
    assert last[TRAIN] == last[FORWARD] == 2048, "the longest sample, to a step"
    assert [way.need <= memory for way in ways] == [False] * (len(ways) - 1) + [True]


# ---- real rehearsals


def _file(folder: Path, **keys: Any) -> str:
    path = folder / "job.yaml"
    job = job_of(**keys)
    job["actor_train"]["model_args"]["dtype"] = "bf16"
    path.write_text(yaml.safe_dump(job))
    return str(path)


def _run(capsys: Any, *arguments: str) -> tuple[int, str]:
    with pytest.raises(SystemExit) as end:
        main(["rehearse", *arguments])
    return end.value.code, capsys.readouterr().out


@pytest.mark.slow
def test_advised_settings_make_the_job_fit(tmp_path, capsys):
    cap = {"max_tokens_per_microbatch_in_train": 1 << 20, "max_tokens_per_microbatch_in_infer": 1024}
    config = _file(tmp_path, batching=DYNAMIC | cap, train={"logprob_plan": "own"})
    memory = "2GiB"
    code, output = _run(capsys, "--config", config, "--gpu-memory", memory)
    assert code == 1 and "does not fit 2.00 GiB" in output
    offers = [line.strip() for line in output.splitlines() if line.startswith("    actor_train.")]
    assert len(offers) == 1 and "max_tokens_per_microbatch_in_train=" in offers[0]
    for offer in offers:
        assert _run(capsys, "--config", config, "--gpu-memory", memory, "--no-advice", *offer.split())[0] == 0, offer
    too_large = re.search(r"and ([\d,]+) does not fit", output)[1].replace(",", "")
    above = f"actor_train.max_tokens_per_microbatch_in_train={too_large}"
    code, output = _run(capsys, "--config", config, "--gpu-memory", memory, "--no-advice", "--json", above)
    assert code == 1 and json.loads(output)["need"] > 2 << 30
