"""Passes of a step on one rank, on micro-batches of fake tensors."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch.utils._python_dispatch import _disable_current_modes

from roll_batching.jobs.config import JobConfig, WorkerConfig
from roll_batching.jobs.config.auto_caps import longest_sample
from roll_batching.jobs.config.objective_rules import wants_reference
from roll_batching.jobs.config.rl_rules import uses_critic
from roll_batching.jobs.config.task_rules import uses_teacher
from roll_batching.jobs.objectives.from_config import (
    critic_role,
    loss_of,
    schedule_of,
    supervised_schedule_of,
    value_loss_of,
)
from roll_batching.losses import SFTLoss, loss_spec
from roll_batching.losses.contract import VALUES as VALUE_FIELD
from roll_batching.modeling.cost import plan_flops
from roll_batching.planning import Plan, PlanConstraints
from roll_batching.planning.batching_spec import BatchingSpec
from roll_batching.planning.pipeline.schedule import legal_count
from roll_batching.planning.planner import SMALLEST_SAVING, cut_packs
from roll_batching.planning.prefixes import shared_positions
from roll_batching.samples import SampleBatch
from roll_batching.strategy import MegatronInferStrategy
from roll_batching.strategy.pack_features import constraints_of, pack_times_of, sharing_of
from roll_batching.strategy.roles import top_log_probs
from roll_batching.tools.rehearsal.fake_data import image_sizes, samples_of_critic
from roll_batching.tools.rehearsal.lengths import (
    Bin,
    fullest_bin,
    longest_bin,
    longest_groups,
    pack_sizes,
    plan_of_equal_bins,
    plan_of_step,
    with_one_size,
)
from roll_batching.tools.rehearsal.models import Frozen, Policy, RehearsedStrategy, SharedReference
from roll_batching.tools.rehearsal.recorder import Recorder
from roll_batching.tools.rehearsal.rollout import has_local_rollouts
from roll_batching.tools.rehearsal.task import (
    CRITIC,
    LOG_PROBS,
    MISMATCHED,
    MISMATCHED_REFERENCE,
    REFERENCE,
    TEACHER,
    VALUES,
    TrainingBatch,
)

ENCODER_NOTES = (
    "encoder: its attention is rehearsed as torch's; places where transformers' code waits for the sizes of images are "
    "not counted, and its FLOPs are computed ones, not the model's own",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Passes:
    """Passes of one step of a job."""

    config: JobConfig
    policy: Policy
    reference: Frozen | SharedReference | None
    loss: Any
    critic: Policy | None
    teacher: Frozen | None
    lengths: tuple[int, ...] | None
    """Tokens of the samples of an optimizer step; None: samples as long as the job allows."""
    micro_batches: int | None
    cp_size: int = 1
    """Context-parallel size of the packs, where each pack has its own."""

    @property
    def frozen_chunks(self) -> dict[str, Sequence[Any]]:
        """Chunks of the frozen models by kind of memory. A reference without own weights (adapters) is left out."""
        models: dict[str, Frozen | SharedReference | None] = {REFERENCE: self.reference, TEACHER: self.teacher}
        return {name: model.chunks for name, model in models.items() if model is not None and model.has_own_weights}

    @property
    def unit(self) -> int:
        """Number of samples that stay together: 2 for pairs."""
        return 2 if self.config.task == "dpo" else 1

    def align(self, config: JobConfig) -> None:
        """Sets the alignment of all plans to what the precision in `config` (FP8) needs; the models here have none."""
        models: dict[str, MegatronInferStrategy | None] = {
            "actor_train": self.policy,
            "reference": self.reference,
            "teacher": self.teacher,
            "critic": self.critic,
        }
        for name, strategy in models.items():
            role = getattr(config, name)
            if strategy is None or role is None or not strategy.has_own_weights:
                continue
            multiple = role.strategy_args.strategy_config.pack_multiple
            settings = dataclasses.replace(strategy.settings, pack_multiple=multiple)
            strategy.state = dataclasses.replace(strategy.state, settings=settings)

    def plan(self, strategy: MegatronInferStrategy, batching: BatchingSpec, count: int) -> Plan:
        """Plan of `count` equal micro-batches per rank, as full as `batching` allows.

        Where each pack has its own context-parallel size, packs have `cp_size`. If the plan of the step has no pack of
        this size (passes without gradient), packs have the largest size of the plan.
        """
        constraints = _constraints(strategy, batching)
        size = self.cp_size if constraints.has_cp_per_pack else constraints.cp_size
        if self.lengths is None:
            content = self._longest_content(strategy, with_one_size(constraints, size))
        else:
            step = self._step_plan(strategy, constraints)
            sizes = pack_sizes(step)
            size = size if size in sizes else sizes[-1]
            content = Bin(fullest_bin(step, size))
        whole = plan_of_equal_bins(constraints.without_slices, content, count, size)
        return cut_packs(whole, constraints, strategy.cost)

    def _longest_content(self, strategy: MegatronInferStrategy, constraints: PlanConstraints) -> Bin:
        """Samples of the fullest micro-batch: groups of responses to longest prompts where packs share prefixes."""
        longest, group = longest_sample(self.config), self.config.group_size
        prompt = min(self.config.prompt_length, longest)
        sharing = sharing_of(strategy.state)
        shared = (group - 1) * shared_positions(prompt)
        pays = shared >= SMALLEST_SAVING * group * longest or sharing is True
        if is_rl(self.config) and constraints.mode == "packed" and sharing and shared and pays:
            return longest_groups(constraints, longest, prompt, group)
        return Bin(longest_bin(constraints, longest, self.unit))

    def _step_plan(self, strategy: MegatronInferStrategy, constraints: PlanConstraints) -> Plan:
        """Plan of the whole optimizer step, whose lengths are known."""
        assert self.lengths is not None
        times = pack_times_of(strategy.state) if constraints.has_cp_per_pack else None
        return plan_of_step(self.lengths, constraints, strategy.cost, times, self.unit)

    def training(self) -> TrainingBatch:
        """Describes the policy's training micro-batch and optimizer step."""
        return self._training_of(self.policy)

    def critic_training(self) -> TrainingBatch | None:
        """Describes the critic's training micro-batch and optimizer step; None without a critic."""
        return None if self.critic is None else self._training_of(self.critic)

    def _training_of(self, policy: Policy) -> TrainingBatch:
        batching = policy.batching.train
        constraints = _constraints(policy, batching)
        rehearsed = self.plan(policy, batching, legal_count(1, constraints))
        step = rehearsed if self.lengths is None else self._step_plan(policy, constraints)
        micro_batches = len(rehearsed.fillers)
        in_step = step.num_micro_batches
        if step.blocks is not None:
            in_step = int((step.cp_sizes[~step.fillers] == self.cp_size).sum())
        return TrainingBatch(
            samples=len(rehearsed.samples) // micro_batches,
            model_flops=(plan_flops(rehearsed, policy.cost, policy.layout) or 0.0) / micro_batches,
            padding=step.report.padding_share,
            in_step=None if self.lengths is None else in_step,
        )

    def small_plan(self, policy: Policy) -> Plan:
        """Plan of the smallest possible training step of `policy`, which may be the critic."""
        layout = policy.layout
        constraints = _constraints(policy, policy.batching.train)
        rows = constraints.rows if constraints.mode == "padded" and constraints.rows else self.unit
        return plan_of_equal_bins(constraints, Bin([2] * rows), layout.pp_size, self.cp_size)

    def count(self) -> int:
        """Micro-batches of a pass: enough to fill the pipeline and start one more, unless set."""
        if self.micro_batches is not None:
            return self.micro_batches
        models: list[RehearsedStrategy | None] = [self.policy, self.reference, self.teacher]
        layouts = [model.layout for model in models if model is not None]
        # Interleaved schedules need a multiple of the pipeline's size.
        count = max(2, *(dims.pp_size + 1 if dims.vpp_size == 1 else 2 * dims.pp_size for dims in layouts))
        multiple = math.lcm(*(dims.pp_size for dims in layouts if dims.vpp_size > 1))
        return -(-count // multiple) * multiple

    def first_step(self) -> None:
        """Run a small step of every trained model, which creates the optimizer state."""
        self._step(self.small_plan(self.policy))
        if self.critic is not None:
            self._train_critic(self.critic, self.small_plan(self.critic))

    def roll_out(self) -> tuple[str, ...]:
        """Rehearse rollouts of the training model; returns notes for the report."""
        return (self.policy.roll_out(self.config),) if has_local_rollouts(self.config) else ()

    def host_notes(self) -> tuple[str, ...]:
        """Notes for the report: images, and host memory of the teacher's likely tokens."""
        policy, config, dp_size = self.policy, self.config, self.policy.layout.dp_size
        notes: list[str] = []
        if policy.state.vision is not None and policy.images is None:
            notes.append("images: none, as actor_train.data_args.images is not set")
        elif policy.state.vision is not None and policy.images is not None:
            plan = self.plan(policy, policy.batching.train, self.count())
            notes += [policy.images.note(plan.lengths.tolist()), *ENCODER_NOTES]
        if self.teacher is not None:
            samples = config.samples_per_rollout if is_rl(config) else config.mini_batch_size(dp_size)
            tokens = sum(self.lengths) / len(self.lengths) if self.lengths else longest_sample(config)
            size = 8 * policy.top_k * tokens * -(-samples // dp_size)  # 8 bytes: fp32 log-prob and int32 token
            notes.append(
                f"teacher: {policy.top_k:,} likely tokens of each position, {8 * policy.top_k:,} bytes: "
                f"{size / (1 << 30):,.2f} GiB on the host of each data-parallel rank in a step, which pass between "
                "ranks"
            )
        return tuple(notes)

    def run(self, recorder: Recorder) -> dict[str, int]:
        """Run all planned passes of a step; returns the tokens of a micro-batch by pass."""
        tokens, policy = {}, self.policy
        if is_rl(self.config) and policy.batching.logprob_plan != "none":
            has_own_plan = policy.batching.logprob_plan == "own"
            batching = policy.batching.infer if has_own_plan else policy.batching.train
            tokens[LOG_PROBS] = self._log_probs(recorder, policy, self.plan(policy, batching, self.count()), LOG_PROBS)
        if (reference := self.reference) is not None:
            # SFT, DPO and KTO run a reference in the policy's layout on the plan of the step.
            planner: MegatronInferStrategy = policy
            batching = policy.batching.train
            if is_rl(self.config) or reference.layout.dims != policy.layout.dims:
                planner, batching = reference, reference.batching.infer
            plan = self.plan(planner, batching, self.count())
            tokens[REFERENCE] = self._log_probs(recorder, reference, plan, REFERENCE)
            if self.config.task == "kto":
                # These passes give the reference point of KTO.
                for name, model in ((MISMATCHED, policy), (MISMATCHED_REFERENCE, reference)):
                    plan = self.plan(model, model.batching.infer, self.count())
                    tokens[name] = self._log_probs(recorder, model, plan, name)
        if (teacher := self.teacher) is not None:
            plan = self.plan(teacher, teacher.batching.infer, self.count())
            tokens[TEACHER] = int(plan.tokens[0])
            with recorder.during(TEACHER):
                top_log_probs(teacher, teacher.samples(plan), plan, policy.top_k, masks=loss_spec(self.loss).masks)
        if self.critic is not None:
            tokens |= self._run_critic(recorder, self.critic)
        plan = self.plan(policy, policy.batching.train, self.count())
        tokens["training"] = int(plan.tokens[0])
        with recorder.during("optimizer"):
            self._step(plan)
        return tokens

    def _run_critic(self, recorder: Recorder, critic: Policy) -> dict[str, int]:
        """Runs the critic's pass for values and its training step; returns the tokens of a micro-batch of each."""
        forward, train = (
            self.plan(critic, batching, self.count()) for batching in (critic.batching.infer, critic.batching.train)
        )
        with recorder.during(VALUES):
            masks = loss_spec(value_loss_of(self.config)).masks
            critic.forward(_of_critic(critic, forward), forward, needs=(VALUE_FIELD,), masks=masks)
        with recorder.prefixed(CRITIC), recorder.during("optimizer"):
            self._train_critic(critic, train)
        return {VALUES: int(forward.tokens[0]), f"{CRITIC}training": int(train.tokens[0])}

    def _train_critic(self, critic: Policy, plan: Plan) -> None:
        loss = value_loss_of(self.config)
        with _disable_current_modes():
            local = _of_critic(critic, plan)
            counts = critic.count(local, loss)
        critic.train_step(local, plan, loss, counts=counts)

    def _log_probs(self, recorder: Recorder, strategy: RehearsedStrategy, plan: Plan, name: str) -> int:
        with recorder.during(name):
            strategy.compute_log_probs(strategy.samples(plan), plan, masks=loss_spec(self.loss).masks)
        return int(plan.tokens[0])

    def _step(self, plan: Plan) -> None:
        spec = loss_spec(self.loss)
        with _disable_current_modes():
            local = self.policy.samples(plan)
            if spec.prepare is not None:
                local = spec.prepare(local, self.policy.layout, self.config.seed)
            counts = self.policy.count(local, self.loss)
        self.policy.train_step(local, plan, self.loss, counts=counts)


def passes_of(
    config: JobConfig,
    recorder: Recorder,
    lengths: tuple[int, ...] | None = None,
    micro_batches: int | None = None,
    *,
    cp_size: int = 1,
    with_values: bool = False,
) -> Passes:
    """Build the models of `config` and return its passes. `with_values`: on real tensors with initialized weights."""
    policy = Policy(_with_schedule(config), seed=config.seed, temperature=config.logprob_temperature)
    policy.recorder, policy.with_values, policy.images = recorder, with_values, image_sizes(config)
    policy.initialize(weights=with_values)
    policy.trace_gradient_sync()
    reference: Frozen | SharedReference | None = None
    if config.max_steps and config.reference is not None and wants_reference(config):
        if policy.state.adapters is not None:
            reference = SharedReference(policy, config.reference)
        else:
            reference = Frozen(config.reference, seed=config.seed, temperature=policy.temperature)
        reference.recorder, reference.with_values, reference.images = recorder, with_values, policy.images
        if reference.has_own_weights:
            reference.initialize(weights=with_values)
    teacher = None
    if uses_teacher(config):
        assert config.teacher is not None and config.teacher.model_args.architecture is not None
        teacher = Frozen(config.teacher, seed=config.seed, temperature=config.teacher_temperature)
        teacher.recorder, teacher.with_values = recorder, with_values
        teacher.initialize(weights=with_values)
        policy.top_k = config.logits_topk or config.teacher.model_args.architecture.vocab_size
    critic = None
    if uses_critic(config):
        critic = Policy(critic_role(config, config.dp_size(dist.get_world_size())), seed=config.seed)
        critic.recorder, critic.with_values = recorder, with_values
        critic.initialize(weights=with_values)
        critic.trace_gradient_sync()
    return Passes(
        config=config,
        policy=policy,
        reference=reference,
        critic=critic,
        teacher=teacher,
        loss=loss_of(config) if config.max_steps else SFTLoss(),
        lengths=lengths,
        micro_batches=micro_batches,
        cp_size=cp_size,
    )


def _with_schedule(config: JobConfig) -> WorkerConfig:
    """Settings of the trained role with some learning-rate schedule, which the optimizer needs; any length serves."""
    dp_size = config.dp_size(dist.get_world_size())
    args = schedule_of(config, dp_size) if is_rl(config) else supervised_schedule_of(config, 1, 1)
    if args.max_steps < 1:
        args = config.actor_train.with_training(max_steps=1).training_args
    return config.actor_train.model_copy(update={"training_args": args})


def is_rl(config: JobConfig) -> bool:
    """Whether the main phase of the job is reinforcement learning."""
    return bool(config.max_steps) and not config.is_supervised


def _of_critic(critic: MegatronInferStrategy, plan: Plan) -> SampleBatch:
    with _disable_current_modes():
        return samples_of_critic(plan, critic.layout.dp_rank)


def _constraints(strategy: MegatronInferStrategy, batching: BatchingSpec) -> PlanConstraints:
    return constraints_of(strategy.state, batching)
