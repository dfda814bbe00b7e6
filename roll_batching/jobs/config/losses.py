"""Registered losses: the samples' fields that each reads, and the settings that it takes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from roll_batching.registry import Entry, Registry
from roll_batching.settings.fields import Settings, section_of
from roll_batching.settings.losses import (
    ClipCovSettings,
    DistillSettings,
    DPOSettings,
    KlCovSettings,
    KTOSettings,
    PolicyGradientSettings,
    PreferenceSettings,
    SAPOSettings,
    SFTSettings,
    TOPRSettings,
)

ROLLOUT_FIELDS: Mapping[str, str] = {
    "response_mask": "the sampled tokens",
    "advantages": "one per sample; per token with gamma or add_token_level_kl",
    "rewards": "one per sample",
    "rollout_log_probs": "of the sampled tokens, when they were sampled",
    "old_log_probs": "unless logprob_plan is none",
    "ref_log_probs": "where the job has a reference",
}
"""Fields that the samples of the RL phase have for losses, in addition to `input_ids`; each with a description."""
TEACHER_FIELDS = ("teacher_log_probs", "teacher_ids")
FIELDS: Mapping[str, tuple[str, ...]] = {
    "grpo": tuple(ROLLOUT_FIELDS),
    "distill": ("response_mask", "rewards", *TEACHER_FIELDS),
    "sft": ("response_mask", "ref_log_probs", *TEACHER_FIELDS),
    "dpo": ("response_mask", "ref_log_probs", "pair", "chosen"),
    "kto": ("response_mask", "ref_log_probs", "desirable", "reference_point"),
}
"""Fields of the samples by task; `ref_log_probs` only with a reference, `TEACHER_FIELDS` only with a teacher."""


@dataclass(frozen=True, kw_only=True)
class Loss(Entry):
    """A registered loss."""

    reads: tuple[str, ...]
    """Fields of the samples that it requires."""
    settings: type[Settings]
    """Its settings under `loss_args`."""
    keys: Mapping[str, str] = field(default_factory=dict)
    """Fields of the loss that keys of the job set: by field, the names of these keys, for messages."""


_CLIP = {
    "clip_low": "pg_clip, or pg_clip_low with use_pg_clip_range",
    "clip_high": "pg_clip, or pg_clip_high with use_pg_clip_range",
}
_SHARED = {
    "kl_coef": "kl_loss_coef with use_kl_loss",
    "kl_bound": "kl_loss_bound",
    "entropy_coef": "entropy_loss_coef",
    "aggregation": "loss_agg_mode",
}

LOSSES: Registry[Loss] = Registry(
    "loss",
    Loss(
        name="policy",
        target="roll_batching.losses.objectives:PolicyLoss",
        summary="clipped policy gradient: PPO, GRPO, DAPO, Dr. GRPO, GSPO",
        reads=("response_mask", "advantages"),
        settings=section_of(PolicyGradientSettings),
        keys={**_CLIP, "dual_clip": "dual_clip_loss", "ratio": "importance_sampling", **_SHARED},
    ),
    Loss(
        name="cispo",
        target="roll_batching.losses.objectives:CISPOLoss",
        summary="clipped importance weights without gradient, times log-probs (CISPO; ROLL: tis with pg_clip_low 1)",
        reads=("response_mask", "advantages"),
        settings=section_of(PolicyGradientSettings),
        keys={**_CLIP, **_SHARED},
    ),
    Loss(
        name="gpg",
        target="roll_batching.losses.objectives:GPGLoss",
        summary="log-probs times advantages, without ratio or clip (GPG, REINFORCE)",
        reads=("response_mask", "advantages"),
        settings=section_of(PolicyGradientSettings),
        keys=_SHARED,
    ),
    Loss(
        name="sapo",
        target="roll_batching.losses.objectives:SAPOLoss",
        summary="a soft gate on the ratio for the clip (SAPO)",
        reads=("response_mask", "advantages"),
        settings=section_of(SAPOSettings),
        keys=_SHARED,
    ),
    Loss(
        name="gmpo",
        target="roll_batching.losses.objectives:GMPOLoss",
        summary="the geometric mean of ratios whose logarithms are clipped (GMPO; loss_agg_mode seq-mean-token-mean)",
        reads=("response_mask", "advantages"),
        settings=section_of(PolicyGradientSettings),
        keys={**_CLIP, **_SHARED},
    ),
    Loss(
        name="topr",
        target="roll_batching.losses.objectives:TOPRLoss",
        summary="log-probs times advantages, tapered where the reward is not above 0 (TOPR)",
        reads=("response_mask", "advantages", "rewards"),
        settings=section_of(TOPRSettings),
        keys=_SHARED,
    ),
    Loss(
        name="clip_cov",
        target="roll_batching.losses.covariance:ClipCovLoss",
        summary="policy, without the loss of some tokens whose log-prob and advantage vary together (Clip-Cov)",
        reads=("response_mask", "advantages", "old_log_probs"),
        settings=section_of(ClipCovSettings),
        keys={**_CLIP, "dual_clip": "dual_clip_loss", "ratio": "importance_sampling", **_SHARED},
    ),
    Loss(
        name="kl_cov",
        target="roll_batching.losses.covariance:KlCovLoss",
        summary="the ratio times advantages, and the distance from the old policy for such tokens (KL-Cov)",
        reads=("response_mask", "advantages", "old_log_probs"),
        settings=section_of(KlCovSettings),
        keys=_SHARED,
    ),
    Loss(
        name="sft",
        target="roll_batching.losses.fine_tuning:SFTLoss",
        summary="negative log-likelihood of the response tokens",
        reads=("response_mask",),
        settings=section_of(SFTSettings),
    ),
    Loss(
        name="distill",
        target="roll_batching.losses.distillation:DistillLoss",
        summary="divergence from a teacher over its most likely tokens (docs/distillation.md)",
        reads=("response_mask", "teacher_log_probs", "teacher_ids"),
        settings=section_of(DistillSettings),
        keys={
            "objective": "kd_objective",
            "temperature": "kd_temperature",
            "weight": "distill_loss_weight",
            "mixed_weight": "mixed_kl_weight",
            "skew": "skew_lambda",
            "adaptive_share": "adaptive_kl_alpha",
            "zero_outside_topk": "zero_outside_topk",
            "aggregation": "loss_agg_mode",
        },
    ),
    Loss(
        name="dpo",
        target="roll_batching.losses.fine_tuning:DPOLoss",
        summary="direct preference optimisation over pairs of responses",
        reads=("response_mask", "ref_log_probs", "pair", "chosen"),
        settings=section_of(DPOSettings),
    ),
    Loss(
        name="ipo",
        target="roll_batching.losses.fine_tuning:IPOLoss",
        summary="identity preference optimisation over pairs of responses: the squared distance of the margin",
        reads=("response_mask", "ref_log_probs", "pair", "chosen"),
        settings=section_of(PreferenceSettings),
    ),
    Loss(
        name="kto",
        target="roll_batching.losses.fine_tuning:KTOLoss",
        summary="Kahneman-Tversky optimisation: responses that are desirable or not, without pairs",
        reads=("response_mask", "ref_log_probs", "desirable", "reference_point"),
        settings=section_of(KTOSettings),
    ),
)
