"""Passes of a step on one rank: the strategies themselves, on micro-batches of fake tensors."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import _disable_current_modes

from roll_batching.distributed import Facts
from roll_batching.jobs.config import JobConfig, WorkerConfig
from roll_batching.jobs.config.critic_rules import uses_critic
from roll_batching.jobs.config.objective_rules import wants_reference
from roll_batching.jobs.config.supervised import supervised
from roll_batching.jobs.objectives.from_config import (
    critic_role,
    loss_of,
    schedule_of,
    supervised_schedule_of,
    value_loss_of,
)
from roll_batching.losses import SFTLoss, loss_spec
from roll_batching.losses.contract import VALUES as VALUE_FIELD
from roll_batching.losses.contract import LossSpec
from roll_batching.modeling.cost import plan_flops
from roll_batching.packing.batch import PackedBatch
from roll_batching.planning import Plan, PlanConstraints
from roll_batching.planning.batching_spec import BatchingSpec
from roll_batching.planning.pipeline.num_micro_batches import legal_count
from roll_batching.planning.prefixes import shared_positions
from roll_batching.planning.role_planner import SMALLEST_SAVING
from roll_batching.rehearsal.fake_data import fake_pack, real_pack, samples_of, samples_of_critic
from roll_batching.rehearsal.lengths import (
    Bin,
    fullest_bin,
    longest_bin,
    longest_groups,
    longest_sample,
    pack_sizes,
    plan_of_equal_bins,
    plan_of_step,
    with_one_size,
)
from roll_batching.rehearsal.recorder import Recorder
from roll_batching.rehearsal.rollout import has_local_rollouts, rehearse_rollout
from roll_batching.rehearsal.task import CRITIC, LOG_PROBS, REFERENCE, VALUES, TrainingBatch
from roll_batching.samples import SampleBatch
from roll_batching.strategy import MegatronInferStrategy, MegatronTrainStrategy
from roll_batching.strategy.base_reference import BaseReference
from roll_batching.strategy.context_sizes import pack_times_of
from roll_batching.strategy.prefix_sharing import sharing_of
from roll_batching.strategy.schedule import Packs
from roll_batching.strategy.step_inputs import pack_inputs

_CPU = torch.device("cpu")


class _RehearsedStrategy(MegatronInferStrategy):
    """Strategy that packs real tensors on the host and computes on fake ones.

    Packing reads lengths and offsets, so it needs values.
    """

    recorder: Recorder
    with_values = False
    """Whether to compute on real tensors, for the tests that a rehearsal is compared with."""

    def _pack(self, facts: Facts, local: SampleBatch, plan: Plan, masks: Sequence[str] | None) -> list[PackedBatch]:
        state = self.state
        on_host = dataclasses.replace(state, layout=dataclasses.replace(state.layout, device=_CPU))
        with _disable_current_modes():
            packs = list(pack_inputs(on_host, facts, local, plan, masks))
        with self.recorder.during("inputs"):
            return [real_pack(pack) if self.with_values else fake_pack(pack, state.device) for pack in packs]

    def _pack_for(self, facts: Facts, local: SampleBatch, plan: Plan, spec: LossSpec) -> Packs:
        return super()._pack_for(facts, local, plan, dataclasses.replace(spec, check=_on_host(spec.check)))

    def _require_finite(self, outputs: SampleBatch) -> SampleBatch:
        return super()._require_finite(outputs) if self.with_values else outputs

    def _run(self, plan: Plan, packs: Packs, bind: Any, **options: Any) -> list[Any]:
        phase = contextlib.nullcontext() if options.get("forward_only") else self.recorder.during("step")
        with phase:
            return super()._run(plan, packs, bind, **options)


class Policy(_RehearsedStrategy, MegatronTrainStrategy):
    """Training strategy of the policy."""

    def trace_gradient_sync(self) -> None:
        """Record the gradient synchronization at the end of the schedule as a separate phase."""
        config = self.chunks[0].config
        finalize = config.finalize_model_grads_func

        def traced_finalize(*args: Any, **kwargs: Any) -> Any:
            with self.recorder.during("gradient sync"):
                return finalize(*args, **kwargs)

        config.finalize_model_grads_func = traced_finalize

    def roll_out(self, config: JobConfig) -> str:
        """Rehearse the rollouts of a step; returns a note for the report."""
        with self._evaluating():
            return rehearse_rollout(self.state, config, self.recorder)


class Reference(_RehearsedStrategy):
    """Frozen reference model."""


class SharedReference(_RehearsedStrategy, BaseReference):
    """The policy without its adapters."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Passes:
    """Passes of one step of a job."""

    config: JobConfig
    policy: Policy
    reference: Reference | SharedReference | None
    loss: Any
    critic: Policy | None
    lengths: tuple[int, ...] | None
    """Tokens of the samples of an optimizer step; None: samples as long as the job allows."""
    micro_batches: int | None
    cp_size: int = 1
    """Context-parallel size of the packs, where each pack has its own."""

    @property
    def unit(self) -> int:
        """Number of samples that stay together: 2 for pairs."""
        return 2 if self.config.task == "dpo" else 1

    def plan(self, strategy: MegatronInferStrategy, batching: BatchingSpec, count: int) -> Plan:
        """Plan of `count` equal micro-batches per rank, as full as `batching` allows.

        Where each pack has its own context-parallel size, packs have `cp_size`; those of a pass without gradient have
        the largest of their step if none has that.
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
        return plan_of_equal_bins(constraints, content, count, size)

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
        """The rehearsed training micro-batch and its optimizer step."""
        return self._training_of(self.policy)

    def critic_training(self) -> TrainingBatch | None:
        """The critic's, if there is one."""
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
            padding=1 - float(step.used[step.samples].sum()) / float(step.tokens.sum()),
            in_step=None if self.lengths is None else in_step,
        )

    def small_plan(self, policy: Policy) -> Plan:
        """Plan of the smallest possible step of the policy or the critic."""
        layout = policy.layout
        constraints = _constraints(policy, policy.batching.train)
        rows = constraints.rows if constraints.mode == "padded" and constraints.rows else self.unit
        return plan_of_equal_bins(constraints, Bin([2] * rows), layout.pp_size, self.cp_size)

    def count(self) -> int:
        """Micro-batches of a pass: enough to fill the pipeline and start one more, unless set."""
        layout = self.policy.layout
        if self.micro_batches is not None:
            return self.micro_batches
        if layout.pp_size == 1:
            return 2
        return layout.pp_size + 1 if layout.vpp_size == 1 else 2 * layout.pp_size

    def first_step(self) -> None:
        """Run a small step of every trained model, which creates the optimizer state."""
        self._step(self.small_plan(self.policy))
        if self.critic is not None:
            self._train_critic(self.critic, self.small_plan(self.critic))

    def roll_out(self) -> tuple[str, ...]:
        """Rehearse rollouts of the training model; returns notes for the report."""
        return (self.policy.roll_out(self.config),) if has_local_rollouts(self.config) else ()

    def run(self, recorder: Recorder) -> dict[str, int]:
        """Run all planned passes of a step; returns the tokens of a micro-batch by pass."""
        tokens, policy = {}, self.policy
        if is_rl(self.config) and policy.batching.logprob_plan != "none":
            own = policy.batching.logprob_plan == "own"
            batching = policy.batching.infer if own else policy.batching.train
            tokens[LOG_PROBS] = self._log_probs(recorder, policy, self.plan(policy, batching, self.count()), LOG_PROBS)
        if (reference := self.reference) is not None:
            if is_rl(self.config):
                plan = self.plan(reference, reference.batching.infer, self.count())
            else:
                plan = self.plan(
                    policy, policy.batching.train, self.count()
                )  # SFT and DPO run the reference on the plan of the step
            tokens[REFERENCE] = self._log_probs(recorder, reference, plan, REFERENCE)
        if self.critic is not None:
            tokens |= self._run_critic(recorder, self.critic)
        plan = self.plan(policy, policy.batching.train, self.count())
        tokens["training"] = int(plan.tokens[0])
        with recorder.during("optimizer"):
            self._step(plan)
        return tokens

    def _run_critic(self, recorder: Recorder, critic: Policy) -> dict[str, int]:
        """Values and a training step of the critic; the tokens of a micro-batch of both."""
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

    def _log_probs(self, recorder: Recorder, strategy: _RehearsedStrategy, plan: Plan, name: str) -> int:
        with recorder.during(name):
            strategy.compute_log_probs(_local(strategy, plan), plan, masks=loss_spec(self.loss).masks)
        return int(plan.tokens[0])

    def _step(self, plan: Plan) -> None:
        spec = loss_spec(self.loss)
        with _disable_current_modes():
            local = _local(self.policy, plan)
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
    """Build the models of `config` and return its passes; `with_values`: on real tensors with initialized weights."""
    policy = Policy(_with_schedule(config), seed=config.seed, temperature=config.logprob_temperature)
    policy.recorder, policy.with_values = recorder, with_values
    policy.initialize(weights=with_values)
    policy.trace_gradient_sync()
    reference: Reference | SharedReference | None = None
    if config.max_steps and config.reference is not None and wants_reference(config):
        if policy.state.adapters is not None:
            reference = SharedReference(policy, config.reference)
        else:
            reference = Reference(config.reference, seed=config.seed, temperature=policy.temperature)
        reference.recorder, reference.with_values = recorder, with_values
        if reference.has_own_weights:
            reference.initialize(weights=with_values)
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
        loss=loss_of(config) if config.max_steps else SFTLoss(),
        lengths=lengths,
        micro_batches=micro_batches,
        cp_size=cp_size,
    )


def _with_schedule(config: JobConfig) -> WorkerConfig:
    """Settings of the trained role with a learning-rate schedule, whose length has no effect here."""
    dp_size = config.dp_size(dist.get_world_size())
    args = schedule_of(config, dp_size) if is_rl(config) else supervised_schedule_of(config, 1, 1)
    if args.max_steps < 1:
        args = config.actor_train.with_training(max_steps=1).training_args
    return config.actor_train.model_copy(update={"training_args": args})


def is_rl(config: JobConfig) -> bool:
    """Whether the main phase of the job is reinforcement learning."""
    return bool(config.max_steps) and not supervised(config)


def _on_host(check: Callable[..., None] | None) -> Callable[..., None] | None:
    """`check` outside the fake modes, because samples are real tensors on the host."""
    if check is None:
        return None

    def check_on_host(*args: Any) -> None:
        with _disable_current_modes():
            check(*args)

    return check_on_host


def _local(strategy: MegatronInferStrategy, plan: Plan) -> SampleBatch:
    with _disable_current_modes():
        return samples_of(plan, strategy.layout.dp_rank)


def _of_critic(critic: MegatronInferStrategy, plan: Plan) -> SampleBatch:
    with _disable_current_modes():
        return samples_of_critic(plan, critic.layout.dp_rank)


def _constraints(strategy: MegatronInferStrategy, batching: BatchingSpec) -> PlanConstraints:
    state = strategy.state
    group = state.settings.group_size if state.layout.interleaved else None
    return PlanConstraints.of(state.layout, batching, group_size=group, max_cp_size=state.settings.max_cp_size)
