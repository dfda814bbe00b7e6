"""Rollouts: prompts are spread over the data-parallel ranks, answered by the model in training, and scored."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist

from roll_batching.distributed import consensus, exchange
from roll_batching.distributed.parallel_layout import ParallelLayout
from roll_batching.errors import DataError
from roll_batching.jobs.observe.metrics_file import Row
from roll_batching.jobs.rewards import Completion, Scored
from roll_batching.jobs.rewards.pool import RewardPool
from roll_batching.jobs.texts.encode import encode_prompts
from roll_batching.jobs.texts.texts import Prompt
from roll_batching.jobs.texts.tokenizers import Tokenizer
from roll_batching.planning import batch_balance
from roll_batching.samples import SampleBatch
from roll_batching.strategy import GenerationSettings
from roll_batching.strategy.offload import Moved

logger = logging.getLogger(__name__)

_MARGIN = 60.0
"""Seconds that ranks may be apart beside what the reward takes."""


@dataclass(frozen=True, kw_only=True)
class Rollouts:
    """This data-parallel rank's responses, group by group."""

    batch: SampleBatch
    """`input_ids` and `response_mask` (token), `log_probs` of the sampled tokens (next_token). The id of response
    j to prompt p of the step is p * group + j."""
    completions: list[Completion]
    """The same responses as text, in the order of the batch."""
    seed: int
    """The step's own."""
    most: int
    """Responses of the data-parallel rank that has the most."""
    total: int
    """Responses of the step, on all ranks."""
    group: int
    """Responses per prompt."""
    seconds: float
    """What sampling them took here."""


class Source(Protocol):
    """What answers prompts: a model in training, or an engine."""

    @property
    def layout(self) -> ParallelLayout:
        """The ranks that ask."""

    def generate(self, prompts: SampleBatch, settings: GenerationSettings) -> SampleBatch:
        """Responses to this data-parallel rank's prompts, as the strategy gives them. Collective."""


class CopySource(Source, Protocol):
    """A source whose weights are a copy of those in training. Every method is collective."""

    @property
    def moved(self) -> Moved:
        """What making room for its weights on devices that it shares, and taking it again, took so far."""

    def update(self, version: int) -> None:
        """From now on it answers with the weights in training, which are those of `version`."""

    def rest(self) -> None:
        """The model is about to train, and takes the memory of devices that both have."""

    def columns(self, home: SampleBatch) -> Row:
        """A row's figures of the rollouts `home`, and of what led to them."""


def generate_rollouts(
    source: Source,
    prompts: Sequence[Prompt],
    tokenizer: Tokenizer,
    settings: GenerationSettings,
    *,
    prompt_length: int,
) -> Rollouts:
    """Sample `settings.num_return_sequences` responses to each prompt. Collective.

    `prompts` are all prompts of the step, the same on every rank; Karmarkar-Karp gives each data-parallel rank
    as many of them, of about the same cost. `settings.seed` is the step's own.
    """
    layout = source.layout
    encoded = encode_prompts(prompts, tokenizer, max_length=prompt_length)
    homes = batch_balance(encoded.lengths.numpy(), layout.dp_size)
    mine = np.flatnonzero(homes == layout.dp_rank)
    group = settings.num_return_sequences
    numbers = (torch.from_numpy(mine)[:, None] * group + torch.arange(group)).flatten()
    began = time.perf_counter()
    batch = source.generate(encoded.select(mine), settings).with_ids(numbers)
    seconds = time.perf_counter() - began
    records = [prompts[i] for i in np.repeat(mine, group).tolist()]
    return Rollouts(
        batch=batch,
        completions=completions_of(batch, records, tokenizer),
        seed=settings.seed,
        most=group * int(np.bincount(homes).max()),
        total=group * len(prompts),
        group=group,
        seconds=seconds,
    )


def completions_of(batch: SampleBatch, prompts: Sequence[Prompt], tokenizer: Tokenizer) -> list[Completion]:
    """The responses of `batch` as text; `prompts` holds the prompt of each."""
    samples = zip(batch.to_lists("input_ids"), batch.to_lists("response_mask"), prompts, strict=True)
    result = []
    for ids, mask, prompt in samples:
        tokens = ids[mask.bool()].tolist()
        finished = bool(tokens) and tokens[-1] in tokenizer.stop_token_ids
        result.append(
            Completion(
                prompt=prompt.prompt,
                response=tokenizer.decode(tokens[:-1] if finished else tokens),
                finished=finished,
                tokens=len(tokens),
                record={"prompt": prompt.prompt, "answer": prompt.answer, **prompt.extra},
            )
        )
    return result


@dataclass(frozen=True, kw_only=True)
class StepScores:
    """Rewards and lengths of all responses of a step, on every rank, in the order of the ids."""

    ids: np.ndarray
    """int64 `[n]`, ascending."""
    rewards: np.ndarray
    """float64 `[n]`."""
    marks: dict[str, np.ndarray]
    """bool `[n]` by name."""
    failed: np.ndarray
    """bool `[n]`: the reward function failed on the response; its reward is what the policy gives it."""
    domains: np.ndarray
    """Text `[n]`: whose reward it is; empty for a job's only one."""
    finished: np.ndarray
    """bool `[n]`: the model ended the response itself."""
    response_tokens: np.ndarray
    """int64 `[n]`."""
    lengths: np.ndarray
    """int64 `[n]`: prompt and response."""
    generate_seconds: np.ndarray
    """float64 `[n]`: what its replica took to sample all that it did."""
    reward_seconds: np.ndarray
    """float64 `[n]`: what its replica took to score all of that."""
    said: list[dict[str, Any]]
    """Lines of rollouts.jsonl, of the responses that were asked for."""

    def after(self, others: StepScores) -> StepScores:
        """These scores, with what `others`, which the step had drawn and scored before, took as well in the mean."""
        return replace(
            self,
            generate_seconds=self.generate_seconds + others.generate_seconds.mean(),
            reward_seconds=self.reward_seconds + others.reward_seconds.mean(),
        )

    def failing_with(self, baselines: StepScores) -> StepScores:
        """These scores, failed as well where `baselines`, one per group in the order of the groups, failed."""
        groups = baselines.failed.repeat(len(self.ids) // len(baselines.ids))
        return replace(self, failed=self.failed | groups)


def start_reward(layout: ParallelLayout, reward: RewardPool) -> None:
    """Starts `reward` on the ranks that score. Collective; raises RankError, the same on all ranks, when one cannot."""
    with consensus(layout.host_group, "starting the reward", patience=reward.limits.start + _MARGIN):
        if layout.is_replica_leader:
            reward.start()


def score_rollouts(source: Source, rollouts: Rollouts, reward: RewardPool, *, shown: int = 0) -> StepScores:
    """Score every response once, on one rank of its replica, and tell all ranks. Collective.

    Of `shown` responses (-1: of all), spread evenly over the step, the texts are told as well.

    Raises RankError, the same on all ranks, when the reward function fails, takes too long or returns a number that
    is not finite and the policy is `error`; it names the samples. DataError where it fails on all samples. Ranks that
    are done wait as long as the reward's own limit allows the others.
    """
    layout = source.layout
    parts = exchange(
        layout.host_group,
        "scoring",
        lambda: _scored_here(rollouts, reward, shown) if layout.is_replica_leader else None,
        patience=reward.most_seconds(rollouts.most) + _MARGIN,
    )
    given = [part for part in parts if part is not None]
    scores = _merged(given)
    if not scores.failed.any():
        return scores
    first = next(text for part in given for text in part["failures"])
    if scores.failed.all():
        raise DataError(f"none of the {len(scores.ids)} responses has a reward, whatever reward_failure says: {first}")
    if dist.get_rank() == 0:
        logger.warning("%d of %d responses have no reward: %s", scores.failed.sum(), len(scores.ids), first)
    if reward.failure == "drop":
        return replace(scores, rewards=_means_of_others(scores, rollouts.group))
    return scores


def _means_of_others(scores: StepScores, group: int) -> np.ndarray:
    """The rewards, with those that failed replaced by the mean of their group's others, or else of their domain's."""
    rewards, failed = scores.rewards, scores.failed
    counted = np.where(failed, 0.0, rewards).reshape(-1, group)
    others = (~failed).reshape(-1, group).sum(1)
    means = (counted.sum(1) / np.maximum(others, 1)).repeat(group)
    for domain in np.unique(scores.domains):
        here = scores.domains == domain
        known = rewards[here & ~failed]
        means[here & (others == 0).repeat(group)] = known.mean() if known.size else 0.0
    return np.where(failed, means, rewards)


def _scored_here(rollouts: Rollouts, reward: RewardPool, shown: int) -> dict[str, Any]:
    """This replica's columns."""
    began = time.perf_counter()
    scored: Scored = reward.score(rollouts.completions, rollouts.batch.ids.tolist(), seed=rollouts.seed)
    count = len(rollouts.completions)
    return {
        "ids": rollouts.batch.ids.numpy(),
        "lengths": rollouts.batch.lengths.numpy(),
        "rewards": scored.rewards,
        "failed": scored.failed,
        "failures": scored.failures[:1],
        "domains": np.array(scored.domains, dtype=str),
        "marks": scored.marks,
        "finished": np.array([c.finished for c in rollouts.completions], dtype=bool),
        "response_tokens": np.array([c.tokens for c in rollouts.completions], dtype=np.int64),
        "generate_seconds": np.full(count, rollouts.seconds),
        "reward_seconds": np.full(count, time.perf_counter() - began),
        "said": _said(rollouts, scored, shown),
    }


def _said(rollouts: Rollouts, scored: Scored, shown: int) -> list[dict[str, Any]]:
    """Lines of this replica's responses among `shown` of the step's."""
    total = rollouts.total
    chosen = np.arange(total) if shown < 0 else np.arange(min(shown, total)) * total // max(1, min(shown, total))
    ids, lengths = rollouts.batch.ids.tolist(), rollouts.batch.lengths.tolist()
    lines = []
    for i in np.flatnonzero(np.isin(ids, chosen)).tolist():
        completion = rollouts.completions[i]
        lines.append(
            {
                "id": ids[i],
                "prompt": completion.prompt,
                "response": completion.response,
                "answer": completion.record.get("answer"),
                "reward": float(scored.rewards[i]),
                "domain": scored.domains[i],
                "failed": bool(scored.failed[i]),
                "marks": {name: bool(mark[i]) for name, mark in scored.marks.items()},
                "finished": completion.finished,
                "prompt_tokens": lengths[i] - completion.tokens,
                "response_tokens": completion.tokens,
            }
        )
    return lines


_COLUMNS = (
    "ids",
    "rewards",
    "failed",
    "domains",
    "finished",
    "response_tokens",
    "lengths",
    "generate_seconds",
    "reward_seconds",
)


def _merged(parts: Sequence[dict[str, Any]]) -> StepScores:
    order = np.argsort(np.concatenate([part["ids"] for part in parts]))
    names = sorted({name for part in parts for name in part["marks"]})

    def column(values: Sequence[np.ndarray]) -> np.ndarray:
        return np.concatenate(values)[order]

    def mark(part: dict[str, Any], name: str) -> np.ndarray:
        return part["marks"].get(name, np.zeros(len(part["ids"]), dtype=bool))

    return StepScores(
        said=sorted((line for part in parts for line in part["said"]), key=lambda line: line["id"]),
        marks={name: column([mark(part, name) for part in parts]) for name in names},
        **{key: column([part[key] for part in parts]) for key in _COLUMNS},
    )
