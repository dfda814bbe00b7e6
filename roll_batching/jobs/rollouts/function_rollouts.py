"""Makes rollouts by a rollout function: leaders of replicas call it.

An engine's servers sample the tokens that it asks for, each rollout for itself; or else all ranks do, in rounds.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from roll_batching.distributed import consensus, exchange
from roll_batching.distributed.parallel_layout import ParallelLayout
from roll_batching.jobs.config import JobConfig
from roll_batching.jobs.config.advantages import compares_states
from roll_batching.jobs.engines.client import EngineClient, replica_group
from roll_batching.jobs.objectives.gigpo import Episode
from roll_batching.jobs.rewards.contract import Completion, Scored
from roll_batching.jobs.rollouts.contract import (
    LoadedRolloutFunction,
    RolloutPrompt,
    Sampler,
    TokenRequest,
    load_rollout_function,
)
from roll_batching.jobs.rollouts.free_rollouts import EngineSender
from roll_batching.jobs.rollouts.function_calls import FunctionCalls
from roll_batching.jobs.rollouts.sample_checks import CheckedRollout, CheckedSample
from roll_batching.jobs.rollouts.token_versions import VERSIONS_SPEC, WEIGHT_VERSIONS
from roll_batching.jobs.seeds import rollout_function_seed, round_seed
from roll_batching.jobs.texts.texts import Prompt
from roll_batching.jobs.texts.tokenizers import Tokenizer
from roll_batching.samples import FieldSpec, SampleBatch
from roll_batching.strategy import GenerationSettings
from roll_batching.strategy.generation import responses_to_batch

SCHEMA = {
    "input_ids": FieldSpec("token"),
    "response_mask": FieldSpec("token", pad=False),
    "log_probs": FieldSpec("next_token"),
}
"""Fields of rollouts, as `MegatronInferStrategy.generate` gives them."""


_MEETING_SECONDS = 2.0
"""After so long, ranks whose rollouts are not complete hear of faults on others."""


@dataclass(frozen=True, kw_only=True)
class _RoundSize:
    """Requests of one replica in a round."""

    count: int
    longest: int
    """Most new tokens of a request."""
    stop_token_ids: frozenset[int]
    """Stop tokens in addition to the job's that all of the requests have."""


@dataclass(frozen=True, kw_only=True)
class FunctionSamples:
    """Rollouts of this replica, in the order of its prompts, and their samples."""

    batch: SampleBatch
    """Samples of all rollouts, one rollout after another, as `Rollouts.batch`; ids from 0."""
    samples: np.ndarray
    """int64 `[n]`: number of samples of each rollout."""
    completions: list[Completion]
    scored: Scored | None
    """Rewards that the function returned; None where the job's reward function scores."""
    prompt_tokens: np.ndarray
    """int64 `[n]`: lengths of the prompts, of a rollout's last sample."""
    turns: np.ndarray
    """int64 `[n]`: number of generations of the model in each rollout."""
    episodes: list[Episode | None]
    """States and rewards of turns, where the advantage estimator compares states."""


class FunctionRollouts:
    """Makes rollouts by a rollout function. Calls are collective.

    Args:
        function: the rollout function, with its limits.
        patience: seconds in which the slowest replica samples a round's tokens.
    """

    def __init__(self, function: LoadedRolloutFunction, *, patience: float) -> None:
        self.function, self._patience = function, patience
        self._groups: dict[int, tuple[Any, tuple[Any, int] | None]] = {}
        """By identity of a layout's host group: that group (kept, so the identity stays unique) and `replica_group`."""

    def __call__(
        self,
        sampler: Sampler,
        encoded: SampleBatch,
        prompts: Sequence[Prompt],
        tokenizer: Tokenizer,
        settings: GenerationSettings,
    ) -> FunctionSamples:
        """Makes `settings.num_return_sequences` rollouts for each of this replica's prompts.

        `encoded` holds the tokens of `prompts`; its ids are the indices of the prompts in the step.

        Raises RankError, the same on all ranks, when a call fails; the message names function, sample and cure.
        """
        layout, function = sampler.layout, self.function
        replica = self._replica(layout)
        own_prompts = rollout_prompts(encoded, prompts, settings)
        with contextlib.ExitStack() as stack:
            calls: FunctionCalls | None = None
            sender = _sender_of(sampler, own_prompts, settings)
            if layout.is_replica_leader:
                calls = stack.enter_context(FunctionCalls(function, own_prompts, tokenizer, settings, sender))
            if sender is not None:
                self._wait_for_all(layout, calls)
            round_index = 0
            while sender is None and self._sample_round(sampler, calls, settings, round_index, replica):
                round_index += 1
            rollouts = [] if calls is None else calls.collect(range(len(own_prompts)))
        rollouts = _broadcast(rollouts, replica)
        with consensus(layout.host_group, "decoding the responses"):  # a tokenizer may lack a token of the model
            return function_samples(function, own_prompts, rollouts, tokenizer)

    def _wait_for_all(self, layout: ParallelLayout, calls: FunctionCalls | None) -> None:
        """Waits until the rollouts of all replicas are complete. Collective.

        Ranks meet every `_MEETING_SECONDS`, so that a fault on one ends all, and those that are complete wait there:
        the last one waits for nobody.
        """
        is_complete = False
        while not is_complete:
            completed = exchange(
                layout.host_group,
                "rollout function",
                lambda: calls is None or calls.wait_for_all(_MEETING_SECONDS),
                patience=_MEETING_SECONDS + self._patience,
            )
            is_complete = all(completed)

    def _replica(self, layout: ParallelLayout) -> tuple[Any, int] | None:
        key = id(layout.host_group)
        if key not in self._groups:
            self._groups[key] = layout.host_group, replica_group(layout)
        return self._groups[key][1]

    def _sample_round(
        self,
        sampler: Sampler,
        calls: FunctionCalls | None,
        settings: GenerationSettings,
        round_index: int,
        replica: tuple[Any, int] | None,
    ) -> bool:
        """Samples the tokens that all replicas wait for; returns False when none waits. Collective."""
        layout, requests = sampler.layout, list[TokenRequest]()

        def take() -> tuple[int, _RoundSize] | None:
            nonlocal requests
            if calls is None:
                return None
            requests = calls.take()
            return layout.dp_rank, _size(requests)

        patience = self._patience + self.function.timeout
        taken = exchange(layout.host_group, "rollout function", take, patience=patience)
        sizes = dict(of_replica for of_replica in taken if of_replica is not None)
        asking = [size for size in sizes.values() if size.count]
        if not asking:
            return False
        first_id = sum(size.count for rank, size in sizes.items() if rank < layout.dp_rank)
        contexts = _broadcast([np.array(request.tokens, dtype=np.int64) for request in requests], replica)
        shared = frozenset.intersection(*(size.stop_token_ids for size in asking))
        generated = sampler.generate(
            _context_batch(contexts, first_id),
            replace(
                settings,
                seed=round_seed(settings.seed, round_index),
                num_return_sequences=1,
                max_new_tokens=max(size.longest for size in asking),
                stop_token_ids=tuple(sorted({*settings.stop_token_ids, *shared})),
            ),
        )
        if calls is not None and requests:
            calls.answer(requests, _results(generated, requests, calls.stop_token_ids))
        return True


def _sender_of(sampler: Sampler, prompts: Sequence[RolloutPrompt], settings: GenerationSettings) -> EngineSender | None:
    """Sends single requests to the sampler's engine; None where all ranks sample together. The same on all ranks."""
    if not isinstance(sampler, EngineClient) or (requests := sampler.free_requests()) is None:
        return None
    sender = EngineSender(requests, settings)
    sender.add(prompts, settings.seed)
    return sender


def function_rollouts_of(config: JobConfig) -> FunctionRollouts | None:
    """The rollout function of `config`, imported; None without one. Raises ConfigError."""
    if config.rollout_function is None or config.is_supervised or not config.max_steps:
        return None
    function = load_rollout_function(config.rollout_function, config.rollout_args)
    loaded = LoadedRolloutFunction(
        path=config.rollout_function,
        function=function,
        arguments=config.rollout_args,
        timeout=config.rollout_function_timeout,
        max_calls=config.rollout_max_calls,
        sequence_length=config.sequence_length or 1,
        has_reward=config.has_reward,
        needs_states=compares_states(config.adv_estimator),
    )
    return FunctionRollouts(loaded, patience=60 * config.actor_train.backend_timeout)


def function_samples(
    function: LoadedRolloutFunction,
    prompts: Sequence[RolloutPrompt],
    rollouts: Sequence[CheckedRollout],
    tokenizer: Tokenizer,
) -> FunctionSamples:
    """Joins the `rollouts` that `function` made of `prompts`. Raises DataError where the tokenizer lacks a token."""
    return FunctionSamples(
        batch=_batch([sample for rollout in rollouts for sample in rollout.samples]),
        samples=np.array([len(rollout.samples) for rollout in rollouts], dtype=np.int64),
        completions=[_completion(*pair, tokenizer) for pair in zip(prompts, rollouts, strict=True)],
        scored=None if function.has_reward else _scored(rollouts),
        prompt_tokens=np.array([len(rollout.samples[-1].prompt) for rollout in rollouts], dtype=np.int64),
        turns=np.array([rollout.calls for rollout in rollouts], dtype=np.int64),
        episodes=[rollout.episode for rollout in rollouts],
    )


def rollout_prompts(
    encoded: SampleBatch, prompts: Sequence[Prompt], settings: GenerationSettings
) -> list[RolloutPrompt]:
    """Makes the prompt of each rollout, group by group; `encoded` as for `FunctionRollouts`."""
    group = settings.num_return_sequences
    rows = zip(encoded.ids.tolist(), encoded.to_lists("input_ids"), prompts, strict=True)
    return [
        RolloutPrompt(
            tokens=row.tolist(),
            text=prompt.prompt,
            answer=prompt.answer,
            record=prompt.line,
            sample=prompt_index * group + member,
            seed=rollout_function_seed(settings.seed, prompt_index * group + member),
        )
        for prompt_index, row, prompt in rows
        for member in range(group)
    ]


def _size(requests: Sequence[TokenRequest]) -> _RoundSize:
    stops = [request.stop_token_ids for request in requests]
    return _RoundSize(
        count=len(requests),
        longest=max((request.max_new_tokens for request in requests), default=0),
        stop_token_ids=frozenset.intersection(*stops) if stops else frozenset(),
    )


def _context_batch(contexts: Sequence[np.ndarray], first_id: int) -> SampleBatch:
    """Makes prompts of the contexts, with consecutive ids, which are unique over all replicas."""
    schema = {"input_ids": FieldSpec("token")}
    if not contexts:
        empty = torch.zeros(0, dtype=torch.int64)
        return SampleBatch(empty, empty, {"input_ids": empty}, schema)
    rows = {"input_ids": [torch.from_numpy(context) for context in contexts]}
    return SampleBatch.from_lists(rows, schema, ids=torch.arange(first_id, first_id + len(contexts)))


def _results(
    generated: SampleBatch, requests: Sequence[TokenRequest], stop_token_ids: frozenset[int]
) -> list[tuple[list[int], list[float]]]:
    """Returns tokens and log-probs for each request, cut where that request ends.

    All requests are sampled with the largest limit and the common stop tokens. Cutting is exact: a response under a
    smaller limit or more stop tokens is the beginning of the response without them.
    """
    results = []
    rows = zip(generated.to_lists("input_ids"), generated.to_lists("log_probs"), requests, strict=True)
    for row, values, request in rows:
        size = len(request.tokens)
        tokens = row[size:].tolist()[: request.max_new_tokens]
        stops = stop_token_ids | request.stop_token_ids
        end = next((index + 1 for index, token in enumerate(tokens) if token in stops), len(tokens))
        # Row i of a next_token field belongs to token i + 1.
        results.append((tokens[:end], values[size - 1 : size - 1 + end].tolist()))
    return results


def _batch(samples: Sequence[CheckedSample]) -> SampleBatch:
    """Makes a batch of the samples with the fields of rollouts, ids from 0."""
    if not samples:
        return responses_to_batch([], [])
    tokens, masks, log_probs, versions = [], [], [], []
    for sample in samples:
        before = len(sample.prompt)
        tokens.append(np.concatenate([sample.prompt, sample.tokens]))
        masks.append(np.concatenate([np.zeros(before, dtype=bool), sample.mask]))
        # Row i of a next_token field belongs to token i + 1, so log-probs begin one row early.
        log_probs.append(np.concatenate([np.zeros(before - 1), sample.log_probs, np.zeros(1)]))
        if sample.versions is not None:
            versions.append(np.concatenate([np.full(before, -1), sample.versions]))
    fields = {
        "input_ids": torch.from_numpy(np.concatenate(tokens)),
        "response_mask": torch.from_numpy(np.concatenate(masks)),
        "log_probs": torch.from_numpy(np.concatenate(log_probs)).float(),
    }
    lengths = torch.tensor([len(row) for row in tokens], dtype=torch.int64)
    schema = SCHEMA
    if versions:
        fields[WEIGHT_VERSIONS] = torch.from_numpy(np.concatenate(versions))
        schema = SCHEMA | {WEIGHT_VERSIONS: VERSIONS_SPEC}
    return SampleBatch(torch.arange(len(lengths)), lengths, fields, schema)


def _completion(prompt: RolloutPrompt, rollout: CheckedRollout, tokenizer: Tokenizer) -> Completion:
    """Makes the completion: the last sample's text behind its prompt, also of tools, and the number of sampled tokens.

    Tokens are those of all samples.
    """
    last = rollout.samples[-1]
    tokens = last.tokens.tolist()
    ended = tokens[-1] in tokenizer.stop_token_ids
    return Completion(
        prompt=prompt.text,
        response=tokenizer.decode(tokens[:-1] if ended else tokens),
        finished=last.finished,
        tokens=sum(int(sample.mask.sum()) for sample in rollout.samples),
        answer=prompt.answer,
        record=prompt.record,
    )


def _scored(rollouts: Sequence[CheckedRollout]) -> Scored:
    scores = [rollout.score for rollout in rollouts if rollout.score is not None]
    names = sorted({name for score in scores for name in score.marks})
    return Scored(
        rewards=np.array([score.reward for score in scores], dtype=np.float64),
        marks={name: np.array([score.marks.get(name, False) for score in scores]) for name in names},
        failed=np.zeros(len(scores), dtype=bool),
        failures=[],
        domains=[""] * len(scores),
    )


def _broadcast(values: list[Any], replica: tuple[Any, int] | None) -> list[Any]:
    """Returns the `values` of the replica's leader on all ranks of the replica."""
    if replica is None:
        return values
    box: list[Any] = [values]
    group, source = replica
    dist.broadcast_object_list(box, src=source, group=group)
    received: list[Any] = box[0]
    return received
