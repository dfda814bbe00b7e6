"""Settings of the optimizer, its schedule and the mini-batch: ROLL's `training_args`."""

from __future__ import annotations

from typing import Literal

from pydantic import model_validator

from roll_batching.settings.fields import MOST_TOKENS, Settings, Switch, setting

_READ_IF = {
    "min_lr": Switch(lambda args: not args.is_constant, "lr_scheduler_type is {0.lr_scheduler_type}"),
    "lr_warmup_init": Switch(lambda args: args.warms_up, "there is no warm-up: warmup_steps is 0"),
    "warmup_ratio": Switch(lambda args: not args.warmup_steps, "warmup_steps is {0.warmup_steps}"),
    "muon_momentum muon_nesterov muon_split_qkv muon_scale_mode muon_extra_scale_factor muon_coefficient_type "
    "muon_num_ns_steps muon_tp_mode muon_fp32_matmul_prec": Switch(
        lambda args: args.uses_muon, "optimizer is {0.optimizer}"
    ),
    "initial_loss_scale min_loss_scale loss_scale_window hysteresis": Switch(
        lambda args: args.loss_scale is None, "loss_scale is {0.loss_scale:g}: the scale is constant"
    ),
}
LOSS_SCALE_KEYS = ("loss_scale", "initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis")
"""Keys of the loss scale, in Megatron's names. Only models in fp16 have one."""


class TrainingArgs(Settings, read_if=_READ_IF):
    """`training_args`: optimizer, schedule and mini-batch."""

    optimizer: Literal["adam", "muon"] = setting(
        "adam",
        help="adam: AdamW. muon: Megatron's Muon for matrices and AdamW for embeddings, output layer, norms and biases "
        "(docs/fine-tuning.md); needs NVIDIA's package Emerging-Optimizers.",
    )
    learning_rate: float = setting(1e-6, help="Peak learning rate.", gt=0, le=1e37)
    min_lr: float = setting(0.0, help="Learning rate at the end of the schedule.", ge=0)
    weight_decay: float = setting(0.0, help="Decoupled weight decay; biases and norms are exempt.", ge=0)
    adam_beta1: float = setting(0.9, help="Decay of the first moment.", ge=0, lt=1)
    adam_beta2: float = setting(0.999, help="Decay of the second moment.", ge=0, lt=1)
    adam_epsilon: float = setting(1e-8, help="Epsilon of AdamW.", gt=0)
    muon_momentum: float = setting(0.95, help="Decay of Muon's momentum.", ge=0, lt=1)
    muon_nesterov: bool = setting(False, help="Nesterov momentum in Muon.")
    muon_split_qkv: bool = setting(
        True, help="Orthogonalise queries, keys and values of an attention layer as three matrices."
    )
    muon_scale_mode: Literal["spectral", "unit_rms_norm", "shape_scaling"] = setting(
        "spectral",
        help="Scale of the update of an m x n matrix: sqrt(max(m, n)), sqrt(m / n) or sqrt(max(1, m / n)).",
    )
    muon_extra_scale_factor: float = setting(
        1.0, help="Factor of Muon's update. About 0.2 with spectral gives it the size of AdamW's.", gt=0
    )
    muon_coefficient_type: Literal["quintic", "simple", "polar_express", "aol"] = setting(
        "quintic", help="Coefficients of the Newton-Schulz iteration, by the names of Emerging-Optimizers."
    )
    muon_num_ns_steps: int = setting(5, help="Newton-Schulz iterations per update.", ge=1)
    muon_tp_mode: Literal["blockwise", "duplicated", "distributed"] = setting(
        "blockwise",
        help="What is orthogonalised under TP: each rank's shard (blockwise), or the whole matrix, on every rank "
        "(duplicated) or by all ranks together (distributed).",
    )
    muon_fp32_matmul_prec: Literal["medium", "high", "highest"] = setting(
        "medium", help="Precision of the iteration's products, as torch names it: medium is bf16, highest fp32."
    )
    max_grad_norm: float = setting(1.0, help="Gradients are clipped to this global norm; 0: no clipping.", ge=0)
    lr_scheduler_type: Literal["constant", "constant_with_warmup", "linear", "cosine"] = setting(
        "constant",
        help="Shape of the learning rate after warm-up. constant_with_warmup is the same as constant.",
    )
    lr_warmup_init: float = setting(0.0, help="Learning rate at the beginning of the warm-up.", ge=0)
    warmup_steps: int = setting(0, help="Optimizer steps of linear warm-up.", ge=0)
    warmup_ratio: float = setting(
        0.0, help="Warm-up as a share of all optimizer steps, when warmup_steps is 0.", ge=0, le=1
    )
    per_device_train_batch_size: int = setting(
        1, help="Sequences per data-parallel rank and, in padded mode, per micro-batch.", ge=1, le=MOST_TOKENS
    )
    gradient_accumulation_steps: int = setting(
        1,
        help="A mini-batch (one optimizer step) is per_device_train_batch_size x this x data-parallel "
        "ranks sequences, in "
        "every batching mode.",
        ge=1,
    )
    max_steps: int = setting(
        -1, help="Optimizer steps that the schedule spans; -1: as many as the job will make.", ge=-1
    )
    loss_scale: float | None = setting(
        None, help="fp16: constant factor of the loss in backward. Default: one that adapts, as below.", gt=0
    )
    initial_loss_scale: float = setting(
        2.0**16,
        help="fp16: factor of the loss in backward at the start; gradients are divided by it. A step whose gradients "
        "overflow is skipped. (Megatron's default of 2^32 skips the first steps.)",
        gt=0,
    )
    min_loss_scale: float = setting(1.0, help="fp16: smallest loss scale.", gt=0)
    loss_scale_window: int = setting(
        1000, help="fp16: the loss scale doubles after so many steps without overflow.", ge=1
    )
    hysteresis: int = setting(
        2, help="fp16: overflows before the loss scale is halved, counted from the last time it doubled.", ge=1
    )

    @property
    def uses_muon(self) -> bool:
        """Whether Muon trains the matrices."""
        return self.optimizer == "muon"

    @property
    def is_constant(self) -> bool:
        """Whether the learning rate stays at its peak after the warm-up."""
        return self.lr_scheduler_type.startswith("constant")

    @property
    def warms_up(self) -> bool:
        """Whether the schedule begins with a warm-up."""
        return self.warmup_steps > 0 or self.warmup_ratio > 0

    @model_validator(mode="after")
    def _rate_falls(self) -> TrainingArgs:
        if self.min_lr > self.learning_rate:
            raise ValueError(
                f"min_lr is {self.min_lr:g}, above learning_rate {self.learning_rate:g}, from which the schedule falls "
                "to it: lower min_lr, or leave it out"
            )
        return self

    @model_validator(mode="after")
    def _scale_falls(self) -> TrainingArgs:
        if self.min_loss_scale > self.initial_loss_scale:
            raise ValueError(
                f"min_loss_scale is {self.min_loss_scale:g}, above initial_loss_scale {self.initial_loss_scale:g}, "
                "from which the loss scale falls to it: lower min_loss_scale, or leave it out"
            )
        return self

    def unfinished_warmup(self, steps: int) -> str | None:
        """A notice if `warmup_steps` is more than the `steps` of a phase, else None."""
        if self.warmup_steps <= steps:
            return None
        rate = self.lr_warmup_init + (self.learning_rate - self.lr_warmup_init) * steps / self.warmup_steps
        return (
            f"is {self.warmup_steps}, above the number of optimizer steps, {steps}: the learning rate rises to "
            f"{rate:.3g} alone, not to {self.learning_rate:g}"
        )


def rate_problem(args: TrainingArgs) -> tuple[str, str] | None:
    """The key of a learning rate that does not fit the others, and why; None if all fit."""
    if args.lr_warmup_init > args.learning_rate:
        text = f"is {args.lr_warmup_init:g}, above learning_rate, {args.learning_rate:g}, to which the warm-up rises"
        return "lr_warmup_init", f"{text}: lower it"
    return None
