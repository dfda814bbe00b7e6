"""Dynamic sampling: groups with equal rewards are replaced by groups of further prompts, until a step is full.

Source: DAPO (arXiv 2503.14476), as in NeMo-RL's `use_dynamic_sampling` and verl's `filter_groups`. Groups beyond a full
step are discarded, as there, so that the data's position alone restores a run.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, fields, replace

import numpy as np
import torch

from roll_batching.errors import RankError
from roll_batching.jobs.config import JobConfig
from roll_batching.jobs.observe.run_files import Metrics
from roll_batching.jobs.rollouts.rollout import StepScores
from roll_batching.samples import FieldSpec, SampleBatch
from roll_batching.samples.fields import ROLLOUT_IDS

logger = logging.getLogger(__name__)

_LEAST_DEVIATION = 1e-6
"""Standard deviation of a group's rewards above which they differ. Source: slime, `check_reward_nonzero_std`."""
_BATCHES_BETWEEN_WARNINGS = 10
"""Without a limit of batches, a warning follows after every so many generation batches of one step."""
_SUMMED = ("_seconds", "dropped_samples")
"""Endings of metrics that are summed over the batches of a step; of other metrics the last batch's value is taken."""

DrawBatch = Callable[[int], tuple[SampleBatch, StepScores, Metrics]]
"""Samples generation batch `number`, from 0: this rank's samples, scores of all ranks, metrics. Collective."""


@dataclass
class _Counts:
    """Counts of a step's groups by outcome."""

    batches: int = 0
    groups: int = 0
    equal: int = 0
    reward_sum: float = 0.0

    def add(self, scores: StepScores, varied: np.ndarray) -> None:
        self.batches += 1
        self.groups += len(varied)
        self.equal += int((~varied).sum())
        self.reward_sum += float(scores.rewards.mean()) * len(varied)

    def to_dict(self, used: int) -> Metrics:
        """Metrics of a step that uses `used` groups."""
        return {
            "dynamic_sampling/batches": self.batches,
            "dynamic_sampling/groups": self.groups,
            "dynamic_sampling/equal_groups": self.equal,
            "dynamic_sampling/surplus_groups": self.groups - self.equal - used,
            "dynamic_sampling/sampled_reward": self.reward_sum / self.groups,
        }


def sample_full_step(config: JobConfig, step: int, draw: DrawBatch) -> tuple[SampleBatch, StepScores, Metrics]:
    """Draws batches until the step is full of groups with different rewards.

    Returns this rank's samples, the scores of all ranks, and metrics. Groups are taken in the order of their prompts.
    All ranks see all rewards and decide alike. Ids are positions among the rollouts, or samples, of the taken groups. A
    rank's number of samples differs from that of other ranks, and may be 0.

    Raises RankError, on all ranks alike, when `dynamic_sampling_max_batches` batches do not fill the step.
    """
    wanted, size, most = config.rollout_batch_size, config.group_size, config.dynamic_sampling_max_batches
    counts, metrics = _Counts(), Metrics()
    batches: list[SampleBatch] = []
    kept_scores: list[StepScores] = []
    seconds = np.zeros(2)  # of generation and of rewards, means over all samples, summed over batches
    taken = samples = 0
    while taken < wanted:
        if most is not None and counts.batches == most:
            raise RankError(_too_few(config, step, taken, counts))
        if most is None and counts.batches and not counts.batches % _BATCHES_BETWEEN_WARNINGS:
            logger.warning("%s", _too_few(config, step, taken, counts))
        batch, scores, sampler_metrics = draw(counts.batches)
        varied = varied_groups(scores.rewards, size)
        counts.add(scores, varied)
        for name, value in sampler_metrics.items():
            metrics[name] = metrics.get(name, 0) + value if name.endswith(_SUMMED) else value
        seconds += scores.generate_seconds.mean(), scores.reward_seconds.mean()
        groups = np.flatnonzero(varied)[: wanted - taken]
        old_ids = (groups[:, None] * size + np.arange(size)).ravel()
        new_ids = dict(zip(old_ids.tolist(), range(taken * size, taken * size + len(old_ids)), strict=True))
        batches.append(_take_samples(batch, scores.samples, old_ids, taken * size, samples))
        kept_scores.append(_take_scores(scores, new_ids))
        taken, samples = taken + len(groups), samples + int(scores.samples[old_ids].sum())
    scores = StepScores.concat(kept_scores)
    count = len(scores.ids)
    scores = replace(scores, generate_seconds=np.full(count, seconds[0]), reward_seconds=np.full(count, seconds[1]))
    return SampleBatch.concat(batches), scores, metrics | counts.to_dict(taken)


def varied_groups(rewards: np.ndarray, group_size: int) -> np.ndarray:
    """Returns for each group whether its rewards differ: bool `[groups]`."""
    varied: np.ndarray = rewards.reshape(-1, group_size).std(axis=1) > _LEAST_DEVIATION
    return varied


def _take_samples(
    batch: SampleBatch, counts: np.ndarray, taken: np.ndarray, first_rollout: int, first_sample: int
) -> SampleBatch:
    """The samples in `batch` of the rollouts `taken`, int64 [n], with new ids of samples and rollouts.

    `counts`, int64 [rollouts], are the samples of each rollout of the generation batch, on all ranks. New ids go on
    from `first_rollout` and `first_sample` in the order of `taken`.
    """
    new_rollout = np.full(len(counts), -1)
    new_rollout[taken] = first_rollout + np.arange(len(taken))
    new_first = np.zeros(len(counts), dtype=np.int64)
    new_first[taken] = first_sample + np.cumsum(counts[taken]) - counts[taken]
    old_rollout = batch[ROLLOUT_IDS].cpu().numpy()
    kept = np.flatnonzero(new_rollout[old_rollout] >= 0)
    rollout, old_first = old_rollout[kept], np.cumsum(counts) - counts
    ids = batch.ids.numpy()[kept] - old_first[rollout] + new_first[rollout]
    rollout_ids = {ROLLOUT_IDS: torch.from_numpy(new_rollout[rollout])}
    selected = batch.select(kept).with_ids(torch.from_numpy(ids))
    return selected.with_fields(rollout_ids, {ROLLOUT_IDS: FieldSpec("sample")})


def _take_scores(scores: StepScores, new_ids: dict[int, int]) -> StepScores:
    """The scores of the rollouts in `new_ids`, under their new ids."""
    places = np.array(list(new_ids), dtype=np.int64)
    columns = {
        field.name: getattr(scores, field.name)[places]
        for field in fields(scores)
        if field.name not in ("ids", "marks", "sample_log")
    }
    lines = [{**line, "id": new_ids[line["id"]]} for line in scores.sample_log if line["id"] in new_ids]
    marks = {name: mark[places] for name, mark in scores.marks.items()}
    ids = np.array(list(new_ids.values()), dtype=np.int64)
    return StepScores(ids=ids, marks=marks, sample_log=lines, **columns)


def _too_few(config: JobConfig, step: int, taken: int, counts: _Counts) -> str:
    """The message that the step is not full yet, with cures."""
    is_limited = config.dynamic_sampling_max_batches is not None
    limit = "(dynamic_sampling_max_batches)" if is_limited else "(dynamic_sampling_max_batches is ~, no limit)"
    most = "dynamic_sampling_max_batches, " if is_limited else ""
    return (
        f"step {step} has {taken} of {config.rollout_batch_size} prompts whose rewards differ, after "
        f"{counts.batches} generation batches {limit} with {counts.groups} prompts; the mean "
        f"reward is {counts.reward_sum / counts.groups:.4g}. If the prompts are too hard or too easy for the model, "
        f"change them or the reward; otherwise raise {most}dynamic_sampling_batch_size or num_return_sequences_in_group"
    )
