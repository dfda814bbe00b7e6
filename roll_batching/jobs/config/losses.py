"""Registered losses and the settings of each, without torch.

Names, types and defaults of `loss_args` stand here as well as in the loss classes, which import torch, an optional
dependency: a file is checked without it. tests/losses/test_registry.py compares the two.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from roll_batching.registry import Entry, Registry
from roll_batching.settings.fields import Settings, setting

ROLLOUT_FIELDS: Mapping[str, str] = {
    "response_mask": "the sampled tokens",
    "advantages": "one per sample; per token with gamma or add_token_level_kl",
    "rewards": "one per sample",
    "rollout_log_probs": "of the sampled tokens, when they were sampled",
    "old_log_probs": "unless logprob_plan is none",
    "ref_log_probs": "where the job has a reference",
}
"""Fields of the samples of the RL phase beside `input_ids`, for losses."""


class PolicySettings(Settings):
    """`loss_args` of the policy gradients: settings without a key of the job."""

    kl_estimator: Literal["k1", "k2", "k3", "abs"] = setting(
        "k3", help="Estimator of the divergence from the reference."
    )
    kl_gradient: Literal["value", "straight_through", "score_function", "importance"] = setting(
        "value",
        help="The estimate's own gradient; k2's, which is the divergence's (verl: k1+, k3+); the estimate's and the "
        "score function's (NeMo-RL); or that of the estimate weighted by the ratio to the old policy (DeepSeek-V3.2).",
    )
    engine_correction: Literal["truncate", "mask", "mask_sequences"] = setting(
        "truncate",
        help="With engine_ratio_cap: weights w = p_trainer / p_rollout, clamped to the range (truncate, TIS); or 0 for "
        "tokens outside it (mask, IcePop); or 0 for sequences whose geometric mean is outside (mask_sequences, "
        "seq-mask-TIS).",
    )
    engine_ratio_min: float = setting(0.0, help="Lower end of that range.", ge=0)
    engine_ratio_cap: float | None = setting(
        None,
        help="Upper end: corrects for numerical differences of an engine by weights p_trainer / p_rollout. Default: no "
        "weights.",
        gt=0,
    )
    sample_weights: Literal["rewards"] | None = setting(
        None, help="Weight the samples by their rewards, which must not be negative, scaled to a mean of 1."
    )


class SAPOSettings(PolicySettings):
    """`loss_args` of `sapo`."""

    temperature_positive: float = setting(1.0, help="Temperature of the gate for positive advantages.", gt=0)
    temperature_negative: float = setting(1.05, help="Temperature of the gate for other advantages.", gt=0)


class TOPRSettings(PolicySettings):
    """`loss_args` of `topr`."""

    positive_weight: float = setting(1.0, help="Weight of responses with a reward above 0.", ge=0)
    negative_weight: float = setting(1.0, help="Weight of other responses.", ge=0)


class ClipCovSettings(PolicySettings):
    """`loss_args` of `clip_cov`."""

    share: float = setting(0.0002, help="Share of the step's tokens without loss, at least one token.", gt=0, le=1)
    lowest: float = setting(1.0, help="Lower end of their covariances.")
    highest: float = setting(5.0, help="Upper end of their covariances.")


class KlCovSettings(PolicySettings):
    """`loss_args` of `kl_cov`."""

    share: float = setting(
        0.0002, help="Share of the step's tokens with a penalty, of the largest covariances.", gt=0, le=1
    )
    penalty: float = setting(1.0, help="Weight of their distance from the old policy.", ge=0)


class SFTSettings(Settings):
    """`loss_args` of `sft`."""

    aggregation: Literal["token_mean", "sequence_mean", "sequence_sum"] = setting(
        "token_mean", help="How tokens are averaged, over the whole mini-batch on all ranks."
    )


class PreferenceSettings(Settings):
    """`loss_args` of losses over pairs."""

    beta: float = setting(0.1, help="Strength of the regularisation towards the reference.", gt=0)
    average_log_probs: bool = setting(False, help="Means over tokens instead of sums.")
    sft_coef: float = setting(0.0, help="Weight of the chosen responses' negative log-likelihood.", ge=0)
    sft_average_log_probs: bool = setting(False, help="Mean over tokens instead of the sum for that likelihood.")


class DPOSettings(PreferenceSettings):
    """`loss_args` of `dpo`."""

    label_smoothing: float = setting(0.0, help="Assumed share of pairs with a wrong label.", ge=0, lt=0.5)


class KTOSettings(Settings):
    """`loss_args` of `kto`."""

    beta: float = setting(0.1, help="Strength of the regularisation towards the reference.", gt=0)
    desirable_weight: float = setting(1.0, help="Weight of desirable responses.", ge=0)
    undesirable_weight: float = setting(1.0, help="Weight of the others.", ge=0)


@dataclass(frozen=True, kw_only=True)
class Loss(Entry):
    """A registered loss."""

    reads: tuple[str, ...]
    """Fields of the samples that it requires."""
    settings: type[Settings]
    """Its settings under `loss_args`."""
    keys: Mapping[str, str] = field(default_factory=dict)
    """Its fields that are keys of the job: by field, the keys, for messages."""


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
        settings=PolicySettings,
        keys={**_CLIP, "dual_clip": "dual_clip_loss", "ratio": "importance_sampling", **_SHARED},
    ),
    Loss(
        name="cispo",
        target="roll_batching.losses.objectives:CISPOLoss",
        summary="clipped importance weights without gradient, times log-probs (CISPO; ROLL: tis with pg_clip_low 1)",
        reads=("response_mask", "advantages"),
        settings=PolicySettings,
        keys={**_CLIP, **_SHARED},
    ),
    Loss(
        name="gpg",
        target="roll_batching.losses.objectives:GPGLoss",
        summary="log-probs times advantages, without ratio or clip (GPG, REINFORCE)",
        reads=("response_mask", "advantages"),
        settings=PolicySettings,
        keys=_SHARED,
    ),
    Loss(
        name="sapo",
        target="roll_batching.losses.objectives:SAPOLoss",
        summary="a soft gate on the ratio for the clip (SAPO)",
        reads=("response_mask", "advantages"),
        settings=SAPOSettings,
        keys=_SHARED,
    ),
    Loss(
        name="gmpo",
        target="roll_batching.losses.objectives:GMPOLoss",
        summary="the geometric mean of ratios whose logarithms are clipped (GMPO; loss_agg_mode seq-mean-token-mean)",
        reads=("response_mask", "advantages"),
        settings=PolicySettings,
        keys={**_CLIP, **_SHARED},
    ),
    Loss(
        name="topr",
        target="roll_batching.losses.objectives:TOPRLoss",
        summary="log-probs times advantages, tapered where the reward is not above 0 (TOPR)",
        reads=("response_mask", "advantages", "rewards"),
        settings=TOPRSettings,
        keys=_SHARED,
    ),
    Loss(
        name="clip_cov",
        target="roll_batching.losses.covariance:ClipCovLoss",
        summary="policy, without the loss of some tokens whose log-prob and advantage vary together (Clip-Cov)",
        reads=("response_mask", "advantages", "old_log_probs"),
        settings=ClipCovSettings,
        keys={**_CLIP, "dual_clip": "dual_clip_loss", "ratio": "importance_sampling", **_SHARED},
    ),
    Loss(
        name="kl_cov",
        target="roll_batching.losses.covariance:KlCovLoss",
        summary="the ratio times advantages, and the distance from the old policy for such tokens (KL-Cov)",
        reads=("response_mask", "advantages", "old_log_probs"),
        settings=KlCovSettings,
        keys=_SHARED,
    ),
    Loss(
        name="sft",
        target="roll_batching.losses.supervised:SFTLoss",
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
    Loss(
        name="ipo",
        target="roll_batching.losses.preference:IPOLoss",
        summary="identity preference optimisation over pairs of responses: the squared distance of the margin",
        reads=("response_mask", "ref_log_probs", "pair", "chosen"),
        settings=PreferenceSettings,
    ),
    Loss(
        name="kto",
        target="roll_batching.losses.unpaired:KTOLoss",
        summary="Kahneman-Tversky optimisation: responses that are desirable or not, without pairs",
        reads=("response_mask", "ref_log_probs", "desirable", "reference_point"),
        settings=KTOSettings,
    ),
)
