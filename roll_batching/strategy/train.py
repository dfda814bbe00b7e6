"""`MegatronTrainStrategy`: the same model, trained."""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Self

import torch
import torch.distributed as dist

from roll_batching.distributed import consensus, host_group
from roll_batching.distributed.parallel_layout import ParallelLayout, make_layout
from roll_batching.errors import LayoutError, LossError
from roll_batching.losses.contract import loss_spec
from roll_batching.losses.denominators import StepCounts, require_counts
from roll_batching.losses.head import check_temperature
from roll_batching.losses.metric_kinds import HostMetric, as_numbers
from roll_batching.losses.runner import LossRunner, Scaling, has_router_losses
from roll_batching.modeling.builder import build_optimizer, build_scheduler, optimizer_config, wrap_ddp
from roll_batching.modeling.cost import device_rate, plan_flops
from roll_batching.modeling.experts import expert_biases_kept
from roll_batching.packing.batch import StepPacks
from roll_batching.planning import CostModel, ParallelDims, Plan
from roll_batching.planning.plain_values import kind_of
from roll_batching.samples import LengthTable, SampleBatch
from roll_batching.samples.table import require_batch
from roll_batching.settings import BatchingConfig, MegatronConfig, RoleSettings, TrainingArgs
from roll_batching.strategy.clock import StepClock
from roll_batching.strategy.copying import TakesWeights
from roll_batching.strategy.infer import MegatronInferStrategy
from roll_batching.strategy.inputs import counts_here
from roll_batching.strategy.offload import KINDS
from roll_batching.strategy.optimizer_parts import scheduler_problems
from roll_batching.strategy.out_of_memory import named_in_update
from roll_batching.strategy.outcome import join_outcomes
from roll_batching.strategy.part_arguments import list_of_chunks
from roll_batching.strategy.parts import adopt_parts, check_parts, require_processes
from roll_batching.strategy.settings import StepSettings
from roll_batching.strategy.state import ModelState, SchedulerUnit, TrainingState
from roll_batching.strategy.step_result import StepResult
from roll_batching.strategy.update import free_optimizer_memory, gradient_square, step_optimizer
from roll_batching.strategy.weights import Transfer, gather_parameters

logger = logging.getLogger(__name__)


class MegatronTrainStrategy(MegatronInferStrategy):
    """Training steps over planned micro-batches; subclass it and define `token_loss` for your own loss."""

    def __init__(self, config: RoleSettings | None = None, *, seed: int = 0, temperature: float = 1.0) -> None:
        super().__init__(config, seed=seed, temperature=temperature)
        self._step_clock: StepClock | None = None
        self._noticed_empty = False

    @property
    def _clock(self) -> StepClock:
        if self._step_clock is None:
            self._step_clock = StepClock(self.device)
        return self._step_clock

    @property
    def _training(self) -> TrainingState:
        training = self.state.training
        assert training is not None  # both ways to a state of this strategy give it one
        return training

    @property
    def optimizer(self) -> Any:
        """The Megatron optimizer; None where the caller steps its own."""
        return self._training.optimizer

    @property
    def scheduler(self) -> Any:
        """The OptimizerParamScheduler, or None."""
        return self._training.scheduler

    @property
    def skipped_steps(self) -> int:
        """Steps so far that were skipped: the gradient's norm was not finite, or no token counted."""
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
        **own: Any,
    ) -> Self:
        """Puts plan, packing, schedule and loss under a Megatron model and optimizer that exist already.

        Changes nothing in the model, except its output layer's class when `defer_head` asks for it:
        parameters, optimizer state and state-dict keys stay. A collective call.

        Args:
            model_chunks: GPTModels of this pipeline stage, one per virtual stage, in Megatron's DDP or not.
            optimizer: a Megatron optimizer, or None for loops that step it themselves (`forward_backward`).
            batching: how passes are cut into micro-batches.
            scheduler: an OptimizerParamScheduler, stepped after every optimizer step that was not skipped.
            scheduler_unit: what the scheduler counts, required with one: "samples", as Megatron's own training loop
                has it (each step adds all samples of its plan), or "steps" (each adds 1).
            pg_collection: the model's process groups; None takes those of Megatron's parallel state.
            defer_head: never hold whole logits; log-probs are computed from hidden states in chunks.
            rows_form: for models that cannot take packs: rectangles (padded and dynamic modes) as [rows, length].
            vocab_size: real vocabulary, when the head has padded columns; None counts all.
            temperature: logits are divided by it.
            cost: the planner's cost model; None derives one from the model's config.
            settings: further settings; `rows_form` is set here.
            own: arguments of a subclass's constructor, which is called with None for the RoleSettings.

        Raises:
            LayoutError: on all ranks, naming everything about the parts that cannot work and what to set.
        """
        require_processes()
        with consensus(host_group(), "from_parts") as facts:
            strategy = cls(None, **own)
            strategy.temperature = check_temperature(temperature)
            facts.equal("the temperature", strategy.temperature)
            chunks = list_of_chunks(model_chunks)
            training = TrainingState(optimizer=optimizer, scheduler=scheduler, scheduler_unit=scheduler_unit or "steps")
            settings = StepSettings() if settings is None else settings
            if not isinstance(settings, StepSettings):
                raise LayoutError(f"settings is {kind_of(settings)}: pass a StepSettings, or None")
            settings = replace(settings, rows_form=rows_form)
            problems = scheduler_problems(optimizer, scheduler, scheduler_unit)
        strategy.state = adopt_parts(
            chunks,
            batching,
            settings,
            pg_collection=pg_collection,
            vocab_size=vocab_size,
            cost=cost,
            training=training,
            defer_head=defer_head,
            also=problems,
        )
        return strategy

    def _joined(self, dims: ParallelDims, device: torch.device) -> tuple[ParallelLayout, Any]:
        return make_layout(dims, device), None

    def _made_ready(self, built: ModelState, config: RoleSettings) -> ModelState:
        megatron = config.strategy_args.strategy_config
        with consensus(built.layout.host_group, "initialize"):
            optimizer_config(config.training_args, megatron, built.dtype, built.device)
        state = replace(built, chunks=wrap_ddp(list(built.chunks), megatron), training=TrainingState())
        check_parts(state)
        _agree_on_phase(state, config.training_args)
        gather_parameters(state.chunks)
        return _with_optimizer(state, config.training_args, megatron)

    def start_phase(self, training: TrainingArgs) -> None:
        """A fresh optimizer and learning-rate schedule for the weights as they are; the old one is freed before.

        Raises `LossError` for a schedule that decays without knowing its length.
        """
        self._host.require(KINDS, "start_phase")
        _agree_on_phase(self.state, training)
        megatron = self._configured().strategy_args.strategy_config
        self.gather_parameters()
        self.state = replace(self.state, training=replace(self._training, optimizer=None, scheduler=None))
        free_optimizer_memory(self.chunks)
        self.state = _with_optimizer(self.state, training, megatron)

    def copy_weights_from(self, other: TakesWeights) -> Transfer:
        """As the inference strategy has it; the optimizer goes on from the new weights and keeps its moments."""
        self._host.require(["optimizer"], "copy_weights_from")
        took = super().copy_weights_from(other)
        if self.optimizer is not None:
            self.optimizer.reload_model_params()  # its fp32 copies, where it has some
        return took

    def count(self, local: SampleBatch, loss: Any = None) -> StepCounts:
        """Denominators over the samples of all ranks' `local`, for a step that leaves some of them out.

        Pass the result to `train_step(counts=...)`: samples that are not computed, because their
        gradient is known to be zero, still count.
        """
        with self._consensus("count") as facts:
            spec = loss_spec(self._loss(loss))
            facts.equal("the loss", spec.description)
            require_batch("count", local)
            if spec.check is not None:
                spec.check(local, [])
            own = counts_here(self.layout, local, None, spec)
            facts.count(own.vector())
        return own.with_vector(facts.total)

    def plan(self, table: LengthTable, *, forward: bool = False, group_ids: Any = None, home_rank: Any = None) -> Plan:
        """As the inference strategy has it; of a training pass its time stands among a step's phases."""
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
        """One optimizer step over the planned samples of all ranks: `forward_backward` from zeroed gradients,
        then the optimizer and its schedule.

        Takes what `forward_backward` takes, and raises what it raises, before the optimizer steps.
        """
        started = time.perf_counter()
        with expert_biases_kept(self.chunks) as put_biases_back:
            total, metrics, square, something = self._accumulate(
                "train_step",
                local,
                plan,
                loss,
                counts,
                first=self._zero_gradients,
                gradient=self._clock.timed("optimizer", lambda: gradient_square(self.chunks)),
            )
            training = self._training
            lr = training.optimizer.param_groups[0]["lr"]
            with self._clock.phase("optimizer"), named_in_update():
                # Weight decay and moments would move weights that nothing speaks of.
                grad_norm = step_optimizer(training.optimizer, self.chunks, square) if something else 0.0
            skips = grad_norm is None or not something
            if skips:
                put_biases_back()
                skipped = replace(training, skipped_steps=training.skipped_steps + 1)
                self.state = replace(self.state, training=skipped)
            elif training.scheduler is not None:
                training.scheduler.step(1 if training.scheduler_unit == "steps" else len(plan.lengths))
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # the optimizer's kernels belong to the step that the clock measures
        return StepResult(
            loss=total,
            joined_metrics=metrics,
            grad_norm=math.nan if grad_norm is None else grad_norm,
            lr=lr,
            skipped=skips,
            seconds=time.perf_counter() - started,
            tokens=plan.report.real_tokens,
            phases=self._clock.read(),
            flops=plan_flops(plan, self.cost, self.layout),
            ranks=dist.get_world_size(),
            device_rate=device_rate(self.device, self.dtype),
        )

    def forward_backward(
        self, local: SampleBatch, plan: Plan, loss: Any = None, counts: StepCounts | None = None
    ) -> tuple[float, dict[str, float]]:
        """Adds the gradient of the planned samples of all ranks to the gradient buffers; (loss, metrics).

        For training loops that zero gradients and step their optimizer themselves.

        Args:
            local: this rank's samples, those that `plan` gives its replica (see `distribute`).
            plan: the plan of the mini-batch, equal on all ranks.
            loss: a loss object; None takes this strategy's own method.
            counts: denominators, when they are not those of the planned samples; see `count`.

        Raises:
            RankError: on all ranks, before the model runs, when samples or plan are wrong on any.
            LossError: on all ranks, when the loss is not finite or breaks its contract; names the samples.
        """
        with expert_biases_kept(self.chunks):
            total, metrics, *_ = self._accumulate("forward_backward", local, plan, loss, counts)
        self._clock.forget()
        return total, as_numbers(metrics)

    def _zero_gradients(self) -> None:
        if self.optimizer is None:
            raise LayoutError("this strategy was made without an optimizer: call forward_backward and step yours")
        for chunk in self.chunks:
            if hasattr(chunk, "zero_grad_buffer"):
                chunk.zero_grad_buffer()
        self.optimizer.zero_grad()

    def _accumulate(
        self,
        what: str,
        local: SampleBatch,
        plan: Plan,
        loss: Any,
        counts: StepCounts | None,
        first: Callable[[], None] | None = None,
        gradient: Callable[[], torch.Tensor] | None = None,
    ) -> tuple[float, dict[str, HostMetric], float, bool]:
        """`forward_backward` under the name `what`: (loss, metrics, what `gradient` gives, whether any token counts).

        All are of all ranks. `first` is done when nothing else can fail on this rank, `gradient` when gradients are
        whole.
        """
        self._host.require(KINDS, what)
        clock = self._clock
        with clock.attempt():
            with clock.phase("pack", on_host=True), self._consensus(what) as facts:
                loss = self._loss(loss)
                spec = loss_spec(loss)
                packs = self._pack_for(facts, local, plan, spec)
                own = counts if counts is not None else counts_here(self.layout, local, plan, spec)
                require_counts(own, spec)
                facts.equal("counts", "those of the planned samples" if counts is None else counts)
                if counts is None:
                    facts.count(own.vector())
                if first is not None:
                    first()
            counts = own.with_vector(facts.total) if counts is None else counts
            config = self.chunks[0].config
            scaling = Scaling(
                per_token=config.calculate_per_token_loss,
                num_micro_batches=plan.num_micro_batches,
                dp_size=self.layout.dp_size,
                apply=self.settings.apply_loss_scale,
                router_tokens=plan.report.real_tokens if has_router_losses(config) else 0,
            )
            runner = LossRunner(loss, spec, counts, self._head(), scaling, train=True)
            for chunk in self.chunks:
                chunk.train()
            if isinstance(packs, StepPacks):
                packs.timed_by(lambda make: clock.timed("pack", make))
            with clock.phase("forward_backward"), clock.timing("wait", config, "finalize_model_grads_func"):
                records = self._run(plan, packs, lambda *given: clock.timed("loss", runner.bind(*given)))
            self._notice_empty(counts)
            with clock.phase("wait"):
                joined = join_outcomes(self.state, [r for r in records if r is not None], runner, gradient)
            return *joined, counts.has_tokens

    def _notice_empty(self, counts: StepCounts) -> None:
        if not counts.has_tokens and dist.get_rank() == 0 and not self._noticed_empty:
            self._noticed_empty = True
            logger.warning(
                "a step's loss counts no token: %s is 0 everywhere. train_step skips such steps, and counts them as "
                "skipped (said once)",
                " and ".join(counts.tokens),
            )


def _agree_on_phase(state: ModelState, training: TrainingArgs) -> None:
    with consensus(state.layout.host_group, "start_phase") as facts:
        if training.max_steps < 1 and training.lr_scheduler_type not in ("constant", "constant_with_warmup"):
            raise LossError(
                f"lr_scheduler_type {training.lr_scheduler_type!r} needs training_args.max_steps, the optimizer steps "
                "that it spans"
            )
        facts.equal("training_args", training)


def _with_optimizer(state: ModelState, training: TrainingArgs, megatron: MegatronConfig) -> ModelState:
    """`state` with a new optimizer and learning-rate schedule."""
    optimizer = build_optimizer(list(state.chunks), training, megatron, state.dtype)
    scheduler = build_scheduler(optimizer, training, max(training.max_steps, 1))
    assert state.training is not None  # only trained models come here
    return replace(state, training=replace(state.training, optimizer=optimizer, scheduler=scheduler))
