"""The job: a supervised warm-up, then GRPO, both through one strategy, from one configuration."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from roll_batching.config import JobConfig, TrainingArgs
from roll_batching.data import FieldSpec, SampleBatch
from roll_batching.data.epochs import DocumentStream, PromptStream
from roll_batching.distributed import consensus
from roll_batching.losses import PolicyLoss, mask_overlong
from roll_batching.losses.metric_kinds import as_numbers, join_parts
from roll_batching.observe.metrics_file import Row
from roll_batching.rl.advantages import AdvantageRule, compute_advantages, shuffled, zero_groups
from roll_batching.rl.checkpoint import JobCheckpoints
from roll_batching.rl.comparison import ModeComparison
from roll_batching.rl.evaluation import Evaluator
from roll_batching.rl.folder import EarlierRun, folder_of, held
from roll_batching.rl.inputs import JobInputs, load_inputs
from roll_batching.rl.recorder import RunRecorder
from roll_batching.rl.rollout import StepScores, generate_rollouts, score_rollouts, start_reward
from roll_batching.rl.update import Update, UpdateSettings, train_on_rollouts
from roll_batching.rl.warmup import train_on_documents
from roll_batching.strategy import GenerationSettings, MegatronInferStrategy, MegatronTrainStrategy

_AGGREGATION = {
    "token-mean": "token_mean",
    "seq-mean-token-mean": "sequence_mean",
    "seq-mean-token-sum": "sequence_sum",
}


def run_job(config: JobConfig) -> None:
    """Run the job that `config` describes, as one of its ranks. Every rank calls it.

    Leaves metrics, the resolved configuration and the learning curve in the run's folder. Raises ConfigError or
    DataError before the model is built when files or settings are wrong, and RankError or LossError, the same
    on all ranks, for what only shows while it runs.
    """
    config.check_runnable()
    inputs = load_inputs(config)
    with contextlib.ExitStack() as until_the_end:
        Job(config, inputs, until_the_end).run()


class Job:
    """One run: the strategy, its data streams, and what they leave behind."""

    def __init__(self, config: JobConfig, inputs: JobInputs, until_the_end: contextlib.ExitStack) -> None:
        self.config, self.inputs = config, inputs
        sampling = config.actor_infer.generating_args
        self.schedule = rl_schedule(config, config.dp_size(int(os.environ.get("WORLD_SIZE", "1"))))
        worker = config.actor_train.model_copy(update={"training_args": self.schedule})
        self.strategy = MegatronTrainStrategy(worker, seed=config.seed, temperature=sampling.temperature)
        self.strategy.initialize()
        layout = self.strategy.layout
        with consensus(layout.host_group, "the job's inputs") as facts:
            facts.equal("the data files", inputs.fingerprint, "Give all machines the same files")
            if torch.distributed.get_rank() == 0:
                until_the_end.enter_context(held(folder_of(config)))
        if inputs.reward is not None:
            until_the_end.callback(inputs.reward.close)
            start_reward(layout, inputs.reward)
        self.checkpoints = JobCheckpoints(config, folder_of(config), self.strategy)
        self.recorder = RunRecorder(config, enabled=torch.distributed.get_rank() == 0)
        self._open = False
        self.generation = GenerationSettings(
            max_new_tokens=sampling.max_new_tokens or 1,
            eos_token_id=inputs.tokenizer.eos_token_id,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            greedy=not sampling.do_sample,
            num_return_sequences=config.group_size,
        )

    def run(self) -> None:
        """Warm-up, RL, and the closing table."""
        try:
            if self.config.warmup is not None and not self.checkpoints.is_past("warmup"):
                self._warm_up()
            if self.config.max_steps:
                Grpo(self).run()
        finally:
            self.recorder.close()
        batching = self.strategy.batching.train
        fixed = batching.mode == "padded" and batching.padded_length is not None
        self.recorder.conclude("full" if fixed else batching.mode)

    def begin(self, phase: str, steps: int, done: int) -> None:
        """A phase of `steps` steps begins after `done` of them, everything being built and loaded. Collective.

        With the first one the folder becomes this run's: what an earlier run left makes way.
        """
        if not self._open:
            with consensus(self.strategy.layout.host_group, "opening the run's folder"):
                if torch.distributed.get_rank() == 0:
                    earlier = EarlierRun(self.recorder.folder)
                    self.checkpoints.make_way(earlier)
                    self.recorder.open(earlier, self.checkpoints.kept_rows)
            self._open = True
        self.recorder.start(phase, steps, done)

    def _warm_up(self) -> None:
        warmup, strategy = self.config.warmup, self.strategy
        assert warmup is not None and self.inputs.corpus is not None
        args, dp_size = warmup.training_args, strategy.layout.dp_size
        size = args.per_device_train_batch_size * args.gradient_accumulation_steps * dp_size
        stream = DocumentStream(self.inputs.corpus, size, seed=self.config.seed)
        strategy.start_phase(args)
        behind = self.checkpoints.restore("warmup", stream)
        self.begin("warmup", args.max_steps, behind)
        for step in range(behind + 1, args.max_steps + 1):
            started = time.perf_counter()
            plan, result = train_on_documents(
                strategy, next(stream), self.inputs.tokenizer, max_length=self.config.sequence_length or 1
            )
            row = update_row([Update(plan=plan, result=result)])
            row |= {"reward": None, "skipped_steps": strategy.skipped_steps}
            row["seconds"] = time.perf_counter() - started
            self.recorder.step(step, row, shown={"loss": result.loss})
            self.checkpoints.save_if_due("warmup", step, args.max_steps, stream)


@dataclass(frozen=True, kw_only=True)
class _Rollout:
    """What an RL step trains on."""

    home: SampleBatch
    """This rank's samples: `input_ids`, `response_mask`, `advantages`."""
    idle: SampleBatch | None
    """Those of them that the job leaves out of the computation: overlong, or of a group without advantages. None
    where it leaves out nothing, on every rank."""
    scores: StepScores


class Grpo:
    """The RL phase: prompts, rollouts, rewards, advantages, balanced training steps."""

    def __init__(self, job: Job) -> None:
        self.job, self.config, self.strategy = job, job.config, job.strategy
        inputs, config, layout = job.inputs, job.config, job.strategy.layout
        assert inputs.prompts is not None and inputs.reward is not None
        self.reward = inputs.reward
        self.stream = PromptStream(inputs.prompts, config.rollout_batch_size, seed=config.seed)
        self.rule = advantage_rule(config)
        self.loss = policy_loss(config)
        self.settings = UpdateSettings(
            mini_batch_size=config.mini_batch_size(layout.dp_size),
            epochs=config.ppo_epochs,
        )
        self.comparison = ModeComparison(config.actor_train, layout, sequence_length=config.sequence_length or 1)
        self.evaluator = self._evaluator()
        self.reference = self._reference()

    def run(self) -> None:
        """All steps. The first row holds the evaluation before any update, the last the one after all."""
        config, strategy, recorder, checkpoints = self.config, self.strategy, self.job.recorder, self.job.checkpoints
        strategy.start_phase(self.job.schedule)
        behind = checkpoints.restore("rl", self.stream, self.reference)
        self.job.begin("rl", config.max_steps, behind)
        for step in range(behind + 1, config.max_steps + 1):
            started = time.perf_counter()
            before = self._evaluate(0) if step == 1 else {}
            rolling = time.perf_counter()
            rollout = self._roll_out(step)
            training = time.perf_counter()
            updates = list(self._train(rollout, step))
            done = time.perf_counter()
            due = step == config.max_steps or (config.eval_steps and step % config.eval_steps == 0)
            after = self._evaluate(step) if due and not before else {}
            row = update_row(updates) | score_row(rollout.scores) | self._compare(updates) | before | after
            row |= {
                "skipped_steps": strategy.skipped_steps,
                "rollout_seconds": training - rolling,
                "update_seconds": done - training,
                "seconds": time.perf_counter() - started,
            }
            shown = {"reward": row["reward"], "length": row["response_length_mean"]}
            recorder.step(step, row, shown=shown | {"held-out": row.get("eval_reward")})
            checkpoints.save_if_due("rl", step, config.max_steps, self.stream, self.reference)

    def _evaluator(self) -> Evaluator | None:
        inputs, config = self.job.inputs, self.config
        if inputs.heldout is None:
            return None
        return Evaluator(
            prompts=inputs.heldout,
            tokenizer=inputs.tokenizer,
            reward=self.reward,
            settings=self.job.generation,
            samples=config.eval_samples,
            prompt_length=config.prompt_length,
            seed=config.seed,
        )

    def _reference(self) -> MegatronInferStrategy | None:
        """A frozen copy of the policy as RL begins, when the loss asks for it."""
        if not self.config.kl_coef or self.config.reference is None:
            return None
        reference = MegatronInferStrategy(
            self.config.reference, seed=self.config.seed, temperature=self.strategy.temperature
        )
        reference.initialize()
        reference.copy_weights_from(self.strategy)
        return reference

    def _evaluate(self, updates: int) -> Row:
        """Held-out figures after `updates` RL steps; nothing without held-out prompts."""
        if self.evaluator is None:
            return {}
        return {"eval_updates": updates, **self.evaluator(self.strategy, number=updates)}

    def _roll_out(self, step: int) -> _Rollout:
        config, strategy = self.config, self.strategy
        settings = replace(self.job.generation, seed=step_seed(config.seed, step))
        rollouts = generate_rollouts(
            strategy,
            next(self.stream),
            self.job.inputs.tokenizer,
            settings,
            prompt_length=config.prompt_length,
        )
        scores = score_rollouts(strategy, rollouts, self.reward)
        advantages = compute_advantages(
            scores.rewards, config.group_size, self.rule, response_tokens=scores.response_tokens
        )
        if config.control == "shuffled":
            advantages = shuffled(advantages, np.random.default_rng(step_seed(config.seed, step)))
        batch = rollouts.batch.without("log_probs")
        here = batch.ids.numpy()  # ids are places among the step's samples
        home = batch.with_fields(
            {"advantages": torch.from_numpy(advantages[here]).float()}, {"advantages": FieldSpec("sample")}
        )
        idle = np.zeros(len(here), dtype=bool)
        if config.drop_zero_advantage_groups:
            idle |= zero_groups(advantages, config.group_size)[here]
        if config.max_len_mask:
            overlong = ~scores.finished[here]
            home = mask_overlong(home, torch.from_numpy(overlong))
            idle |= overlong
        leaves_out = config.drop_zero_advantage_groups or config.max_len_mask
        return _Rollout(home=home, idle=home.select(np.flatnonzero(idle)) if leaves_out else None, scores=scores)

    def _train(self, rollout: _Rollout, step: int) -> Iterator[Update]:
        return train_on_rollouts(
            self.strategy,
            rollout.home,
            self.loss,
            self.settings,
            seed=step_seed(self.config.seed, step),
            idle=rollout.idle,
            reference=self.reference,
        )

    def _compare(self, updates: Sequence[Update]) -> Row:
        totals: dict[str, int] = {}
        for update in updates:
            for mode, tokens in self.comparison.tokens(update.plan.lengths).items():
                totals[mode] = totals.get(mode, 0) + tokens
        return {f"tokens_{mode}": tokens for mode, tokens in totals.items()}


def rl_schedule(config: JobConfig, dp_size: int) -> TrainingArgs:
    """The RL phase's training arguments, `max_steps` being the optimizer steps that it will make."""
    args = config.actor_train.training_args
    if args.max_steps > 0 or not config.max_steps:
        return args
    samples = config.rollout_batch_size * config.group_size
    per_step = -(-samples // config.mini_batch_size(dp_size)) * config.ppo_epochs
    return config.actor_train.with_training(max_steps=config.max_steps * per_step).training_args


def step_seed(seed: int, step: int) -> int:
    """A seed of its own for each step, 32 bits wide."""
    return int(np.random.SeedSequence([seed, step]).generate_state(1)[0])


def advantage_rule(config: JobConfig) -> AdvantageRule:
    """The rule that `adv_estimator` and its companions ask for."""
    grpo = config.adv_estimator == "grpo"
    return AdvantageRule(
        mean="group" if grpo else config.norm_mean_type,
        std=config.norm_std_type or ("group" if grpo else None),
        reward_clip=config.reward_clip,
        advantage_clip=config.advantage_clip,
        whiten=config.whiten_advantages,
    )


def policy_loss(config: JobConfig) -> PolicyLoss:
    """The clipped policy gradient with the configuration's coefficients."""
    low, high = config.clip_range
    return PolicyLoss(
        clip_low=low,
        clip_high=high,
        dual_clip=1 + 2 * config.pg_clip if config.dual_clip_loss else None,
        ratio="sequence" if config.importance_sampling == "seq" else "token",
        kl_coef=config.kl_coef,
        kl_bound=config.kl_loss_bound,
        entropy_coef=config.entropy_loss_coef,
        aggregation=_AGGREGATION[config.loss_agg_mode],  # type: ignore[arg-type]
    )


def update_row(updates: Sequence[Update]) -> Row:
    """A row's figures of one or several optimizer steps: sums of tokens and time, means of the rest.

    The loss's own metrics are joined by their kind, as over micro-batches: a `Mean` is one over all steps' tokens.
    """
    results, reports = [u.result for u in updates], [u.plan.report for u in updates]
    real, computed = sum(r.real_tokens for r in reports), sum(r.computed_tokens for r in reports)
    seconds = sum(r.seconds for r in results)
    row: Row = {
        "loss": _mean([r.loss for r in results]),
        "grad_norm": _mean([r.grad_norm for r in results]),
        "lr": results[-1].lr,
        "tokens": real,
        "computed_tokens": computed,
        "train_seconds": seconds,
        "tokens_per_second": real / seconds,
        "padding_share": 1 - real / computed,
        "imbalance": _mean([r.imbalance for r in reports]),
        "micro_batches": sum(r.num_micro_batches for r in reports),
        "fillers": sum(r.fillers for r in reports),
    }
    return row | as_numbers(join_parts(r.joined_metrics for r in results))


def score_row(scores: StepScores) -> Row:
    """A row's figures of the step's rollouts."""
    return {
        "reward": float(scores.rewards.mean()),
        "reward_std": float(scores.rewards.std()),
        "response_length_mean": float(scores.response_tokens.mean()),
        "response_length_max": int(scores.response_tokens.max()),
        "length_max_over_mean": float(scores.lengths.max() / scores.lengths.mean()),
        "finished_share": float(scores.finished.mean()),
        **{f"mark/{name}": float(mark.mean()) for name, mark in scores.marks.items()},
    }


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
