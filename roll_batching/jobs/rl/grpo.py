"""The RL phase: prompts, rollouts, rewards, advantages, balanced training steps."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch

from roll_batching.distributed import consensus, digest
from roll_batching.jobs.config import JobConfig
from roll_batching.jobs.config.objective_rules import wants_reference
from roll_batching.jobs.config.rl_rules import uses_critic
from roll_batching.jobs.objectives.advantages import outside_difficulty, shape_rewards, shuffled, zero_groups
from roll_batching.jobs.objectives.from_config import Advantages, sampling_of
from roll_batching.jobs.objectives.gigpo import with_turn_advantages
from roll_batching.jobs.objectives.stateful import ARRIVALS, CompositeState
from roll_batching.jobs.objectives.token_rewards import require_single_samples
from roll_batching.jobs.observe.run_files import Metrics
from roll_batching.jobs.rl.async_rollouts import AsyncRollouts
from roll_batching.jobs.rl.critic import Critic
from roll_batching.jobs.rl.dynamic_sampling import sample_full_step
from roll_batching.jobs.roles.frozen_models import make_reference, teacher_of
from roll_batching.jobs.roles.remote_reference import RemoteReference
from roll_batching.jobs.rollouts.contract import SeparateSampler
from roll_batching.jobs.rollouts.evaluation import Evaluator, evaluation_metrics
from roll_batching.jobs.rollouts.prompts import prompt_stream
from roll_batching.jobs.rollouts.rollout import Rollouts, StepScores, generate_rollouts, score_rollouts, with_scores
from roll_batching.jobs.rollouts.step_metrics import (
    ModeComparison,
    comparison_metrics,
    merge_metrics,
    offload_metrics,
    rollout_metrics,
    score_metrics,
    time_share_metrics,
    update_metrics,
)
from roll_batching.jobs.run.context import JobContext
from roll_batching.jobs.seeds import step_seed
from roll_batching.jobs.steps.update import train_on_rollouts
from roll_batching.jobs.texts.texts import Prompt
from roll_batching.losses import loss_spec, mask_overlong
from roll_batching.losses.train_infer import with_correction
from roll_batching.planning import Plan
from roll_batching.samples import SampleBatch, mini_batches
from roll_batching.samples.fields import ROLLOUT_IDS
from roll_batching.strategy import GenerationSettings, StepResult
from roll_batching.strategy.offload import OffloadStats

PHASE = "rl"
"""Name of the phase in rows and checkpoints."""


class Grpo:
    """The RL phase of a job.

    Args:
        context: what the job's phases share.
        loss: a loss object (see `losses.contract`).
        advantages: makes advantages of rewards.
        sampler_config: the job's settings, with the URLs of its engine's servers, for the async sampler's processes.
        sampler: separate sampler; None: the model in training or the async sampler generates.
    """

    def __init__(
        self,
        context: JobContext,
        loss: Any,
        advantages: Advantages,
        sampler_config: JobConfig,
        sampler: SeparateSampler | None = None,
    ) -> None:
        self.context, self.config, self.strategy = context, context.config, context.strategy
        self.loss, self.advantages, self.sampler = loss, advantages, sampler
        inputs, config, layout = context.inputs, context.config, context.strategy.layout
        assert inputs.prompts is not None and inputs.reward is not None
        self.reward = inputs.reward
        with consensus(layout.host_group, "the job's prompts") as facts:
            self.stream = prompt_stream(config, inputs)
            # The fingerprint of the texts, compared before, does not cover the key `domain` of a line.
            facts.equal(
                "the prompts of each domain", repr(self.stream.state_dict()), "Give all machines the same files"
            )
        self.async_rollouts = AsyncRollouts(context, self.stream, sampler_config) if config.has_sampler else None
        parts = dict(advantages.stateful_parts())
        if self.async_rollouts is not None and config.partial_rollout:
            parts[ARRIVALS] = self.async_rollouts.arrivals
        self.state = CompositeState(self.stream, **parts)
        self.mini_batch_size = config.mini_batch_size(layout.dp_size)
        self.comparison = ModeComparison(config.actor_train, layout, sequence_length=config.sequence_length or 1)
        self.evaluator = self._make_evaluator()
        is_remote = wants_reference(config) and config.own_devices("reference") is not None
        self.remote_reference = RemoteReference(config, self.strategy, context.start_workers) if is_remote else None
        self.reference = None if is_remote else make_reference(config, self.strategy)
        self.critic = Critic(config, self.strategy) if uses_critic(config) else None
        self.teacher = teacher_of(config, self.strategy)
        context.add_models(reference=self.reference, critic=self.critic, teacher=self.teacher)
        self._metrics: Metrics = {}
        """Metrics of the step in progress."""
        self._sample_log: list[dict[str, Any]] = []

    def run(self) -> None:
        """Runs all steps. The first row has the evaluation before any update, the last row the one after all."""
        config, checkpoints = self.config, self.context.checkpoints
        with contextlib.ExitStack() as exit_stack:
            for remote in (self.async_rollouts, self.remote_reference):
                if remote is not None:
                    exit_stack.callback(remote.close)
            self.strategy.start_phase(self.context.schedule)
            reference = self.reference or self.remote_reference
            critic = None if self.critic is None else self.critic.strategy
            completed_steps = checkpoints.restore(PHASE, config.max_steps, self.state, reference, critic)
            if self.reference is not None and self.reference.has_own_weights and config.is_offload_states:
                self.reference.offload_states("parameters")
            self.context.start_phase(PHASE, config.max_steps, completed_steps, self.context.schedule)
            self._notify_remainder()
            if self.remote_reference is not None:
                self.remote_reference.begin()
            if self.async_rollouts is not None:
                self.async_rollouts.start_after(completed_steps)
            for step in range(completed_steps + 1, config.max_steps + 1):
                self._step(step)
                checkpoints.save_if_due(PHASE, step, config.max_steps, self.state, reference, critic)

    def _notify_remainder(self) -> None:
        """Prints a notice if a step's last mini-batch is smaller than the others: it has the same learning rate."""
        notice = mini_batches(self.config.samples_per_rollout, self.mini_batch_size, seed=0).notice
        if notice is not None:
            cure = "make rollout_batch_size x num_return_sequences_in_group a multiple of the mini-batch"
            self.context.recorder.progress.note(f"notice: {notice} If that is not intended, {cure}.")

    def _step(self, step: int) -> None:
        """Runs one RL step and its evaluation, and records its row of metrics."""
        config, strategy = self.config, self.strategy
        started, earlier_offloads = time.perf_counter(), self._offload_stats
        self._metrics, self._sample_log = {}, []
        with self._sampling():
            evaluated = self._evaluate(0) if step == 1 else {}
            rollout_started = time.perf_counter()
            batch, scores, idle_ids = self._roll_out(step)
        update_started = time.perf_counter()
        updates = list(self._train(batch, scores, idle_ids, step))
        if self.async_rollouts is not None:
            self._metrics |= self.async_rollouts.publish_weights(step)
        if self.remote_reference is not None:
            self._metrics |= self.remote_reference.metrics()
        update_ended = time.perf_counter()
        is_due = step == config.max_steps or (config.eval_steps and step % config.eval_steps == 0)
        if is_due and not evaluated:
            with self._sampling():
                evaluated = self._evaluate(step)
        compared = comparison_metrics(self.comparison.tokens(plan.lengths) for plan, _ in updates)
        times = {
            "skipped_steps": strategy.skipped_steps,
            "rollout_seconds": update_started - rollout_started,
            "update_seconds": update_ended - update_started,
            "seconds": time.perf_counter() - started,
        }
        offloads = offload_metrics(earlier_offloads, self._offload_stats) if config.is_offload_states else {}
        metrics = merge_metrics(
            update_metrics(updates) if updates else {},
            score_metrics(scores) if self._has_rewards else rollout_metrics(scores) | {"reward": None},
            self._metrics,
            compared,
            evaluated,
            times,
            offloads,
        )
        metrics |= time_share_metrics(metrics, asynchronous=self.async_rollouts is not None)
        shown = {
            "reward": metrics["reward"],
            "length": metrics["response_length_mean"],
            "tokens/s": metrics.get("tokens_per_second"),
            "held-out": metrics.get("eval_reward"),
            "skipped": strategy.skipped_steps or None,
        }
        plan = updates[-1][0] if updates or self.critic is None else self.critic.plan
        assert plan is not None  # in a warm-up step of the critic, that of its last optimizer step
        self.context.record(step, metrics, shown=shown, plan=plan, sample_log=self._sample_log)

    @contextlib.contextmanager
    def _sampling(self) -> Iterator[None]:
        """Under `is_offload_states` frees the devices of gradients and optimizer for the block.

        After the block the sampler frees its memory for training.
        """
        if not self.config.is_offload_states:
            yield
            return
        with contextlib.ExitStack() as exit_stack:
            for model in (self.strategy, *(() if self.critic is None else (self.critic.strategy,))):
                exit_stack.enter_context(model.offloaded("gradients", "optimizer"))
            yield
            if self.sampler is not None:
                self.sampler.release_memory()

    @property
    def _offload_stats(self) -> OffloadStats:
        """Bytes moved between devices and host so far, and the seconds that it took, of all models."""
        critic = None if self.critic is None else self.critic.strategy
        models = (self.strategy, self.reference, self.sampler, critic, self.teacher)
        return sum((model.offload_stats for model in models if model is not None), OffloadStats())

    @property
    def _has_rewards(self) -> bool:
        """Whether rollouts are scored; distillation may have no rewards."""
        return self.config.has_reward or self.config.rollout_function is not None

    def _make_evaluator(self) -> Evaluator | None:
        inputs, config = self.context.inputs, self.config
        if inputs.heldout is None or not self._has_rewards:
            return None
        return Evaluator(
            prompts=inputs.heldout,
            tokenizer=inputs.tokenizer,
            reward=self.reward,
            settings=sampling_of(config, inputs.tokenizer, held_out=True),
            samples=config.eval_samples,
            prompt_length=config.prompt_length,
            seed=config.seed,
            shown=config.rollout_samples,
            function=self.context.rollout_function,
        )

    def _evaluate(self, updates: int) -> Metrics:
        """Evaluates the sampler after `updates` RL steps; returns held-out metrics, empty without held-out prompts."""
        if self.evaluator is None:
            return {}
        if self.async_rollouts is not None:
            scores = self.async_rollouts.evaluate(updates, *self.evaluator.request(updates))
            metrics, sample_log = evaluation_metrics(scores), scores.sample_log
        else:
            if self.sampler is not None:
                self.sampler.update(updates)
            metrics, sample_log = self.evaluator(self.sampler or self.strategy, number=updates)
        self._log_samples("eval", updates, sample_log)
        return {"eval_updates": updates, **metrics}

    def _log_samples(self, kind: str, version: int, lines: Sequence[dict[str, Any]]) -> None:
        """Adds lines of rollouts.jsonl; `version` is the RL step of the weights, for lines that do not name it."""
        self._sample_log += [{"kind": kind, "version": version, **line} for line in lines]

    def _roll_out(self, step: int) -> tuple[SampleBatch, StepScores, np.ndarray | None]:
        """Samples and scores a step; returns this rank's samples, the scores of all ranks, and idle ids.

        The samples have the fields that losses read. Idle samples, of which nothing is computed, are those of masked
        rollouts and groups without advantages; their ids, int64, are the same on every rank. None if there are none.
        """
        batch, scores, baselines = self._sample(step)
        self._log_samples("train", step - 1, scores.sample_log)
        if self.config.rollout_function is not None:
            self._metrics["turns_mean"] = float(scores.turns.mean())
            self._metrics["samples_mean"] = float(scores.samples.mean())
            if self.advantages.of_tokens is not None:
                require_single_samples(scores.samples, self.advantages.name)
        masked = self._masked_rollouts(scores)
        shaped = scores
        if self.config.shapes_rewards:
            shaped = replace(scores, rewards=shape_rewards(self.config, scores.rewards, scores.response_tokens))
            self._metrics["shaped_reward"] = float(shaped.rewards.mean())
        if self.advantages.of_turns:
            is_control = self.config.control == "shuffled"
            rng = np.random.default_rng(step_seed(self.config.seed, step)) if is_control else None
            turns, metrics = self.advantages.of_episodes(shaped.episodes, self.config.group_size, rng)
            self._metrics |= metrics
            advantages = np.array([np.abs(of_turns).max() for of_turns in turns])
            batch = with_turn_advantages(with_scores(batch, shaped, advantages), turns)
        else:
            advantages = self._compute_advantages(shaped, masked, step, baselines)
            batch = with_scores(batch, shaped, advantages)
        batch = mask_overlong(batch, torch.from_numpy(masked[batch[ROLLOUT_IDS].cpu().numpy()]))
        idle = masked
        if self.config.drop_zero_advantage_groups:
            idle = idle | zero_groups(advantages, self.config.group_size)
        # The id of a sample is its place among all samples of the step.
        return batch, scores, np.flatnonzero(idle.repeat(scores.samples)) if idle.any() else None

    def _masked_rollouts(self, scores: StepScores) -> np.ndarray:
        """Marks the rollouts that neither loss nor whitening counts: bool [n], the same on every rank."""
        config = self.config
        masked = np.zeros(len(scores.ids), dtype=bool)
        if config.max_len_mask:
            masked |= ~scores.finished
        if config.difficulty_mask:
            low, high = config.difficulty_low_threshold, config.difficulty_high_threshold
            masked |= outside_difficulty(scores.rewards, config.group_size, low, high)
        if config.reward_failure == "drop":
            masked |= scores.failed
        return masked

    def _sample(self, step: int) -> tuple[SampleBatch, StepScores, np.ndarray | None]:
        """Samples a step; returns this rank's responses, all ranks' scores, and rewards of greedy responses or None."""
        if self.sampler is not None:
            self.sampler.update(step - 1)
        if not self.advantages.greedy:
            draw = partial(self._draw_batch, step)
            sampled = sample_full_step(self.config, step, draw) if self.config.dynamic_sampling else draw(0)
            batch, scores, self._metrics = sampled
            return batch, scores, None
        prompts, sampling = next(self.stream), replace(self.context.sampling, seed=step_seed(self.config.seed, step))
        _, baselines = self._generate_and_score(prompts, replace(sampling, greedy=True, num_return_sequences=1))
        rollouts, scores = self._generate_and_score(prompts, sampling)
        scores = scores.add_mean_seconds(baselines)
        self._metrics["baseline_failures"] = int(baselines.failed.sum())
        if self.config.reward_failure == "drop":  # an advantage needs both rewards
            scores = scores.fail_with(baselines)
        return rollouts.batch, scores, baselines.rewards

    def _draw_batch(self, step: int, number: int) -> tuple[SampleBatch, StepScores, Metrics]:
        """Draws generation batch `number` of a step; returns this rank's responses, all ranks' scores, and metrics."""
        if self.async_rollouts is not None:
            return self.async_rollouts.take(step, number)
        sampling = replace(self.context.sampling, seed=step_seed(self.config.seed, step, number))
        rollouts, scores = self._generate_and_score(next(self.stream), sampling)
        return rollouts.batch, scores, {}

    def _generate_and_score(
        self, prompts: Sequence[Prompt], sampling: GenerationSettings
    ) -> tuple[Rollouts, StepScores]:
        rollouts = generate_rollouts(
            self.sampler or self.strategy,
            prompts,
            self.context.inputs.tokenizer,
            sampling,
            prompt_length=self.config.prompt_length,
            function=self.context.rollout_function,
        )
        return rollouts, score_rollouts(self.strategy, rollouts, self.reward, shown=self.config.rollout_samples)

    def _compute_advantages(
        self, scores: StepScores, masked: np.ndarray, step: int, baselines: np.ndarray | None
    ) -> np.ndarray:
        """Computes the advantages of all samples of the step: float64 [n], the same on every rank."""
        config = self.config
        with consensus(self.strategy.layout.host_group, "advantages") as facts:
            advantages = self.advantages(
                scores.rewards,
                config.group_size,
                response_tokens=np.where(masked, 0, scores.response_tokens),
                domains=scores.domains,
                baselines=baselines,
            )
            cure = "adv_estimator must give the same on every rank"
            facts.equal("the advantages", digest(advantages.tobytes()), cure)
        if config.control == "shuffled":
            return shuffled(advantages, np.random.default_rng(step_seed(config.seed, step)))
        return advantages

    def _train(
        self, batch: SampleBatch, scores: StepScores, idle_ids: np.ndarray | None, step: int
    ) -> Iterator[tuple[Plan, StepResult]]:
        config = self.config
        sources = (self.advantages.of_tokens, self.sampler, self.teacher, config.train_infer_correction)
        adds_fields = any(source is not None for source in sources)
        seed = step_seed(config.seed, step)
        return train_on_rollouts(
            self.strategy,
            batch,
            self.loss,
            mini_batch_size=self.mini_batch_size,
            epochs=config.ppo_epochs,
            rollout_ids=np.arange(len(scores.ids)).repeat(scores.samples),
            batch_balance=config.batch_balance,
            seed=seed,
            idle_ids=idle_ids,
            reference=self.reference,
            remote_reference=self.remote_reference,
            add_fields=partial(self._add_fields, domains=scores.domains, seed=seed) if adds_fields else None,
            router_replay=config.actor_train.router_replay.mode == "R2",
            update=self.critic is None or step > config.critic_warmup,
        )

    def _add_fields(self, batch: SampleBatch, domains: np.ndarray, seed: int) -> SampleBatch:
        """Adds fields of other roles, and advantages, to `batch` with log-probs; trains the critic. Collective.

        Filters of `train_infer_correction` come last: advantages are those of all sampled tokens.
        """
        if self.sampler is not None:
            self._metrics |= self.sampler.metrics(batch)
        if self.teacher is not None:
            batch = self.teacher.add_fields(batch, loss_spec(self.loss).masks)
            self._metrics |= self.teacher.metrics()
        if self.critic is not None:
            batch = self.critic.add_values(batch)
        if self.advantages.of_tokens is not None:
            batch, metrics = self.advantages.of_tokens(batch, self.strategy.layout, domains)
            self._metrics |= metrics
        if self.critic is not None:
            self._metrics |= self.critic.train(batch, seed)
        if self.config.train_infer_correction is not None:
            batch, metrics = with_correction(batch, self.config.train_infer_correction, self.strategy.layout)
            self._metrics |= metrics
        return batch
