"""`MegatronTrainStrategy`: the same model, trained."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from roll_batching.config import TrainingArgs, WorkerConfig
from roll_batching.data import SampleBatch
from roll_batching.errors import LossError
from roll_batching.losses.contract import loss_spec
from roll_batching.losses.counts import StepCounts
from roll_batching.losses.runner import LossRunner, Scaling
from roll_batching.modeling.builder import build_optimizer, build_scheduler, wrap_ddp
from roll_batching.planning import Plan
from roll_batching.strategy.infer import MegatronInferStrategy


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """What one optimizer step did, the same on every rank."""

    loss: float
    """The loss over the whole mini-batch."""
    metrics: dict[str, float]
    grad_norm: float
    """Norm of the gradient before clipping; NaN or infinite when the step was skipped for it."""
    lr: float
    """Learning rate that the step used."""
    skipped: bool
    """Whether a gradient that is not finite kept the optimizer from stepping."""
    seconds: float
    """Duration of the step on this rank, from packing to the updated weights."""
    tokens: int
    """Real tokens of all ranks."""

    @property
    def tokens_per_second(self) -> float:
        """Real tokens of all ranks per second."""
        return self.tokens / self.seconds


class MegatronTrainStrategy(MegatronInferStrategy):
    """Training steps over planned micro-batches; subclass it and define `token_loss` for your own loss."""

    def __init__(self, config: WorkerConfig, *, seed: int = 0, temperature: float = 1.0) -> None:
        super().__init__(config, seed=seed, temperature=temperature)
        self.optimizer: Any = None
        self.scheduler: Any = None
        self.skipped_steps = 0
        """Steps so far whose gradient was not finite."""

    def _build(self) -> None:
        self.chunks = wrap_ddp(self._build_chunks(), self.config.strategy_args.strategy_config)
        self.start_phase(self.config.training_args)

    def start_phase(self, training: TrainingArgs) -> None:
        """A fresh optimizer and learning-rate schedule for the weights as they are.

        Raises `LossError` for a schedule that decays without knowing its length.
        """
        total = training.max_steps
        if total < 1 and training.lr_scheduler_type not in ("constant", "constant_with_warmup"):
            raise LossError(
                f"lr_scheduler_type {training.lr_scheduler_type!r} needs training_args.max_steps, the optimizer "
                "steps that it spans"
            )
        settings = self.config.strategy_args.strategy_config
        self.optimizer = build_optimizer(self.chunks, training, settings, self.dtype)
        self.scheduler = build_scheduler(self.optimizer, training, max(total, 1))

    def count(self, local: SampleBatch, loss: Any = None) -> StepCounts:
        """Denominators over the samples of all ranks' `local`, for a step that leaves some of them out.

        Pass the result to `train_step(counts=...)`: samples that are not computed, because their
        gradient is known to be zero, still count.
        """
        spec = loss_spec(self._loss(loss))
        return self._reduce_counts(self._local_counts(local, None, spec.masks, spec.sums))

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
        """One optimizer step over the planned samples of all ranks.

        Args:
            local: this rank's samples, those that `plan` gives its replica (see `distribute`).
            plan: the plan of the mini-batch, equal on all ranks.
            loss: a loss object; None takes this strategy's own method.
            counts: denominators, when they are not those of the planned samples; see `count`.

        Raises:
            RankError: on all ranks, before the model runs, when samples or plan are wrong on any.
            LossError: on all ranks, before the optimizer steps, when the loss is not finite or breaks its
                contract; names the samples.
        """
        started = time.perf_counter()
        loss = self._loss(loss)
        spec = loss_spec(loss)
        packs = self._pack(local, plan, spec.masks)
        if counts is None:
            counts = self._reduce_counts(self._local_counts(local, plan, spec.masks, spec.sums))
        config = self.chunks[0].config
        scaling = Scaling(
            per_token=config.calculate_per_token_loss,
            num_micro_batches=plan.num_micro_batches,
            dp_size=self.layout.dp_size,
            apply=self.config.apply_loss_scale,
        )
        runner = LossRunner(loss, spec, counts, self._head(), scaling, train=True)
        for chunk in self.chunks:
            chunk.train()
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        records = self._run(plan, packs, runner.bind)
        total, metrics = self._finish([r for r in records if r is not None], runner)
        lr = self.optimizer.param_groups[0]["lr"]
        grad_norm, skipped = self._update()
        return StepResult(
            loss=total,
            metrics=metrics,
            grad_norm=grad_norm,
            lr=lr,
            skipped=skipped,
            seconds=time.perf_counter() - started,
            tokens=plan.report.real_tokens,
        )

    def _update(self) -> tuple[float, bool]:
        """Steps optimizer and schedule unless a gradient is not finite; (norm before clipping, skipped)."""
        largest = torch.stack(
            [
                torch.linalg.vector_norm(buffer.grad_data, float("inf"), dtype=torch.float32)
                for chunk in self.chunks
                for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)
            ]
        ).max()
        finite = torch.isfinite(largest).to(torch.int32).cpu()
        dist.all_reduce(finite, op=dist.ReduceOp.MIN, group=self.layout.host_group)
        if not int(finite):
            self.skipped_steps += 1
            return float("nan"), True
        stepped, norm, _ = self.optimizer.step()
        if not stepped:
            self.skipped_steps += 1
            return float("nan"), True
        self.scheduler.step(1)
        return float(norm) if norm is not None else float(self.optimizer.get_grad_norm()), False
