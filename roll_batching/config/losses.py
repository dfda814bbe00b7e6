"""The losses that a job can name, and the settings of each. Nothing here imports torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from roll_batching.config.fields import Settings, honoured
from roll_batching.registry import Entry, Registry

ROLLOUT_FIELDS: Mapping[str, str] = {
    "response_mask": "the sampled tokens",
    "advantages": "one per sample",
    "rewards": "one per sample",
    "rollout_log_probs": "of the sampled tokens, as they were drawn",
    "old_log_probs": "unless logprob_plan is none",
    "ref_log_probs": "where the job has a reference",
}
"""What a loss finds in the samples of the RL phase, beside `input_ids`."""


class PolicySettings(Settings):
    """`loss_args` of `policy`: what has no key of its own."""

    kl_estimator: Literal["k1", "k2", "k3"] = honoured("k3", help="Estimator of the divergence from the reference.")
    engine_ratio_cap: float | None = honoured(
        None,
        help="Weights each token by min(p_trainer / p_rollout, this): corrects for an engine's other numbers. "
        "Default: no weights.",
        gt=0,
    )
    sample_weights: Literal["rewards"] | None = honoured(
        None, help="Weights the samples by their rewards, which must not be negative, scaled to a mean of 1."
    )


class SFTSettings(Settings):
    """`loss_args` of `sft`."""

    aggregation: Literal["token_mean", "sequence_mean", "sequence_sum"] = honoured(
        "token_mean", help="How tokens are averaged, over the whole mini-batch on all ranks."
    )


class DPOSettings(Settings):
    """`loss_args` of `dpo`."""

    beta: float = honoured(0.1, help="How strongly the policy is held to the reference.", gt=0)
    label_smoothing: float = honoured(0.0, help="Share of pairs whose label is taken to be wrong.", ge=0, lt=0.5)


@dataclass(frozen=True, kw_only=True)
class Loss(Entry):
    """A registered loss."""

    reads: tuple[str, ...]
    """Fields of the samples without which it cannot work."""
    settings: type[Settings]
    """Its settings under `loss_args`."""
    keys: Mapping[str, str] = field(default_factory=dict)
    """Settings that are keys of the job, as ROLL has them: by name, the keys."""


LOSSES: Registry[Loss] = Registry(
    "loss",
    Loss(
        name="policy",
        target="roll_batching.losses.objectives:PolicyLoss",
        summary="clipped policy gradient: PPO, GRPO, DAPO, Dr. GRPO, GSPO",
        reads=("response_mask", "advantages"),
        settings=PolicySettings,
        keys={
            "clip_low": "pg_clip, or pg_clip_low with use_pg_clip_range",
            "clip_high": "pg_clip, or pg_clip_high with use_pg_clip_range",
            "dual_clip": "dual_clip_loss",
            "ratio": "importance_sampling",
            "kl_coef": "kl_loss_coef with use_kl_loss",
            "kl_bound": "kl_loss_bound",
            "entropy_coef": "entropy_loss_coef",
            "aggregation": "loss_agg_mode",
        },
    ),
    Loss(
        name="sft",
        target="roll_batching.losses.objectives:SFTLoss",
        summary="negative log-likelihood of the response tokens",
        reads=("response_mask",),
        settings=SFTSettings,
    ),
    Loss(
        name="dpo",
        target="roll_batching.losses.preference:DPOLoss",
        summary="direct preference optimisation over pairs of responses",
        reads=("response_mask", "ref_log_probs", "pair", "chosen"),
        settings=DPOSettings,
    ),
)
