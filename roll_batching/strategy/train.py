"""`MegatronTrainStrategy`: optimizer steps over planned micro-batches."""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, Self

import torch
import torch.distributed as dist

from roll_batching.distributed import consensus, host_group
from roll_batching.distributed.groups import gather_objects
from roll_batching.distributed.parallel_layout import ParallelLayout, make_layout
from roll_batching.errors import LayoutError, LossError
from roll_batching.losses.contract import HostMetric, as_numbers, loss_spec
from roll_batching.losses.denominators import StepCounts, require_counts
from roll_batching.losses.head import check_temperature
from roll_batching.losses.runner import LossRunner, Scaling, has_router_losses
from roll_batching.modeling.cost import device_rate, plan_flops
from roll_batching.modeling.experts import expert_biases_kept
from roll_batching.packing.batch import StepPacks
from roll_batching.planning import CostModel, ParallelDims, Plan
from roll_batching.planning.arrays import kind_of
from roll_batching.samples import LengthTable, SampleBatch
from roll_batching.samples.length_table import require_batch
from roll_batching.settings import BatchingConfig, RoleSettings, TrainingArgs
from roll_batching.strategy.compatibility import check_compatibility, scheduler_problems
from roll_batching.strategy.fault_messages import explain_optimizer_out_of_memory
from roll_batching.strategy.infer import MegatronInferStrategy
from roll_batching.strategy.loss_scale import count_step, loss_scale
from roll_batching.strategy.model_io import ModelIOMixin
from roll_batching.strategy.model_state import ModelState, SchedulerUnit, StepSettings, TrainingState
from roll_batching.strategy.offload import KINDS
from roll_batching.strategy.optimizer_step import (
    StepResult,
    check_training_args,
    free_optimizer_memory,
    grad_square_sum,
    join_results,
    step_optimizer,
    with_optimizer,
)
from roll_batching.strategy.step_clock import StepClock
from roll_batching.strategy.step_inputs import count_all, count_local
from roll_batching.strategy.step_prediction import StepPrediction
from roll_batching.strategy.weights import Transfer, gather_parameters

logger = logging.getLogger(__name__)


class MegatronTrainStrategy(MegatronInferStrategy):
    """Trains a Megatron model over planned micro-batches; for your own loss, define `token_loss` in a subclass."""

    builds_heads = trains = True
    _warned_of_empty_step = False

    @cached_property
    def _clock(self) -> StepClock:
        return StepClock(self.device)

    @cached_property
    def _prediction(self) -> StepPrediction:
        return StepPrediction(self.settings, self.device)

    @property
    def _training(self) -> TrainingState:
        training = self.state.training
        assert training is not None  # initialize and from_parts both set it
        return training

    @property
    def optimizer(self) -> Any:
        """The Megatron optimizer, or None if the caller steps its own."""
        return self._training.optimizer

    @property
    def scheduler(self) -> Any:
        """The OptimizerParamScheduler, or None."""
        return self._training.scheduler

    @property
    def skipped_steps(self) -> int:
        """Steps skipped so far: the gradient norm was not finite, or no token counted."""
        return self._training.skipped_steps

    @classmethod
    def from_parts(
        cls,
        model_chunks: Sequence[Any],
        optimizer: Any,
        batching: BatchingConfig,
        *,
        scheduler: Any = None,
        scheduler_unit: SchedulerUnit | None = None,
        pg_collection: Any = None,
        defer_head: bool = False,
        rows_form: bool = False,
        vocab_size: int | None = None,
        temperature: float = 1.0,
        cost: CostModel | None = None,
        settings: StepSettings | None = None,
        **subclass_arguments: Any,
    ) -> Self:
        """A strategy for an existing Megatron model and optimizer. Collective.

        Parameters, optimizer state and state-dict keys stay; under `defer_head` the output layer's class changes.

        Args:
            model_chunks: GPTModels of this pipeline stage, one per virtual stage, in Megatron's DDP or not.
            optimizer: a Megatron optimizer, or None for loops that step it themselves (`forward_backward`).
            batching: settings that form the micro-batches.
            scheduler: an OptimizerParamScheduler, stepped after every optimizer step that was not skipped.
            scheduler_unit: the scheduler's unit, required with one: "samples", as in Megatron's own training loop
                (each step adds all samples of its plan), or "steps" (each adds 1).
            pg_collection: the model's process groups; None: those of Megatron's parallel state.
            defer_head: compute log-probs from hidden states in chunks, without ever holding whole logits.
            rows_form: for models that cannot take packs: rectangles (padded and dynamic modes) as [rows, length].
            vocab_size: real vocabulary, when the head has padded columns; None counts all.
            temperature: divides the logits.
            cost: the planner's cost model; None derives one from the model's config.
            settings: further settings of the schedule; the argument `rows_form` overrides theirs.
            subclass_arguments: arguments of a subclass's constructor, which is called with None for the RoleSettings.

        Raises:
            LayoutError: on all ranks, with everything in the parts that cannot work and the settings that cure it.
        """
        from roll_batching.strategy import from_parts as parts  # loops of other models alone need it

        parts.require_process_group()
        with consensus(host_group(), "from_parts") as facts:
            strategy = cls(None, **subclass_arguments)
            strategy.temperature = check_temperature(temperature)
            facts.equal("the temperature", strategy.temperature)
            chunks = parts.list_of_chunks(model_chunks)
            training = TrainingState(optimizer=optimizer, scheduler=scheduler, scheduler_unit=scheduler_unit or "steps")
            settings = StepSettings() if settings is None else settings
            if not isinstance(settings, StepSettings):
                raise LayoutError(f"settings is {kind_of(settings)}: pass a StepSettings, or None")
            settings = replace(settings, rows_form=rows_form)
            problems = scheduler_problems(optimizer, scheduler, scheduler_unit)
        strategy.state = parts.state_from_parts(
            chunks, batching, settings, pg_collection=pg_collection, vocab_size=vocab_size, cost=cost,
            training=training, defer_head=defer_head, problems=problems,
        )  # fmt: skip
        strategy.state = parts.with_proof(strategy)
        return strategy

    def _create_layout(self, dims: ParallelDims, device: torch.device) -> tuple[ParallelLayout, Any]:
        return make_layout(dims, device), None  # the groups are those of Megatron's parallel state

    def _prepare(self, built: ModelState, config: RoleSettings) -> ModelState:
        from roll_batching.modeling.builder import optimizer_config, wrap_ddp  # as in `initialize`

        megatron = config.strategy_args.strategy_config
        with consensus(built.layout.host_group, "initialize"):
            optimizer_config(config.training_args, megatron, built.dtype, built.device)
        state = replace(
            built, chunks=wrap_ddp(list(built.chunks), megatron, config.training_args), training=TrainingState()
        )
        check_compatibility(state)
        check_training_args(state, config.training_args, config.training_args.optimizer)
        gather_parameters(state.chunks)
        return with_optimizer(state, config.training_args, megatron)

    def start_phase(self, training: TrainingArgs) -> None:
        """Replaces optimizer and learning-rate schedule by new ones for the current weights. Collective.

        Raises `LossError` for a decaying schedule without `max_steps`, and for another optimizer.
        """
        self._offload.require(KINDS, "start_phase")
        config = self._require_config()
        check_training_args(self.state, training, config.training_args.optimizer)
        self.gather_parameters()
        # Before the new one is built: two optimizer states may not fit.
        self.state = replace(self.state, training=replace(self._training, optimizer=None, scheduler=None))
        free_optimizer_memory(self.chunks)
        self.state = with_optimizer(self.state, training, config.strategy_args.strategy_config)

    def copy_weights_from(self, other: ModelIOMixin) -> Transfer:
        """Copies parameters as the inference strategy does. The optimizer goes on from them and keeps its moments."""
        self._offload.require(["optimizer"], "copy_weights_from")
        transfer = super().copy_weights_from(other)
        if self.optimizer is not None:
            self.optimizer.reload_model_params()  # else the next step would undo the copy from its fp32 copies
        return transfer

    def count(self, local: SampleBatch, loss: Any = None) -> StepCounts:
        """Loss denominators over all ranks' `local`, for a step that computes only some of these samples. Collective.

        Pass the result to `train_step(counts=...)`: samples that are left out because their gradient is known to be
        zero still count.
        """
        with self._consensus("count") as facts:
            spec = loss_spec(self._loss(loss), self.state.heads)
            facts.equal("the loss", spec.description)
            require_batch("count", local)
            spec.require_prepared(local)
            if spec.check is not None:
                spec.check(local, [])
            local_counts = count_local(self.layout, local, None, spec)
            facts.count(local_counts.vector())
        return count_all(self.layout.team, local_counts, facts.total)

    def plan(self, table: LengthTable, *, forward: bool = False, group_ids: Any = None, home_rank: Any = None) -> Plan:
        """Plans as the inference strategy does. The time of plans for training is the phase "plan" of the next step."""
        with contextlib.nullcontext() if forward else self._clock.phase("plan", on_host=True):
            return super().plan(table, forward=forward, group_ids=group_ids, home_rank=home_rank)

    def _loss(self, loss: Any) -> Any:
        if loss is not None:
            return loss
        if hasattr(self, "token_loss") or hasattr(self, "sequence_loss"):
            return self
        raise LossError(
            f"train_step got no loss, and {type(self).__name__} defines none: pass loss=SFTLoss() or another loss "
            "object, or define token_loss in a subclass"
        )

    def train_step(
        self, local: SampleBatch, plan: Plan, loss: Any = None, counts: StepCounts | None = None
    ) -> StepResult:
        """One optimizer step over the planned samples of all ranks. Collective.

        Zeroes the gradients, runs `forward_backward`, and steps the optimizer and its schedule. Arguments and errors
        are those of `forward_backward`; after an error the optimizer has not stepped.
        """
        started = time.perf_counter()
        # Megatron moves expert biases in finalize_model_grads, before it is known whether the step is skipped.
        with expert_biases_kept(self.chunks) as restore_biases:
            total, metrics, grad_square, has_tokens = self._accumulate(
                "train_step",
                local,
                plan,
                loss,
                counts,
                prepare=self.zero_grad,
                grad_square=self._clock.timed("optimizer", lambda: grad_square_sum(self.chunks)),
            )
            training = self._training
            lr, scale = training.optimizer.param_groups[0]["lr"], loss_scale(training.optimizer)
            with self._clock.phase("optimizer"), explain_optimizer_out_of_memory():
                # Without a counted token there is no gradient, but weight decay and momentum would move the weights.
                grad_norm = step_optimizer(training.optimizer, self.chunks, grad_square) if has_tokens else 0.0
            skipped = grad_norm is None or not has_tokens
            counted = count_step(training, scale, skipped=skipped, overflowed=grad_norm is None)
            self.state = replace(self.state, training=counted)
            if skipped:
                restore_biases()
            else:
                self.lr_step(len(plan.lengths))
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # `seconds` and `phases` include the optimizer's kernels
        return StepResult(
            loss=total,
            joined_metrics=metrics,
            grad_norm=math.nan if grad_norm is None else grad_norm,
            lr=lr,
            loss_scale=scale,
            skipped=skipped,
            seconds=time.perf_counter() - started,
            tokens=plan.report.real_tokens,
            phases=(phases := self._clock.read()),
            flops=plan_flops(plan, self.cost, self.layout),
            unshared_flops=plan_flops(plan, self.cost, self.layout, sharing=False),
            ranks=dist.get_world_size(),
            device_rate=device_rate(self.device, self.dtype),
            predicted_over_measured=self._prediction.compare(self.state, plan, phases),
        )

    def forward_backward(
        self,
        local: SampleBatch,
        plan: Plan,
        loss: Any = None,
        counts: StepCounts | None = None,
        *,
        require_finite: bool = False,
    ) -> tuple[float, dict[str, float]]:
        """Adds the gradient of the planned samples to the gradient buffers; returns (loss, metrics). Collective.

        For training loops that zero gradients and step their optimizer themselves, or with `zero_grad`,
        `optimizer_step` and `lr_step`.

        Args:
            local: this rank's samples, as `distribute` returns them.
            plan: the plan of the mini-batch, equal on all ranks.
            loss: a loss object; None: this strategy's own `token_loss` or `sequence_loss`.
            counts: loss denominators from `count`; None: those of the planned samples.
            require_finite: raise where the gradient is not finite, for optimizers that would step on it.

        Raises:
            RankError: on all ranks, before the model runs, when samples or plan are wrong on any.
            LossError: on all ranks, when the loss is not finite or breaks its contract; names the samples.
        """
        square = (lambda: grad_square_sum(self.chunks)) if require_finite else None
        with expert_biases_kept(self.chunks):
            total, metrics, grad_square, _ = self._accumulate(
                "forward_backward", local, plan, loss, counts, grad_square=square
            )
        self._clock.discard()
        if not math.isfinite(grad_square):
            raise LossError(
                f"the gradient is not finite, with a loss of {total:.6g}: look at the inputs of the loss that divide "
                "or exponentiate. The optimizer made no step"
            )
        return total, as_numbers(metrics)

    def zero_grad(self) -> None:
        """Zeroes the gradients of model and optimizer. Raises `LayoutError` without an optimizer."""
        self._require_optimizer()
        for chunk in self.chunks:
            if hasattr(chunk, "zero_grad_buffer"):
                chunk.zero_grad_buffer()
        self.optimizer.zero_grad()

    def optimizer_step(self) -> float | None:
        """Steps the optimizer on the gradients of `forward_backward`. Collective.

        Returns the gradient norm before clipping, or None where it is not finite: then no rank steps. Raises
        `LayoutError` without an optimizer.
        """
        optimizer = self._require_optimizer()
        self._offload.require(KINDS, "optimizer_step")
        parts = gather_objects(float(grad_square_sum(self.chunks)), self.layout.host_group)
        with explain_optimizer_out_of_memory():
            return step_optimizer(optimizer, self.chunks, sum(parts))

    def lr_step(self, samples: int) -> None:
        """Steps the learning-rate schedule, if there is one, after an optimizer step over `samples` samples."""
        training = self._training
        if training.scheduler is not None:
            training.scheduler.step(1 if training.scheduler_unit == "steps" else samples)

    def _require_optimizer(self) -> Any:
        if self.optimizer is None:
            raise LayoutError("this strategy was made without an optimizer: call forward_backward and step yours")
        return self.optimizer

    def _accumulate(
        self,
        what: str,
        local: SampleBatch,
        plan: Plan,
        loss: Any,
        counts: StepCounts | None,
        prepare: Callable[[], None] = lambda: None,
        grad_square: Callable[[], torch.Tensor] | None = None,
    ) -> tuple[float, dict[str, HostMetric], float, bool]:
        """`forward_backward` for the operation `what`: (loss, metrics, sum of squares of gradients, has tokens).

        All four are of all ranks. `prepare` is called last before the ranks agree to start, when everything else has
        been checked; `grad_square`, this rank's sum of squares, when gradients are reduced.
        """
        self._offload.require(KINDS, what)
        clock = self._clock
        with clock.attempt():
            with clock.phase("pack", on_host=True), self._consensus(what) as facts:
                loss = self._loss(loss)
                spec = loss_spec(loss, self.state.heads)
                packs = self._pack_for(facts, local, plan, spec)
                local_counts = counts if counts is not None else count_local(self.layout, local, plan, spec)
                require_counts(local_counts, spec)
                facts.equal("counts", "those of the planned samples" if counts is None else counts)
                if counts is None:
                    facts.count(local_counts.vector())
                prepare()
            counts = count_all(self.layout.team, local_counts, facts.total) if counts is None else counts
            config = self.chunks[0].config
            scaling = Scaling(
                per_token=config.calculate_per_token_loss,
                num_micro_batches=len(packs),
                dp_size=self.layout.dp_size,
                apply=self.settings.apply_loss_scale,
                router_tokens=plan.report.real_tokens - plan.report.shared_tokens if has_router_losses(config) else 0,
            )
            runner = LossRunner(loss, spec, counts, self._head(), scaling, train=True)
            for chunk in self.chunks:
                chunk.train()
            if isinstance(packs, StepPacks):
                packs.set_timer(lambda make: clock.timed("pack", make))
            with clock.phase("forward_backward"), clock.timing("wait", config, "finalize_model_grads_func"):
                records = self._run(plan, packs, lambda pack, chunk: clock.timed("loss", runner.bind(pack, chunk)))
            self._warn_of_empty_step(counts)
            with clock.phase("wait"):
                result = join_results(self.state, [r for r in records if r is not None], runner, grad_square)
            return *result, counts.has_tokens

    def _warn_of_empty_step(self, counts: StepCounts) -> None:
        if not counts.has_tokens and dist.get_rank() == 0 and not self._warned_of_empty_step:
            self._warned_of_empty_step = True
            logger.warning(
                "a step's loss counts no token: %s is 0 everywhere. train_step skips such steps (logged once)",
                " and ".join(counts.tokens),
            )
