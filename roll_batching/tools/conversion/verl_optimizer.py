"""verl's section `optim`: AdamW, and its schedule, which counts RL steps.

verl steps the schedule after the last mini-batch of an RL step (`verl/workers/engine_workers.py:315`), in the same way
under Megatron (`engine/megatron/transformer_impl.py:720`) and FSDP (`engine/fsdp/transformer_impl.py:816`), for actor
and critic (`train_mini_batch`). `optim.total_training_steps` is the number of RL steps
(`ppo/v1/trainer_base.py:724`). A trainer with `parameter_sync_step` steps it after each such part of an RL step. In the
SFT trainer each optimizer step counts (`trainer/sft_trainer.py:185`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from roll_batching.tools.conversion.foreign_file import ForeignFile
from roll_batching.tools.conversion.mini_batch import optimizer_steps
from roll_batching.tools.conversion.verl_options import ACTOR

_TRAIN = ("actor_train", "training_args")


@dataclass(frozen=True)
class RlSteps:
    """RL steps, or parts of them, that a schedule counts, and the optimizer steps of one model in each."""

    updates: int = 1
    """Optimizer steps of an RL step: passes over its samples x mini-batches."""
    total: int | None = None
    """RL steps of the job; None where the file has no number."""
    idle: int = 0
    """RL steps at the beginning that do not train the model, but count in the length of its schedule."""


def rl_steps_of(file: ForeignFile, critic: ForeignFile | None = None) -> RlSteps:
    """RL steps of the actor, or of the `critic`, read as an actor."""
    trained = critic or file
    prompts, mini = file.peek("data.train_batch_size"), trained.peek(f"{ACTOR}.ppo_mini_batch_size")
    epochs = trained.peek(f"{ACTOR}.ppo_epochs") or 1
    total = file.peek("trainer.total_training_steps")
    mode = f"trainer.v1.{file.peek('trainer.v1.trainer_mode')}"
    parts = file.peek(f"{mode}.parameter_sync_step", 4 if mode.endswith(".separate_async") else 1)
    parts = parts if isinstance(parts, int) and parts > 0 else 1
    warmup = file.peek("trainer.critic_warmup") if critic is None else 0
    return RlSteps(
        updates=max(1, prompts // parts // mini) * epochs if prompts and mini else epochs,
        total=total * parts if isinstance(total, int) and total > 0 else None,
        idle=max(0, warmup - 1) if isinstance(warmup, int) and file.peek("algorithm.adv_estimator") == "gae" else 0,
    )


def convert_optimizer(file: ForeignFile, section: str, megatron: bool, steps: RlSteps) -> None:
    """Converts the optimizer in `section`, and its schedule, which counts `steps`."""
    rate = file.peek(f"{section}.lr")
    betas = file.take(f"{section}.betas")
    if megatron:
        if betas not in (None, [0.9, 0.999]):
            text = "verl passes them to no Megatron optimizer: 0.9 and 0.999 are used, there as here"
            file.draft.leave_out(f"{section}.betas", "idle", text)
    elif isinstance(betas, list) and len(betas) == 2:
        for number, beta in enumerate(betas, 1):
            file.put((*_TRAIN, f"adam_beta{number}"), beta, f"{section}.betas")
    decayed = "" if megatron else "biases and norms are exempt; verl's FSDP engine decays all parameters"
    file.move(f"{section}.lr", (*_TRAIN, "learning_rate"))
    file.move(f"{section}.weight_decay", (*_TRAIN, "weight_decay"), meaning=decayed)
    clip, older = file.take(f"{section}.clip_grad"), file.take(f"{section}.grad_clip")
    key = f"{section}.clip_grad" if older is None else f"{section}.grad_clip"
    file.put((*_TRAIN, "max_grad_norm"), clip if older is None else older, key)
    _schedule(file, section, rate, steps)
    name = file.take(f"{section}.optimizer")
    if name is not None and str(name).lower() not in ("adam", "adamw"):
        file.draft.leave_out(f"{section}.optimizer", "refused", f"{name}: parameters are trained by AdamW")
    override = file.peek(f"{section}.override_optimizer_config") or {}
    for key in list(override):
        if key in file.tables.speed or key.startswith("optimizer_"):
            file.take(f"{section}.override_optimizer_config.{key}")
            text = "changes speed or memory, not results"
            file.draft.leave_out(f"{section}.override_optimizer_config.{key}", "idle", text)
    if file.take(f"{section}.weight_decay_incr_style") not in (None, "constant"):
        file.draft.leave_out(f"{section}.weight_decay_incr_style", "refused", "weight decay is constant")


def _schedule(file: ForeignFile, section: str, rate: Any, steps: RlSteps) -> None:
    shape = file.take(f"{section}.lr_decay_style")
    file.put((*_TRAIN, "lr_scheduler_type"), shape, f"{section}.lr_decay_style")
    file.move(f"{section}.min_lr", (*_TRAIN, "min_lr"))
    file.move(f"{section}.lr_warmup_init", (*_TRAIN, "lr_warmup_init"))
    start = file.take(f"{section}.init_lr_ratio")
    if start and isinstance(start, int | float) and isinstance(rate, int | float):
        file.put((*_TRAIN, "lr_warmup_init"), float(f"{rate * start:.12g}"), f"{section}.init_lr_ratio")
    style = file.take(f"{section}.warmup_style") or file.take(f"{section}.lr_scheduler_type")
    file.put((*_TRAIN, "lr_scheduler_type"), style, f"{section}.lr_scheduler_type")
    share = file.take(f"{section}.min_lr_ratio")
    if share and isinstance(rate, int | float) and isinstance(share, int | float):
        file.put((*_TRAIN, "min_lr"), float(f"{rate * share:.12g}"), f"{section}.min_lr_ratio")
    warmup, part = file.take(f"{section}.lr_warmup_steps"), file.take(f"{section}.lr_warmup_steps_ratio")
    decay = file.take(f"{section}.lr_decay_steps")
    horizon, key = steps.total if decay is None else decay, f"{section}.lr_warmup_steps"
    text = ""
    if not isinstance(warmup, int) or warmup <= 0:
        key, warmup = f"{section}.lr_warmup_steps_ratio", None
        if isinstance(part, int | float) and 0 < part <= 1 and isinstance(horizon, int):
            warmup, text = int(part * horizon), f"{part:g} of {horizon} steps, rounded down; "
    if warmup is None:
        file.put((*_TRAIN, "warmup_ratio"), part, key)
    else:
        count, unit = optimizer_steps(warmup, steps.updates, "an RL step")
        file.put((*_TRAIN, "warmup_steps"), count, key, text + unit)
    if isinstance(decay, int):
        count, unit = optimizer_steps(decay, steps.updates, "an RL step")
        file.put((*_TRAIN, "max_steps"), count, f"{section}.lr_decay_steps", unit)
    elif steps.idle and steps.total is not None and "constant" not in (style, shape):
        count, _ = optimizer_steps(steps.total, steps.updates, "an RL step")
        text = "verl's schedule counts the steps of critic_warmup in its length, and does not go on during them"
        file.put((*_TRAIN, "max_steps"), count, "trainer.critic_warmup", text)
    total = file.take(f"{section}.total_training_steps")
    if isinstance(total, int) and total > 0:
        text = "verl's trainer sets it to the length of the job"
        file.draft.leave_out(f"{section}.total_training_steps", "idle", text)
