"""Supervised phases: the warm-up of a GRPO job, and the one phase of an SFT or DPO job."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from roll_batching.jobs.config.objective_rules import wants_reference
from roll_batching.jobs.observe.metrics_file import Row
from roll_batching.jobs.rollouts.rows import merged, update_row
from roll_batching.jobs.run.run import Run
from roll_batching.jobs.steps.steps import Encoder, PlannedSteps, StepSource
from roll_batching.jobs.steps.stream_steps import StreamedSteps
from roll_batching.jobs.steps.update import Update, with_reference
from roll_batching.jobs.supervised.validation import Validation
from roll_batching.losses import SFTLoss, loss_spec
from roll_batching.samples import distribute
from roll_batching.settings import TrainingArgs
from roll_batching.strategy import MegatronInferStrategy

WARMUP = "warmup"
"""The warm-up's name in rows and checkpoints, and its key in a configuration."""


@dataclass(frozen=True, kw_only=True)
class _Phase:
    """What a supervised phase is made of."""

    name: str
    """In rows and checkpoints."""
    training: TrainingArgs
    """Its `max_steps` are the phase's."""
    loss: Any
    steps: StepSource


def warm_up(run: Run) -> None:
    """The phase that the section `warmup` describes; nothing when a checkpoint lies beyond it. Collective."""
    warmup, strategy, corpus = run.config.warmup, run.strategy, run.inputs.corpus
    assert warmup is not None and corpus is not None
    if run.checkpoints.is_past(WARMUP):
        return
    args = warmup.training_args
    size = args.per_device_train_batch_size * args.gradient_accumulation_steps * strategy.layout.dp_size
    steps = PlannedSteps(corpus, _encoder(run), strategy, size=size, seed=run.config.seed)
    _train(run, _Phase(name=WARMUP, training=warmup.scheduled(len(corpus), size), loss=SFTLoss(), steps=steps))


def train_on_texts(run: Run, loss: Any) -> None:
    """The phase of a job whose task is `sft` or `dpo`. Collective."""
    texts = run.inputs.corpus
    assert texts is not None
    stream, encoder = run.config.stream, _encoder(run)
    steps: StepSource
    if stream is not None:
        steps = StreamedSteps(texts, encoder, run.strategy, stream, token_counts=run.inputs.token_counts)
    else:
        steps = PlannedSteps(texts, encoder, run.strategy, size=run.texts_per_step, seed=run.config.seed)
    _train(run, _Phase(name=run.config.task, training=run.schedule, loss=loss, steps=steps))


def _encoder(run: Run) -> Encoder:
    config = run.config
    return Encoder(tokenizer=run.inputs.tokenizer, max_length=config.sequence_length or 1, pairs=config.task == "dpo")


def _train(run: Run, phase: _Phase) -> None:
    """All steps. Where there are held-out texts, the first row also holds what they say before any update."""
    strategy, last = run.strategy, phase.training.max_steps
    strategy.start_phase(phase.training)
    reference = _reference(run) if phase.name != WARMUP else None
    behind = run.checkpoints.restore(phase.name, last, phase.steps, reference)
    validation = _validation(run, phase, reference)
    run.begin(phase.name, last, behind)
    for step in range(behind + 1, last + 1):
        if phase.steps.ended:
            run.recorder.progress.note(f"the data ended with step {step - 1:,} of {last:,}")
            return
        started = time.perf_counter()
        evaluated = validation(0) if step == 1 and validation is not None else {}
        update = _step(run, phase, reference)
        final = step == last or phase.steps.ended
        every = run.config.eval_steps
        if validation is not None and not evaluated and (final or (every and step % every == 0)):
            evaluated = validation(step)
        row = merged(update_row([update]), {"reward": None, "skipped_steps": strategy.skipped_steps}, evaluated)
        row["seconds"] = time.perf_counter() - started
        run.record(step, row, shown=_shown(row))
        run.checkpoints.save_if_due(phase.name, step, step if final else last, phase.steps, reference)


def _step(run: Run, phase: _Phase, reference: MegatronInferStrategy | None) -> Update:
    home, plan = next(phase.steps)
    if reference is not None:
        home = with_reference(run.strategy, reference, home, lambda: plan, loss_spec(phase.loss).masks)
    return Update(plan=plan, result=run.strategy.train_step(distribute(home, plan), plan, phase.loss))


def _shown(row: Row) -> dict[str, float | None]:
    return {
        "loss": row["loss"],
        "held-out": row.get("eval_loss"),
        "tokens/s": row["tokens_per_second"],
        "fill": 1 - row["padding_share"],
        "imbalance": row["imbalance"],
    }


def _reference(run: Run) -> MegatronInferStrategy | None:
    """A frozen copy of the model as the phase begins, when the loss asks for it. Collective."""
    config = run.config
    if config.reference is None or not wants_reference(config):
        return None
    reference = MegatronInferStrategy(config.reference, seed=config.seed, temperature=run.strategy.temperature)
    reference.initialize(weights=False)
    reference.copy_weights_from(run.strategy)
    return reference


def _validation(run: Run, phase: _Phase, reference: MegatronInferStrategy | None) -> Validation | None:
    texts = run.inputs.validation
    if texts is None or phase.name == WARMUP:
        return None
    return Validation(texts[: run.config.eval_samples], _encoder(run), run.strategy, reference, phase.loss)
