"""The RL phase: prompts, rollouts, rewards, advantages, balanced training steps."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch

from roll_batching.distributed import consensus, digest
from roll_batching.jobs.config import JobConfig
from roll_batching.jobs.config.objective_rules import wants_reference
from roll_batching.jobs.objectives.advantages import outside_difficulty, shuffled, zero_groups
from roll_batching.jobs.objectives.from_config import Advantages, sampling_of
from roll_batching.jobs.objectives.running import CompositeState
from roll_batching.jobs.observe.metrics_file import Row
from roll_batching.jobs.rl.async_rollouts import AsyncRollouts
from roll_batching.jobs.rl.comparison import ModeComparison
from roll_batching.jobs.roles.remote_reference import RemoteReference
from roll_batching.jobs.rollouts.evaluation import Evaluator
from roll_batching.jobs.rollouts.prompts import prompt_stream
from roll_batching.jobs.rollouts.rollout import CopySource, Rollouts, StepScores, generate_rollouts, score_rollouts
from roll_batching.jobs.rollouts.rows import comparison_row, merged, offload_row, score_row, timeline_row, update_row
from roll_batching.jobs.run.run import Run
from roll_batching.jobs.seeds import step_seed
from roll_batching.jobs.steps.update import Update, UpdateSettings, train_on_rollouts
from roll_batching.jobs.texts.texts import Prompt
from roll_batching.losses import mask_overlong
from roll_batching.samples import FieldSpec, SampleBatch, mini_batches
from roll_batching.strategy import GenerationSettings, MegatronInferStrategy
from roll_batching.strategy.offload import Moved

PHASE = "rl"
"""Its name in rows and checkpoints."""


@dataclass(frozen=True, kw_only=True)
class Objective:
    """What the policy learns from."""

    loss: Any
    """A loss object (see `losses.contract`)."""
    advantages: Advantages


@dataclass(frozen=True, kw_only=True)
class _Scored:
    """What a step trains on."""

    home: SampleBatch
    """This rank's samples, with the fields that `config.losses.ROLLOUT_FIELDS` promises, less the other models'
    log-probs."""
    idle: SampleBatch | None
    """Those of them that are not computed: masked, or of a group without advantages. None, on every rank, where the
    step has no such sample."""
    scores: StepScores


class Grpo:
    """The RL phase of a run.

    Args:
        run: what the job's phases share.
        objective: what the policy learns from.
        served: the job's settings, with the URLs of its engine's servers.
        copy: what samples; None: the model in training, or who draws ahead of it.
    """

    def __init__(self, run: Run, objective: Objective, served: JobConfig, copy: CopySource | None = None) -> None:
        self.copy = copy
        self.shared, self.config, self.strategy, self.objective = run, run.config, run.strategy, objective
        inputs, config, layout = run.inputs, run.config, run.strategy.layout
        assert inputs.prompts is not None and inputs.reward is not None
        self.reward = inputs.reward
        with consensus(layout.host_group, "the job's prompts") as facts:
            self.stream = prompt_stream(config, inputs)
            # A line's domain is no part of the texts, which were compared.
            facts.equal(
                "the prompts of each domain", repr(self.stream.state_dict()), "Give all machines the same files"
            )
        self.ahead = AsyncRollouts(run, self.stream, served) if config.has_sampler else None
        self.progress = CompositeState(self.stream, **objective.advantages.carried())
        self._columns: Row = {}
        self._said: list[dict[str, Any]] = []
        self.settings = UpdateSettings(
            mini_batch_size=config.mini_batch_size(layout.dp_size),
            epochs=config.ppo_epochs,
            batch_balance=config.batch_balance,
        )
        self.comparison = ModeComparison(config.actor_train, layout, sequence_length=config.sequence_length or 1)
        self.evaluator = self._evaluator()
        apart = wants_reference(config) and config.own_devices("reference") is not None
        self.apart = RemoteReference(config, run.strategy, run.start_workers) if apart else None
        self.reference = None if apart else self._reference()

    def run(self) -> None:
        """All steps. The first row holds the evaluation before any update, the last the one after all."""
        config, checkpoints = self.config, self.shared.checkpoints
        with contextlib.ExitStack() as until_the_end:
            for one in (self.ahead, self.apart):
                if one is not None:
                    until_the_end.callback(one.close)
            self.strategy.start_phase(self.shared.schedule)
            behind = checkpoints.restore(PHASE, config.max_steps, self.progress, self.reference or self.apart)
            if self.reference is not None and config.is_offload_states:
                self.reference.offload_states("parameters")
            self.shared.begin(PHASE, config.max_steps, behind)
            self._announce_remainder()
            if self.apart is not None:
                self.apart.begin()
            if self.ahead is not None:
                self.ahead.begin(behind)
            self._run(behind)

    def _announce_remainder(self) -> None:
        """Tells of a last mini-batch that is smaller than the others: its step has the same learning rate."""
        notice = mini_batches(self.config.samples_per_rollout, self.settings.mini_batch_size, seed=0).notice
        if notice is not None:
            cure = "make rollout_batch_size x num_return_sequences_in_group a multiple of the mini-batch"
            self.shared.recorder.progress.note(f"notice: {notice} If that is not meant, {cure}.")

    def _run(self, behind: int) -> None:
        config, strategy, checkpoints = self.config, self.strategy, self.shared.checkpoints
        for step in range(behind + 1, config.max_steps + 1):
            started, moved = time.perf_counter(), self._moved
            with self._sampling():
                before = self._evaluate(0) if step == 1 else {}
                rolling = time.perf_counter()
                scored = self._roll_out(step)
            training = time.perf_counter()
            updates = list(self._train(scored, step))
            if self.ahead is not None:
                self._columns |= self.ahead.trained(step)
            if self.apart is not None:
                self._columns |= self.apart.columns()
            done = time.perf_counter()
            due = step == config.max_steps or (config.eval_steps and step % config.eval_steps == 0)
            evaluated = before
            if due and not before:
                with self._sampling():
                    evaluated = self._evaluate(step)
            compared = comparison_row(self.comparison.tokens(update.plan.lengths) for update in updates)
            times = {
                "skipped_steps": strategy.skipped_steps,
                "rollout_seconds": training - rolling,
                "update_seconds": done - training,
                "seconds": time.perf_counter() - started,
            }
            offloads = offload_row(moved, self._moved) if config.is_offload_states else {}
            figures = (self._columns, compared, evaluated, times, offloads)
            row = merged(update_row(updates), score_row(scored.scores), *figures)
            row |= timeline_row(row, ahead=self.ahead is not None)
            shown = {"reward": row["reward"], "length": row["response_length_mean"]}
            self.shared.record(step, row, shown=shown | {"held-out": row.get("eval_reward")}, said=self._said)
            self._said = []
            checkpoints.save_if_due(PHASE, step, config.max_steps, self.progress, self.reference or self.apart)

    @contextlib.contextmanager
    def _sampling(self) -> Iterator[None]:
        """The policy answers prompts: what only training needs makes room, and a copy that samples makes it after."""
        if not self.config.is_offload_states:
            yield
            return
        with self.strategy.offloaded("gradients", "optimizer"):
            yield
            if self.copy is not None:
                self.copy.rest()

    @property
    def _moved(self) -> Moved:
        """What moving states took so far."""
        return sum((one.moved for one in (self.strategy, self.reference, self.copy) if one is not None), Moved())

    def _evaluator(self) -> Evaluator | None:
        inputs, config = self.shared.inputs, self.config
        if inputs.heldout is None:
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
        )

    def _reference(self) -> MegatronInferStrategy | None:
        """A frozen copy of the policy as RL begins, when the loss asks for it."""
        if self.config.reference is None or not wants_reference(self.config):
            return None
        reference = MegatronInferStrategy(
            self.config.reference, seed=self.config.seed, temperature=self.strategy.temperature
        )
        reference.initialize(weights=False)
        reference.copy_weights_from(self.strategy)
        return reference

    def _evaluate(self, updates: int) -> Row:
        """Held-out figures after `updates` RL steps; nothing without held-out prompts."""
        if self.evaluator is None:
            return {}
        if self.copy is not None:
            self.copy.update(updates)
        found = self.evaluator(self.copy or self.strategy, number=updates)
        self._told("eval", updates, found.said)
        return {"eval_updates": updates, **found.figures}

    def _told(self, kind: str, version: int, said: Sequence[Row]) -> None:
        """Keeps lines for the recorder; `version`, where a line has none, counts the RL steps that made the weights."""
        self._said += [{"kind": kind, "version": version, **line} for line in said]

    def _roll_out(self, step: int) -> _Scored:
        config = self.config
        batch, scores, found_before = self._rollouts(step)
        self._told("train", step - 1, scores.said)
        masked = self._masked(scores)
        advantages = self._advantages(scores, masked, step, found_before)
        home = _with_scores(batch, scores, advantages)
        here = home.ids.numpy()  # ids are places among the step's samples
        home = mask_overlong(home, torch.from_numpy(masked[here]))
        idle = masked
        if config.drop_zero_advantage_groups:
            idle = idle | zero_groups(advantages, config.group_size)
        left_out = home.select(np.flatnonzero(idle[here])) if idle.any() else None
        return _Scored(home=home, idle=left_out, scores=scores)

    def _masked(self, scores: StepScores) -> np.ndarray:
        """Samples of the step that no loss and no whitening counts, bool [n], the same on every rank."""
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

    def _rollouts(self, step: int) -> tuple[SampleBatch, StepScores, dict[str, np.ndarray]]:
        """This rank's responses, all scores, and what the advantages ask for beside them."""
        if self.ahead is not None:
            drawn = self.ahead.take(step)
            self._columns = drawn.columns
            return drawn.batch, drawn.scores, {}
        self._columns = {}
        if self.copy is not None:
            self.copy.update(step - 1)
        prompts, sampling = next(self.stream), replace(self.shared.sampling, seed=step_seed(self.config.seed, step))
        if not self.objective.advantages.greedy:
            rollouts, scores = self._scored(prompts, sampling)
            return rollouts.batch, scores, {}
        _, answers = self._scored(prompts, replace(sampling, greedy=True, num_return_sequences=1))
        rollouts, scores = self._scored(prompts, sampling)
        scores = scores.after(answers)
        self._columns["baseline_failures"] = int(answers.failed.sum())
        if self.config.reward_failure == "drop":  # an advantage needs both rewards
            scores = scores.failing_with(answers)
        return rollouts.batch, scores, {"baselines": answers.rewards}

    def _scored(self, prompts: Sequence[Prompt], sampling: GenerationSettings) -> tuple[Rollouts, StepScores]:
        rollouts = generate_rollouts(
            self.copy or self.strategy,
            prompts,
            self.shared.inputs.tokenizer,
            sampling,
            prompt_length=self.config.prompt_length,
        )
        return rollouts, score_rollouts(self.strategy, rollouts, self.reward, shown=self.config.rollout_samples)

    def _advantages(
        self, scores: StepScores, masked: np.ndarray, step: int, found_before: dict[str, np.ndarray]
    ) -> np.ndarray:
        """float64[n] of all samples of the step, the same on every rank."""
        config = self.config
        with consensus(self.strategy.layout.host_group, "advantages") as facts:
            found = self.objective.advantages(
                scores.rewards,
                config.group_size,
                response_tokens=np.where(masked, 0, scores.response_tokens),
                domains=scores.domains,
                **found_before,
            )
            facts.equal("the advantages", digest(found.tobytes()), "adv_estimator must give the same on every rank")
        if config.control == "shuffled":
            return shuffled(found, np.random.default_rng(step_seed(config.seed, step)))
        return found

    def _train(self, scored: _Scored, step: int) -> Iterator[Update]:
        finishes = self.objective.advantages.of_tokens is not None or self.copy is not None
        return train_on_rollouts(
            self.strategy,
            scored.home,
            self.objective.loss,
            self.settings,
            seed=step_seed(self.config.seed, step),
            idle=scored.idle,
            reference=self.reference,
            apart=self.apart,
            finish=partial(self._finish, domains=scored.scores.domains) if finishes else None,
        )

    def _finish(self, home: SampleBatch, domains: np.ndarray) -> SampleBatch:
        if self.copy is not None:
            self._columns |= self.copy.columns(home)
        if self.objective.advantages.of_tokens is not None:
            home, columns = self.objective.advantages.of_tokens(home, self.strategy.layout, domains)
            self._columns |= columns
        return home


def _with_scores(batch: SampleBatch, scores: StepScores, advantages: np.ndarray) -> SampleBatch:
    """This rank's samples with what a loss may read of how they were drawn and judged."""
    here = batch.ids.numpy()
    fields = {
        "advantages": torch.from_numpy(advantages[here]).float(),
        "rewards": torch.from_numpy(scores.rewards[here]).float(),
        "rollout_log_probs": batch["log_probs"],
    }
    sample, next_token = FieldSpec("sample"), FieldSpec("next_token")
    kinds = {"advantages": sample, "rewards": sample, "rollout_log_probs": next_token}
    return batch.without("log_probs").with_fields(fields, kinds)
