"""The passes of a step as one rank makes them, over micro-batches without values, through the strategies themselves."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import _disable_current_modes

from roll_batching.distributed import Facts
from roll_batching.jobs.config import JobConfig, WorkerConfig
from roll_batching.jobs.config.objective_rules import wants_reference
from roll_batching.jobs.config.supervised import supervised
from roll_batching.jobs.objectives.from_config import loss_of, schedule_of, supervised_schedule_of
from roll_batching.losses import SFTLoss, loss_spec
from roll_batching.losses.contract import LossSpec
from roll_batching.modeling.cost import plan_flops
from roll_batching.packing.batch import PackedBatch
from roll_batching.planning import Plan, PlanConstraints, plan_step
from roll_batching.planning.batching_spec import BatchingSpec
from roll_batching.planning.pipeline.num_micro_batches import legal_count
from roll_batching.rehearsal.fake_packs import hollow
from roll_batching.rehearsal.lengths import fullest_bin, longest_bin, longest_sample, same_bins
from roll_batching.rehearsal.recorder import Recorder
from roll_batching.rehearsal.rollout import rehearse_rollout, rolls_out
from roll_batching.rehearsal.samples import samples_of
from roll_batching.rehearsal.task import LOG_PROBS, REFERENCE, TrainingBatch
from roll_batching.samples import SampleBatch
from roll_batching.strategy import MegatronInferStrategy, MegatronTrainStrategy
from roll_batching.strategy.inputs import pack_inputs
from roll_batching.strategy.schedule import Packs

_CPU = torch.device("cpu")


class _Rehearsed(MegatronInferStrategy):
    """Packs on the host, with values, and runs over what has none."""

    recorder: Recorder
    with_values = False
    """For what a rehearsal is compared with: the same passes for real."""

    def _pack(self, facts: Facts, local: SampleBatch, plan: Plan, masks: Sequence[str] | None) -> list[PackedBatch]:
        state = self.state
        on_host = dataclasses.replace(state, layout=dataclasses.replace(state.layout, device=_CPU))
        with _disable_current_modes():
            packs = list(pack_inputs(on_host, facts, local, plan, masks))
        with self.recorder.during("inputs"):
            return packs if self.with_values else [hollow(pack, state.device) for pack in packs]

    def _pack_for(self, facts: Facts, local: SampleBatch, plan: Plan, spec: LossSpec) -> Packs:
        return super()._pack_for(facts, local, plan, dataclasses.replace(spec, check=_on_host(spec.check)))

    def _finite(self, batch: SampleBatch) -> SampleBatch:
        return super()._finite(batch) if self.with_values else batch

    def _run(self, plan: Plan, packs: Packs, bind: Any, **options: Any) -> list[Any]:
        inside = contextlib.nullcontext() if options.get("forward_only") else self.recorder.during("step")
        with inside:
            return super()._run(plan, packs, bind, **options)


class Policy(_Rehearsed, MegatronTrainStrategy):
    """The model in training."""

    def watch_gradients(self) -> None:
        """Tells the sum of gradients apart from the schedule that it ends."""
        config = self.chunks[0].config
        finalize = config.finalize_model_grads_func

        def finalized(*args: Any, **kwargs: Any) -> Any:
            with self.recorder.during("gradient sync"):
                return finalize(*args, **kwargs)

        config.finalize_model_grads_func = finalized

    def roll_out(self, job: JobConfig) -> str:
        """Answers prompts, piece by piece."""
        with self._evaluating():
            return rehearse_rollout(self.state, job, self.recorder)


class Reference(_Rehearsed):
    """The frozen one."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Passes:
    """What a job's step consists of."""

    job: JobConfig
    policy: Policy
    reference: Reference | None
    loss: Any
    lengths: tuple[int, ...] | None
    """Of the samples of an optimizer step; None: as long as the job allows."""
    micro_batches: int | None

    @property
    def unit(self) -> int:
        """Samples that stay together."""
        return 2 if self.job.task == "dpo" else 1

    def plan(self, strategy: MegatronInferStrategy, batching: BatchingSpec, count: int) -> Plan:
        """`count` micro-batches per rank, all of them the fullest that the batching allows."""
        constraints = _constraints(strategy, batching)
        if self.lengths is None:
            lengths = longest_bin(constraints, longest_sample(self.job), self.unit)
        else:
            lengths = fullest_bin(self._step_plan(strategy, constraints))
        return same_bins(constraints, lengths, count)

    def _step_plan(self, strategy: MegatronInferStrategy, constraints: PlanConstraints) -> Plan:
        """The plan of a whole step, where its lengths are known."""
        assert self.lengths is not None
        group_ids = np.arange(len(self.lengths)) // self.unit if self.unit > 1 else None
        return plan_step(list(self.lengths), constraints, cost=strategy.cost, group_ids=group_ids)

    def training(self) -> TrainingBatch:
        """What of training is rehearsed, and what it stands for."""
        policy, batching = self.policy, self.policy.batching.train
        constraints = _constraints(policy, batching)
        few = self.plan(policy, batching, legal_count(1, constraints))
        whole = few if self.lengths is None else self._step_plan(policy, constraints)
        micro_batches = few.num_micro_batches * few.constraints.dp_size
        return TrainingBatch(
            samples=len(few.samples) // micro_batches,
            model_flops=(plan_flops(few, policy.cost, policy.layout) or 0.0) / micro_batches,
            padding=1 - float(whole.used[whole.samples].sum()) / float(whole.tokens.sum()),
            in_step=None if self.lengths is None else whole.num_micro_batches,
        )

    def small_plan(self) -> Plan:
        """As few tokens as a step can have."""
        layout = self.policy.layout
        constraints = _constraints(self.policy, self.policy.batching.train)
        rows = constraints.rows if constraints.mode == "padded" and constraints.rows else self.unit
        return same_bins(constraints, [2] * rows, layout.pp_size)

    def count(self) -> int:
        """Micro-batches of a pass: as many as fill the pipeline and show the next one, or as the step has."""
        layout = self.policy.layout
        if self.micro_batches is not None:
            return self.micro_batches
        if layout.pp_size == 1:
            return 2
        return layout.pp_size + 1 if layout.vpp_size == 1 else 2 * layout.pp_size

    def steady_state(self) -> None:
        """A first step, after which the optimizer has its state."""
        self._step(self.small_plan())

    def roll_out(self) -> tuple[str, ...]:
        """Rollouts, where the model makes them. Returns words about them."""
        return (self.policy.roll_out(self.job),) if rolls_out(self.job) else ()

    def run(self, recorder: Recorder) -> dict[str, int]:
        """All planned passes of a step. Returns the tokens of their micro-batches, by pass."""
        tokens, policy = {}, self.policy
        if reinforced(self.job) and policy.batching.logprob_plan != "none":
            own = policy.batching.logprob_plan == "own"
            batching = policy.batching.infer if own else policy.batching.train
            tokens[LOG_PROBS] = self._log_probs(recorder, policy, self.plan(policy, batching, self.count()), LOG_PROBS)
        if (reference := self.reference) is not None:
            if reinforced(self.job):
                plan = self.plan(reference, reference.batching.infer, self.count())
            else:
                plan = self.plan(policy, policy.batching.train, self.count())  # the step's own
            tokens[REFERENCE] = self._log_probs(recorder, reference, plan, REFERENCE)
        plan = self.plan(policy, policy.batching.train, self.count())
        tokens["training"] = int(plan.tokens[0])
        with recorder.during("optimizer"):
            self._step(plan)
        return tokens

    def _log_probs(self, recorder: Recorder, strategy: _Rehearsed, plan: Plan, name: str) -> int:
        with recorder.during(name):
            strategy.compute_log_probs(_local(strategy, plan), plan, masks=loss_spec(self.loss).masks)
        return int(plan.tokens[0])

    def _step(self, plan: Plan) -> None:
        spec = loss_spec(self.loss)
        with _disable_current_modes():
            local = _local(self.policy, plan)
            if spec.prepare is not None:
                local = spec.prepare(local, self.policy.layout, self.job.seed)
            counts = self.policy.count(local, self.loss)
        self.policy.train_step(local, plan, self.loss, counts=counts)


def passes_of(
    job: JobConfig,
    recorder: Recorder,
    lengths: tuple[int, ...] | None = None,
    micro_batches: int | None = None,
    *,
    with_values: bool = False,
) -> Passes:
    """The models of a job and its passes; `with_values` for real, else without weights, where tensors have none."""
    policy = Policy(_scheduled(job), seed=job.seed, temperature=job.logprob_temperature)
    policy.recorder, policy.with_values = recorder, with_values
    policy.initialize(weights=with_values)
    policy.watch_gradients()
    reference = None
    if job.max_steps and job.reference is not None and wants_reference(job):
        reference = Reference(job.reference, seed=job.seed, temperature=policy.temperature)
        reference.recorder, reference.with_values = recorder, with_values
        reference.initialize(weights=with_values)
    return Passes(
        job=job,
        policy=policy,
        reference=reference,
        loss=loss_of(job) if job.max_steps else SFTLoss(),
        lengths=lengths,
        micro_batches=micro_batches,
    )


def _scheduled(job: JobConfig) -> WorkerConfig:
    """The trained role, whose schedule has a length; how many steps it has does not matter here."""
    dp_size = job.dp_size(dist.get_world_size())
    args = schedule_of(job, dp_size) if reinforced(job) else supervised_schedule_of(job, 1, 1)
    if args.max_steps < 1:
        args = job.actor_train.with_training(max_steps=1).training_args
    return job.actor_train.model_copy(update={"training_args": args})


def reinforced(job: JobConfig) -> bool:
    """Whether the job's main phase samples answers."""
    return bool(job.max_steps) and not supervised(job)


def _on_host(check: Callable[..., None] | None) -> Callable[..., None] | None:
    """`check`, which looks at samples: those are the host's, whatever device is pretended."""
    if check is None:
        return None

    def checked(*args: Any) -> None:
        with _disable_current_modes():
            check(*args)

    return checked


def _local(strategy: MegatronInferStrategy, plan: Plan) -> SampleBatch:
    with _disable_current_modes():
        return samples_of(plan, strategy.layout.dp_rank)


def _constraints(strategy: MegatronInferStrategy, batching: BatchingSpec) -> PlanConstraints:
    state = strategy.state
    group = state.settings.group_size if state.layout.interleaved else None
    return PlanConstraints.of(state.layout, batching, group_size=group)
