"""The passes of a step as one rank makes them, over micro-batches without values, through the strategies themselves."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import _disable_current_modes

from roll_batching.config import JobConfig
from roll_batching.config.objective_rules import wants_reference
from roll_batching.data import SampleBatch
from roll_batching.distributed import Facts
from roll_batching.losses import SFTLoss, loss_spec
from roll_batching.packing.batch import PackedBatch
from roll_batching.planning import Plan, PlanConstraints, plan_step
from roll_batching.planning.batching_spec import BatchingSpec
from roll_batching.rehearsal.hollow import hollow
from roll_batching.rehearsal.lengths import fullest_bin, longest_bin, same_bins
from roll_batching.rehearsal.recorder import Recorder
from roll_batching.rehearsal.samples import samples_of
from roll_batching.rl.from_config import loss_of, schedule_of
from roll_batching.strategy import MegatronInferStrategy, MegatronTrainStrategy
from roll_batching.strategy.inputs import pack_inputs

_CPU = torch.device("cpu")


class _Hollow(MegatronInferStrategy):
    """Packs on the host, with values, and runs over what has none."""

    recorder: Recorder

    def _pack(self, facts: Facts, local: SampleBatch, plan: Plan, masks: Sequence[str] | None) -> list[PackedBatch]:
        state = self.state
        on_host = dataclasses.replace(state, layout=dataclasses.replace(state.layout, device=_CPU))
        with _disable_current_modes():
            packs = pack_inputs(on_host, facts, local, plan, masks)
        with self.recorder.during("inputs"):
            return [hollow(pack, state.device) for pack in packs]

    def _run(self, plan: Plan, packs: list[PackedBatch], bind: Any, **options: Any) -> list[Any]:
        inside = contextlib.nullcontext() if options.get("forward_only") else self.recorder.during("step")
        with inside:
            return super()._run(plan, packs, bind, **options)


class Policy(_Hollow, MegatronTrainStrategy):
    """The model in training."""

    def watch_gradients(self) -> None:
        """Tells the sum of gradients apart from the schedule that it ends."""
        config = self.chunks[0].config
        finalize = config.finalize_model_grads_func

        def finalized(*args: Any, **kwargs: Any) -> Any:
            with self.recorder.during("gradient sync"):
                return finalize(*args, **kwargs)

        config.finalize_model_grads_func = finalized


class Reference(_Hollow):
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

    def plan(self, strategy: MegatronInferStrategy, batching: BatchingSpec, count: int) -> Plan:
        """`count` micro-batches per rank, all of them the fullest that the batching allows."""
        constraints = _constraints(strategy, batching)
        if self.lengths is None:
            lengths = longest_bin(constraints, longest_sample(self.job))
        else:
            lengths = fullest_bin(_planned(strategy, batching, self.lengths))
        return same_bins(constraints, lengths, count)

    def small_plan(self) -> Plan:
        """As few tokens as a step can have."""
        layout = self.policy.layout
        constraints = _constraints(self.policy, self.policy.batching.train)
        rows = constraints.rows if constraints.mode == "padded" and constraints.rows else 1
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

    def run(self, recorder: Recorder) -> dict[str, int]:
        """All passes of a step. Returns the tokens of their micro-batches, by pass."""
        tokens, policy = {}, self.policy
        if self.job.max_steps and policy.batching.logprob_plan != "none":
            own = policy.batching.logprob_plan == "own"
            tokens["old log-probs"] = self._log_probs(recorder, policy, own=own, name="old log-probs")
        if self.reference is not None:
            tokens["reference"] = self._log_probs(recorder, self.reference, own=True, name="reference")
        plan = self.plan(policy, policy.batching.train, self.count())
        tokens["training"] = int(plan.tokens[0])
        with recorder.during("optimizer"):
            self._step(plan)
        return tokens

    def _log_probs(self, recorder: Recorder, strategy: _Hollow, *, own: bool, name: str) -> int:
        batching = strategy.batching.infer if own else strategy.batching.train
        plan = self.plan(strategy, batching, self.count())
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
) -> Passes:
    """The models of a job, built without weights, and its passes. Under the fake mode."""
    worker = job.actor_train.model_copy(update={"training_args": schedule_of(job, job.dp_size(dist.get_world_size()))})
    policy = Policy(worker, seed=job.seed, temperature=job.actor_infer.generating_args.temperature)
    policy.recorder = recorder
    policy.initialize(weights=False)
    policy.watch_gradients()
    reference = None
    if job.max_steps and job.reference is not None and wants_reference(job):
        reference = Reference(job.reference, seed=job.seed, temperature=policy.temperature)
        reference.recorder = recorder
        reference.initialize(weights=False)
    return Passes(
        job=job,
        policy=policy,
        reference=reference,
        loss=loss_of(job) if job.max_steps else SFTLoss(),
        lengths=lengths,
        micro_batches=micro_batches,
    )


def longest_sample(job: JobConfig) -> int:
    """Tokens of the longest sequence that the job admits."""
    return job.sequence_length or (job.prompt_length + (job.response_length or 0))


def _local(strategy: MegatronInferStrategy, plan: Plan) -> SampleBatch:
    with _disable_current_modes():
        return samples_of(plan, strategy.layout.dp_rank)


def _constraints(strategy: MegatronInferStrategy, batching: BatchingSpec) -> PlanConstraints:
    state = strategy.state
    group = state.settings.group_size if state.layout.interleaved else None
    return PlanConstraints.of(state.layout, batching, group_size=group)


def _planned(strategy: MegatronInferStrategy, batching: BatchingSpec, lengths: Sequence[int]) -> Plan:
    return plan_step(list(lengths), _constraints(strategy, batching), cost=strategy.cost)
