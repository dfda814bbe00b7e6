"""Rehearsed parts of rollouts against complete rollouts on a CPU."""

from __future__ import annotations

from typing import Any

import pytest

from roll_batching.jobs.config import config_from_dict
from roll_batching.planning import ParallelDims
from roll_batching.tools.rehearsal.rollout import fault_of, has_local_rollouts, sizes_of
from roll_batching.tools.rehearsal.task import DECODING, PREFILL
from tests.support.ranks import run_ranks
from tests.tools.rehearsal.jobs import job_of, task_of
from tests.tools.rehearsal.test_accuracy import rehearsed

pytestmark = pytest.mark.rehearse

SAMPLED = {"rollout_batch_size": 6, "num_return_sequences_in_group": 4}


def complete_rollout(job: dict[str, Any]) -> tuple[float, float, int]:
    """(persistent bytes, peak bytes of rollouts of full length, host reads)."""
    import torch

    from roll_batching.distributed.parallel_layout import start_processes
    from roll_batching.jobs.objectives.from_config import sampling_of
    from roll_batching.samples import SampleBatch
    from roll_batching.tools.rehearsal.passes import passes_of
    from roll_batching.tools.rehearsal.rank import peaks_of
    from roll_batching.tools.rehearsal.recorder import Recorder

    start_processes()
    recorder, config = Recorder("cpu"), config_from_dict(job)
    with recorder, recorder.tracking_modules():
        policy = passes_of(config, recorder, with_values=True).policy
        prompts = [torch.randint(0, 500, (config.prompt_length,)) for _ in range(config.rollout_batch_size)]
        batch = SampleBatch.from_lists({"input_ids": prompts}, {"input_ids": "token"})
        settings = sampling_of(config, None)
        object.__setattr__(settings, "eos_token_id", 10**6)  # no row ends early
        with recorder.during("held"):
            torch.zeros(())
        with recorder.during("rollout"):
            answers = policy.generate(batch, settings)
    assert set(answers.lengths.tolist()) == {config.sequence_length}
    found = peaks_of(recorder.blocks, {}, recorder.phases)
    return found["held"].bytes, found["rollout"].bytes, len(recorder.host_reads)


@pytest.mark.slow
@pytest.mark.parametrize("bound", [None, 1000])
def test_rehearsed_memory_equals_that_of_complete_rollouts(bound, report):
    args = {} if bound is None else {"actor_infer": {"generating_args": {"max_tokens_in_cache": bound}}}
    job = job_of(**SAMPLED, **args)
    ((held, most, reads),) = run_ranks(1, "tests.tools.rehearsal.test_rollout:complete_rollout", job)
    found = rehearsed(task_of(job, 1))
    rehearsed_most = max(found.peaks[phase].bytes for phase in (PREFILL, DECODING)) - sum(found.kept.values())
    real = most - held
    report(
        f"cache bounded by {bound}: {rehearsed_most / real - 1:+.2%} of {real / 2**20:.1f} MiB of a complete rollout"
    )
    assert abs(rehearsed_most / real - 1) < 0.03
    positions = 24 * 200 if bound is None else 1000
    assert rehearsed_most > 4 * 2 * 2 * 32 * 4 * positions, "keys and values of 4 layers, 2 heads of 32, in fp32"


def test_rollouts_of_a_rank():
    job = config_from_dict(job_of(**SAMPLED))
    sizes = sizes_of(job, ParallelDims(dp_size=4))
    assert (sizes.prompts, sizes.rows, sizes.room) == (2, 8, 200)
    assert sizes_of(job, ParallelDims(dp_size=1, tp_size=2, sequence_parallel=True)).room == 201
    turns = {"rollout_function": "examples.calculator.rollout:rollout", "sequence_length": 400}
    sizes = sizes_of(config_from_dict(job_of(**SAMPLED, **turns)), ParallelDims(dp_size=4))
    assert (sizes.prompts, sizes.rows, sizes.context, sizes.room) == (8, 8, 250, 400)


def test_jobs_with_and_without_local_rollouts():
    assert has_local_rollouts(config_from_dict(job_of()))
    assert not has_local_rollouts(config_from_dict(job_of(task="sft", sequence_length=200)))
    assert not has_local_rollouts(config_from_dict(job_of(async_generation_ratio=1)))
    assert fault_of(config_from_dict(job_of()), ParallelDims()) is None
    assert "context parallel size 2" in fault_of(config_from_dict(job_of()), ParallelDims(cp_size=2))
