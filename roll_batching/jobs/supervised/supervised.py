"""Runs supervised phases: the warm-up of a GRPO job, and the single phase of an SFT, DPO or KTO job."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from roll_batching.distributed import consensus
from roll_batching.jobs.observe.run_files import Metrics
from roll_batching.jobs.roles.frozen_models import Teacher, make_reference, teacher_of
from roll_batching.jobs.rollouts.step_metrics import merge_metrics, update_metrics
from roll_batching.jobs.run.context import JobContext
from roll_batching.jobs.steps.planned_steps import Encoder, PlannedSteps, StepSource, plan_texts
from roll_batching.jobs.steps.streamed_steps import StreamedSteps
from roll_batching.jobs.steps.update import with_reference_log_probs, with_reference_point
from roll_batching.jobs.texts.texts import Judged, Text
from roll_batching.losses import SFTLoss, loss_spec
from roll_batching.planning import Plan
from roll_batching.samples import distribute
from roll_batching.settings import TrainingArgs
from roll_batching.strategy import MegatronInferStrategy, StepResult

WARMUP = "warmup"
"""The warm-up's name in rows and checkpoints, and its key in a configuration."""


@dataclass(frozen=True, kw_only=True)
class _Phase:
    """Settings of a supervised phase."""

    name: str
    """Name in rows and checkpoints."""
    training: TrainingArgs
    """Training arguments; their `max_steps` is the phase's number of optimizer steps."""
    loss: Any
    steps: StepSource


def warm_up(context: JobContext) -> None:
    """Runs the section `warmup`; does nothing when the resumed checkpoint is of a later phase. Collective."""
    warmup, strategy, corpus = context.config.warmup, context.strategy, context.inputs.corpus
    assert warmup is not None and corpus is not None
    if context.checkpoints.is_past(WARMUP):
        return
    args = warmup.training_args
    size = args.per_device_train_batch_size * args.gradient_accumulation_steps * strategy.layout.dp_size
    steps = PlannedSteps(corpus, _encoder(context), strategy, size=size, seed=context.config.seed)
    _train(context, _Phase(name=WARMUP, training=warmup.scheduled(len(corpus), size), loss=SFTLoss(), steps=steps))


def train_on_texts(context: JobContext, loss: Any) -> None:
    """Runs the phase of a job whose task is `sft`, `dpo` or `kto`. Collective."""
    config, inputs, strategy = context.config, context.inputs, context.strategy
    assert inputs.corpus is not None
    encoder = _encoder(context)
    steps: StepSource
    if config.stream is not None:
        steps = StreamedSteps(inputs.corpus, encoder, strategy, config.stream, token_counts=inputs.token_counts)
    else:
        steps = PlannedSteps(inputs.corpus, encoder, strategy, size=context.texts_per_step, seed=config.seed)
    if config.task == "kto":
        data = config.actor_train.data_args
        warn_if_labels_are_equal(inputs.corpus, data.file_name, data.label)
    _train(context, _Phase(name=config.task, training=context.schedule, loss=loss, steps=steps))


def _encoder(context: JobContext) -> Encoder:
    config = context.config
    return Encoder(
        tokenizer=context.inputs.tokenizer,
        max_length=config.sequence_length or 1,
        pairs=config.task == "dpo",
        judged=config.task == "kto",
    )


def _train(context: JobContext, phase: _Phase) -> None:
    """Runs all steps of `phase`. With held-out texts the first row also has their loss before any update."""
    strategy, last = context.strategy, phase.training.max_steps
    strategy.start_phase(phase.training)
    reference = make_reference(context.config, strategy) if phase.name != WARMUP else None
    teacher = teacher_of(context.config, strategy) if phase.name != WARMUP else None
    context.add_models(reference=reference, teacher=teacher)
    completed_steps = context.checkpoints.restore(phase.name, last, phase.steps, reference)
    validation = None
    if context.inputs.validation is not None and phase.name != WARMUP:
        texts = context.inputs.validation[: context.config.eval_samples]
        validation = _Validation(texts, _encoder(context), strategy, reference, teacher, phase.loss)
    context.start_phase(phase.name, last, completed_steps, phase.training)
    for step in range(completed_steps + 1, last + 1):
        if phase.steps.ended:
            context.recorder.progress.note(f"the data ended with step {step - 1:,} of {last:,}")
            return
        started = time.perf_counter()
        evaluated = validation(0) if step == 1 and validation is not None else {}
        update = _step(context, phase, reference, teacher)
        is_last = step == last or phase.steps.ended
        interval = context.config.eval_steps
        if validation is not None and not evaluated and (is_last or (interval and step % interval == 0)):
            evaluated = validation(step)
        skipped = {"reward": None, "skipped_steps": strategy.skipped_steps}
        teacher_metrics = {} if teacher is None else teacher.metrics()
        metrics = merge_metrics(update_metrics([update]), skipped, evaluated, teacher_metrics)
        metrics["seconds"] = time.perf_counter() - started
        shown = {
            "loss": metrics["loss"],
            "held-out": metrics.get("eval_loss"),
            "skipped": strategy.skipped_steps or None,
            "tokens/s": metrics["tokens_per_second"],
            "packing efficiency": 1 - metrics["padding_share"],
            "imbalance": metrics["imbalance"] if metrics["imbalance"] > 0.05 else None,
        }
        context.record(step, metrics, shown=shown, plan=update[0])
        context.checkpoints.save_if_due(phase.name, step, step if is_last else last, phase.steps, reference)


def _step(
    context: JobContext, phase: _Phase, reference: MegatronInferStrategy | None, teacher: Teacher | None
) -> tuple[Plan, StepResult]:
    local_batch, plan = next(phase.steps)
    masks = loss_spec(phase.loss).masks
    if teacher is not None:
        local_batch = teacher.add_fields(local_batch, masks)
    if reference is not None:
        local_batch = with_reference_log_probs(context.strategy, reference, local_batch, masks, lambda: plan)
        if isinstance(phase.steps, PlannedSteps) and phase.steps.mismatched is not None:
            local_batch = with_reference_point(context.strategy, reference, local_batch, phase.steps.mismatched)
    return plan, context.strategy.train_step(distribute(local_batch, plan), plan, phase.loss)


class _Validation:
    """Held-out samples, planned and distributed once; calling it evaluates the loss. Building it is collective.

    Args:
        texts: at least one, the same on every rank.
        encoder: encodes texts as samples.
        strategy: the model in training.
        reference: computes `ref_log_probs`, once; None if the loss does not read them.
        teacher: adds its likely tokens, once; None if the loss does not read them.
        loss: a loss object.
    """

    def __init__(
        self,
        texts: Sequence[Text],
        encoder: Encoder,
        strategy: MegatronInferStrategy,
        reference: MegatronInferStrategy | None,
        teacher: Teacher | None,
        loss: Any,
    ) -> None:
        self.strategy, self.loss, self._num_texts = strategy, loss, len(texts)
        layout = strategy.layout
        with consensus(layout.host_group, "encoding held-out texts"):
            local_batch = encoder.encode_share(texts, layout.dp_rank, layout.dp_size)
            self._mismatched = encoder.encode_mismatched(texts, layout.dp_rank, layout.dp_size)
        self._plan = plan_texts(local_batch, encoder, strategy, forward=True)
        masks = loss_spec(loss).masks
        if teacher is not None:
            local_batch = teacher.add_fields(local_batch, masks)
        if reference is not None:
            local_batch = with_reference_log_probs(strategy, reference, local_batch, masks, lambda: self._plan)
        self._reference, self._local = reference, local_batch

    def __call__(self, updates: int) -> Metrics:
        """Evaluates after `updates` steps; returns `eval_loss`, the loss's metrics, `eval_samples`. Collective."""
        local_batch = self._local
        if self._mismatched is not None and self._reference is not None:  # KTO's point moves with the policy
            local_batch = with_reference_point(self.strategy, self._reference, local_batch, self._mismatched)
        metrics = self.strategy.evaluate(distribute(local_batch, self._plan), self._plan, self.loss)
        named = {f"eval_{name}": value for name, value in metrics.items()}
        return {"eval_updates": updates, **named, "eval_samples": self._num_texts}


# ---- kto labels


logger = logging.getLogger(__name__)


def warn_if_labels_are_equal(texts: Iterable[Judged], paths: Any, key: str) -> None:
    """Warn on rank 0 if all `texts`, read from the files `paths`, have the same label under `key`."""
    labels = [text.desirable for text in texts]
    if len(set(labels)) != 1 or os.environ.get("RANK", "0") != "0":
        return
    kind = "desirable" if labels[0] else "undesirable"
    logger.warning(
        "all %s answers of %s are %s: KTO compares both kinds; look at the key %r (actor_train.data_args.label)",
        *(f"{len(labels):,}", paths, kind, key),
    )
