"""Rollouts: prompts are spread over the data-parallel ranks, answered by the policy or a sampler, and scored."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from roll_batching.distributed import consensus, digest, exchange
from roll_batching.distributed.parallel_layout import ParallelLayout
from roll_batching.errors import DataError
from roll_batching.jobs.objectives.gigpo import Episode
from roll_batching.jobs.rewards import Completion, Scored
from roll_batching.jobs.rewards.pool import RewardPool
from roll_batching.jobs.rollouts.contract import Sampler
from roll_batching.jobs.rollouts.function_rollouts import FunctionRollouts
from roll_batching.jobs.texts.encode import encode_prompts
from roll_batching.jobs.texts.image_tokenizer import with_images, with_images_of
from roll_batching.jobs.texts.texts import Prompt
from roll_batching.jobs.texts.tokenizers import Tokenizer
from roll_batching.planning import batch_balance
from roll_batching.samples import FieldSpec, SampleBatch
from roll_batching.samples.fields import ROLLOUT_IDS
from roll_batching.strategy import GenerationSettings

logger = logging.getLogger(__name__)

_MARGIN = 60.0
"""Seconds that ranks wait for each other beyond the reward's own limit."""


@dataclass(frozen=True, kw_only=True)
class Rollouts:
    """Rollouts of this data-parallel rank, group by group, and their samples: one each, but of rollout functions.

    The id of rollout j of prompt p of the step is p * group_size + j. A sample's id is its place among the samples of
    all rollouts of the step: the rollout's id, where each has one.
    """

    ids: np.ndarray
    """int64 `[n]`: ids of the rollouts, ascending."""
    batch: SampleBatch
    """Samples, rollout by rollout: `input_ids` and `response_mask` (token), `log_probs` of the sampled tokens
    (next_token), `rollout_ids` (sample)."""
    samples: np.ndarray
    """int64 `[n]`: number of samples of each rollout."""
    completions: list[Completion]
    """The rollouts as text, in the order of `ids`."""
    scored: Scored | None = None
    """Rewards that a rollout function returned; None where the reward function scores."""
    turns: np.ndarray
    """int64 `[n]`: number of generations of the model in each rollout."""
    episodes: list[Episode | None]
    """States and rewards of turns, where the advantage estimator compares states; else None for each rollout."""
    prompt_tokens: np.ndarray
    """int64 `[n]`: tokens of the prompt of each rollout; of several samples, of the last one's."""
    seed: int
    """Seed of the step."""
    group_size: int
    """Rollouts per prompt."""
    max_rollouts: int
    """Rollouts of the data-parallel rank that has the most."""
    total_rollouts: int
    """Rollouts of the step, on all ranks."""
    seconds: float
    """Seconds of sampling on this rank."""

    @property
    def lengths(self) -> np.ndarray:
        """int64 `[n]`: tokens of each rollout, of all its samples with their prompts."""
        starts = np.cumsum(self.samples) - self.samples
        return np.add.reduceat(self.batch.lengths.numpy(), starts) if len(starts) else starts


def generate_rollouts(
    sampler: Sampler,
    prompts: Sequence[Prompt],
    tokenizer: Tokenizer,
    settings: GenerationSettings,
    *,
    prompt_length: int,
    function: FunctionRollouts | None = None,
) -> Rollouts:
    """Samples `settings.num_return_sequences` responses to each prompt. Collective.

    `prompts` are all prompts of the step, the same on every rank; Karmarkar-Karp gives each data-parallel rank
    the same number of them, of about the same cost. `settings.seed` is the seed of the step. With a `function`, the
    user's rollout function makes the responses.
    """
    layout = sampler.layout
    with consensus(layout.host_group, "encoding the prompts") as facts:  # sizes of images are read here
        encoded = encode_prompts(prompts, tokenizer, max_length=prompt_length)
        facts.equal(
            "the tokens of the prompts", digest(encoded.lengths.numpy().tobytes()), "Give all machines the same images"
        )
    home_rank = batch_balance(encoded.lengths.numpy(), layout.dp_size)
    local_prompts = np.flatnonzero(home_rank == layout.dp_rank)
    group_size = settings.num_return_sequences
    ids = (local_prompts[:, None] * group_size + np.arange(group_size)).ravel()
    prompt_tokens = encoded.lengths.numpy()[local_prompts].repeat(group_size)
    started = time.perf_counter()
    if function is None:
        local = [prompts[i] for i in local_prompts.tolist()]
        batch = _generate(sampler, encoded.select(local_prompts), local, tokenizer, settings)
        prompt_of_response = [prompts[i] for i in np.repeat(local_prompts, group_size).tolist()]
        with consensus(layout.host_group, "decoding the responses"):  # a tokenizer may lack a token of the model
            completions = completions_of(batch, prompt_of_response, tokenizer)
        counts = turns = np.ones(len(ids), dtype=np.int64)
        scored, episodes = None, list[Episode | None]([None] * len(ids))
    else:
        local = [prompts[i] for i in local_prompts.tolist()]
        samples = function(sampler, encoded.select(local_prompts), local, tokenizer, settings)
        batch, counts, completions = samples.batch, samples.samples, samples.completions
        scored, turns, episodes = samples.scored, samples.turns, samples.episodes
        prompt_tokens = samples.prompt_tokens
    seconds = time.perf_counter() - started
    sample_ids = ids if function is None else _sample_ids(layout, ids, counts, group_size * len(prompts))
    rollout_ids = {ROLLOUT_IDS: torch.from_numpy(ids.repeat(counts))}
    return Rollouts(
        ids=ids,
        batch=batch.with_ids(torch.from_numpy(sample_ids)).with_fields(rollout_ids, {ROLLOUT_IDS: FieldSpec("sample")}),
        samples=counts,
        completions=completions,
        scored=scored,
        turns=turns,
        episodes=episodes,
        prompt_tokens=prompt_tokens,
        seed=settings.seed,
        group_size=group_size,
        max_rollouts=group_size * int(np.bincount(home_rank).max()),
        total_rollouts=group_size * len(prompts),
        seconds=seconds,
    )


def _sample_ids(layout: ParallelLayout, ids: np.ndarray, counts: np.ndarray, total: int) -> np.ndarray:
    """Ids of this rank's samples, int64 [samples], of its rollouts `ids`, which have `counts` of them. Collective."""
    all_counts = np.zeros(total, dtype=np.int64)
    for of_rank, counts_of_rank in exchange(layout.host_group, "samples of rollouts", lambda: (ids, counts)):
        all_counts[of_rank] = counts_of_rank
    first = (np.cumsum(all_counts) - all_counts)[ids]
    return _place_in_rollout(counts) + first.repeat(counts)


def _place_in_rollout(counts: np.ndarray) -> np.ndarray:
    """For rollouts of `counts` samples, int64 [n], the place of each sample in its rollout, from 0: int64 [samples]."""
    result: np.ndarray = np.arange(counts.sum()) - (np.cumsum(counts) - counts).repeat(counts)
    return result


def _generate(
    sampler: Sampler,
    encoded: SampleBatch,
    prompts: Sequence[Prompt],
    tokenizer: Tokenizer,
    settings: GenerationSettings,
) -> SampleBatch:
    """Has `sampler` answer this rank's prompts; adds the fields of their images. Collective.

    Images are read here, so that each rank reads the images of its own prompts only.
    """
    with consensus(sampler.layout.host_group, "the images of prompts"):
        encoded = with_images(encoded, prompts, tokenizer)
    return with_images_of(sampler.generate(encoded, settings), encoded, settings.num_return_sequences)


def completions_of(batch: SampleBatch, prompts: Sequence[Prompt], tokenizer: Tokenizer) -> list[Completion]:
    """Returns the responses of `batch` as text; `prompts` holds the prompt of each response."""
    samples = zip(batch.to_lists("input_ids"), batch.to_lists("response_mask"), prompts, strict=True)
    completions = []
    for ids, mask, prompt in samples:
        tokens = ids[mask.bool()].tolist()
        finished = bool(tokens) and tokens[-1] in tokenizer.stop_token_ids
        completions.append(
            Completion(
                prompt=prompt.prompt,
                response=tokenizer.decode(tokens[:-1] if finished else tokens),
                finished=finished,
                tokens=len(tokens),
                answer=prompt.answer,
                record=prompt.line,
            )
        )
    return completions


@dataclass(frozen=True, kw_only=True)
class StepScores:
    """Rewards, lengths and times of rollouts, ascending by id; from `score_rollouts` those of all ranks."""

    ids: np.ndarray
    """int64 `[n]`, ascending."""
    rewards: np.ndarray
    """float64 `[n]`."""
    marks: dict[str, np.ndarray]
    """bool `[n]` by name."""
    failed: np.ndarray
    """bool `[n]`: the reward function failed on the rollout; its reward follows `reward_failure`."""
    domains: np.ndarray
    """Text `[n]`: reward domain; empty where the job has one reward."""
    finished: np.ndarray
    """bool `[n]`: the model ended the rollout itself."""
    response_tokens: np.ndarray
    """int64 `[n]`: tokens that the model sampled."""
    turns: np.ndarray
    """int64 `[n]`: generations of the model in the rollout."""
    samples: np.ndarray
    """int64 `[n]`: samples of the rollout."""
    episodes: np.ndarray
    """`Episode` `[n]`, states and rewards of turns, where the advantage estimator compares states; else None."""
    lengths: np.ndarray
    """int64 `[n]`: tokens of the rollout's samples, with their prompts."""
    generate_seconds: np.ndarray
    """float64 `[n]`: seconds in which the rollout's replica sampled all of the replica's rollouts."""
    reward_seconds: np.ndarray
    """float64 `[n]`: seconds in which the rollout's replica scored all of the replica's rollouts."""
    sample_log: list[dict[str, Any]]
    """Lines of rollouts.jsonl, for the rollouts selected by `rollout_samples`."""

    @classmethod
    def concat(cls, parts: Sequence[StepScores]) -> StepScores:
        """Joins the rollouts of all parts, ascending by id; a mark that a part lacks is False there."""
        order = np.argsort(np.concatenate([part.ids for part in parts]))
        names = sorted({name for part in parts for name in part.marks})

        def mark(part: StepScores, name: str) -> np.ndarray:
            return part.marks.get(name, np.zeros(len(part.ids), dtype=bool))

        columns: dict[str, Any] = {
            "marks": {name: np.concatenate([mark(part, name) for part in parts])[order] for name in names},
            "sample_log": sorted((line for part in parts for line in part.sample_log), key=lambda line: line["id"]),
        }
        for name in (field.name for field in fields(cls) if field.name not in columns):
            columns[name] = np.concatenate([getattr(part, name) for part in parts])[order]
        return cls(**columns)

    def add_mean_seconds(self, other: StepScores) -> StepScores:
        """Adds the mean seconds of `other` to these scores, for a step that sampled and scored both."""
        return replace(
            self,
            generate_seconds=self.generate_seconds + other.generate_seconds.mean(),
            reward_seconds=self.reward_seconds + other.reward_seconds.mean(),
        )

    def fail_with(self, baselines: StepScores) -> StepScores:
        """Marks as failed the responses of groups whose baseline failed; `baselines` has one response per group."""
        groups = baselines.failed.repeat(len(self.ids) // len(baselines.ids))
        return replace(self, failed=self.failed | groups)


def start_reward(layout: ParallelLayout, reward: RewardPool) -> None:
    """Starts `reward` on the ranks that score, and ends it on others.

    Collective; raises RankError, the same on all ranks, when a rank cannot start it.
    """
    with consensus(layout.host_group, "starting the reward", patience=reward.limits.start + _MARGIN):
        if layout.is_replica_leader:
            reward.start()
        else:
            reward.close()


def score_rollouts(
    sampler: Sampler, rollouts: Rollouts, reward: RewardPool, *, shown: int = 0, is_step: bool = True
) -> StepScores:
    """Scores each rollout on the leader of its replica; returns the scores of all on every rank. Collective.

    `sample_log` holds `shown` rollouts (-1: all), spread evenly over the step. `is_step`: they are all
    of a step, so that failed ones are compared with the others.

    Raises RankError, the same on all ranks, when the reward function fails, exceeds its time limit or returns a number
    that is not finite and `reward_failure` is `error`; it names the samples. DataError where it fails on a whole step.
    Ranks that are done wait as long as the reward's own limit allows the others.
    """
    layout = sampler.layout
    exchanged = exchange(
        layout.host_group,
        "scoring",
        lambda: _score_local(rollouts, reward, shown) if layout.is_replica_leader else None,
        patience=reward.most_seconds(rollouts.max_rollouts) + _MARGIN,
    )
    parts = [part for part in exchanged if part is not None]
    scores = StepScores.concat([local_scores for local_scores, _ in parts])
    if not scores.failed.any():
        return scores
    first = next(failure for _, failures in parts for failure in failures)
    if is_step and scores.failed.all():
        raise DataError(
            f"the reward function failed on all {len(scores.ids)} responses of a step, which no reward_failure can "
            f"replace: {first}"
        )
    if dist.get_rank() == 0:
        failed, total = scores.failed.sum(), len(scores.ids)
        logger.warning("the reward function failed on %d of %d responses: %s", failed, total, first)
    if is_step and reward.failure == "drop":
        return replace(scores, rewards=impute_failed(scores, rollouts.group_size))
    return scores


def impute_failed(scores: StepScores, group_size: int) -> np.ndarray:
    """Returns rewards, float64 `[n]`, with failed ones replaced by the mean of their group.

    If the whole group failed, by the mean of their domain, and if that failed, too, by 0.
    """
    rewards, failed = scores.rewards, scores.failed
    succeeded = np.where(failed, 0.0, rewards).reshape(-1, group_size)
    others = (~failed).reshape(-1, group_size).sum(1)
    means = (succeeded.sum(1) / np.maximum(others, 1)).repeat(group_size)
    for domain in np.unique(scores.domains):
        in_domain = scores.domains == domain
        known = rewards[in_domain & ~failed]
        means[in_domain & (others == 0).repeat(group_size)] = known.mean() if known.size else 0.0
    return np.where(failed, means, rewards)


def _score_local(rollouts: Rollouts, reward: RewardPool, shown: int) -> tuple[StepScores, list[str]]:
    """Scores this replica's responses; returns the scores, and a list with the first failure, if any."""
    started = time.perf_counter()
    scored = rollouts.scored
    if scored is None:
        scored = reward.score(rollouts.completions, rollouts.ids.tolist(), seed=rollouts.seed)
    scores = StepScores(
        ids=rollouts.ids,
        rewards=scored.rewards,
        marks=scored.marks,
        failed=scored.failed,
        domains=np.array(scored.domains, dtype=str),
        finished=np.array([c.finished for c in rollouts.completions], dtype=bool),
        response_tokens=np.array([c.tokens for c in rollouts.completions], dtype=np.int64),
        turns=rollouts.turns,
        samples=rollouts.samples,
        episodes=_column(rollouts.episodes),
        lengths=rollouts.lengths,
        generate_seconds=np.full(len(rollouts.completions), rollouts.seconds),
        reward_seconds=np.full(len(rollouts.completions), time.perf_counter() - started),
        sample_log=_sample_log(rollouts, scored, shown),
    )
    return scores, scored.failures[:1]


def _column(values: Sequence[Any]) -> np.ndarray:
    """`values` as an array of objects, [n]."""
    column = np.empty(len(values), dtype=object)
    column[:] = values
    return column


def _sample_log(rollouts: Rollouts, scored: Scored, shown: int) -> list[dict[str, Any]]:
    """Lines of rollouts.jsonl for those of the step's `shown` rollouts that this replica has."""
    total = rollouts.total_rollouts
    # Ids spread evenly over the step, computed alike on all replicas.
    selected = np.arange(total) if shown < 0 else np.arange(min(shown, total)) * total // max(1, min(shown, total))
    ids = rollouts.ids.tolist()
    lines = []
    for i in np.flatnonzero(np.isin(ids, selected)).tolist():
        completion = rollouts.completions[i]
        lines.append(
            {
                "id": ids[i],
                "prompt": completion.prompt,
                "response": completion.response,
                "answer": completion.answer,
                "reward": float(scored.rewards[i]),
                "domain": scored.domains[i],
                "failed": bool(scored.failed[i]),
                "marks": {name: bool(mark[i]) for name, mark in scored.marks.items()},
                "finished": completion.finished,
                "prompt_tokens": int(rollouts.prompt_tokens[i]),
                "response_tokens": completion.tokens,
                "turns": int(rollouts.turns[i]),
                "samples": int(rollouts.samples[i]),
            }
        )
    return lines


def with_scores(batch: SampleBatch, scores: StepScores, advantages: np.ndarray) -> SampleBatch:
    """Adds each rollout's `advantages` and `rewards` to its samples; renames `log_probs` to `rollout_log_probs`."""
    local = batch[ROLLOUT_IDS].cpu().numpy()
    fields = {
        "advantages": torch.from_numpy(advantages[local]).float(),
        "rewards": torch.from_numpy(scores.rewards[local]).float(),
        "rollout_log_probs": batch["log_probs"],
    }
    sample, next_token = FieldSpec("sample"), FieldSpec("next_token")
    schema = {"advantages": sample, "rewards": sample, "rollout_log_probs": next_token}
    return batch.without("log_probs").with_fields(fields, schema)
