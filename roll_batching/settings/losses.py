"""Settings of the losses, without torch: the dataclasses that the loss classes extend.

Fields with a `doc` can stand in a job's `loss_args`. The other fields have keys of the job.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Lt, doc

from roll_batching.checked_fields import CheckedFields, NotNegative, OptionalPositive, Positive, PositiveShare, Share
from roll_batching.errors import LossError
from roll_batching.settings.fields import InFile

OfTokens = Literal["token_mean", "sequence_mean", "sequence_sum"]
AggregationName = OfTokens | Literal["rollout_mean", "rollout_token_mean"]
Aggregation = AggregationName | Callable[..., Any]
"""A name, or a function of a `TokenView` and a [tokens] loss."""
KlEstimator = Literal["k1", "k2", "k3", "abs"]
KlGradient = Literal["value", "straight_through", "score_function", "importance"]
KL_BOUND = 10.0
"""k3 is at most 10 per token (verl, ROLL, NeMo-RL)."""
EngineCorrection = Literal["truncate", "mask", "mask_sequences"]
"""truncate: w clamped to [lowest, cap], truncated importance sampling (IMPALA, Espeholt et al. 2018, arXiv 1802.01561).
mask: w, and 0 outside that range (IcePop, Ling team 2025). mask_sequences: w, and 0 for whole sequences whose geometric
mean is outside (seq-mask-TIS, Liu et al. 2025, "When speed kills stability"; its range is narrow, about 0.999 to
1.002)."""
RatioOf = Literal["token", "sequence", "sequence_token"]
DualClip = Annotated[float | None, Gt(1)]
InnerShare = Annotated[float, Gt(0), Lt(1)]
"""A share that is neither nothing nor all."""


class LossSettings(CheckedFields, error=LossError):
    """Base of the settings of losses."""

    @property
    def rollouts(self) -> bool:
        """Whether the loss averages over rollouts. For an aggregation of your own that does, override it with True."""
        how = getattr(self, "aggregation", "")
        return getattr(how, "__name__", how) in ("rollout_mean", "rollout_token_mean")


@dataclass(frozen=True, kw_only=True)
class PolicyGradientSettings(LossSettings):
    """Settings of all policy gradients."""

    kl_coef: NotNegative = 0.0
    """Weight of the KL penalty to the reference (GRPO, Shao et al. 2024, arXiv 2402.03300); reads `ref_log_probs`
    (next_token)."""
    kl_estimator: Annotated[KlEstimator, doc("Estimator of the divergence from the reference.")] = "k3"
    kl_gradient: Annotated[
        KlGradient,
        doc(
            "The estimate's own gradient; k2's, which is the divergence's (verl: k1+, k3+); the estimate's and the "
            "score function's (NeMo-RL); or that of the estimate weighted by the ratio to the old policy "
            "(DeepSeek-V3.2)."
        ),
    ] = "value"
    kl_bound: OptionalPositive = KL_BOUND
    """Upper bound of k3 per token, without gradient beyond (verl, ROLL: 10); None: no bound."""
    entropy_coef: NotNegative = 0.0
    """Weight of the entropy bonus."""
    engine_correction: Annotated[
        EngineCorrection,
        doc(
            "With engine_ratio_cap: weights w = p_trainer / p_rollout, clamped to the range (truncate, TIS); or 0 for "
            "tokens outside it (mask, IcePop); or 0 for sequences whose geometric mean is outside (mask_sequences, "
            "seq-mask-TIS)."
        ),
    ] = "truncate"
    engine_ratio_min: Annotated[float, Ge(0), doc("Lower end of that range.")] = 0.0
    engine_ratio_cap: Annotated[
        OptionalPositive,
        doc(
            "Upper end: corrects for numerical differences of an engine by weights p_trainer / p_rollout. Default: no "
            "weights."
        ),
    ] = None
    """Reads `rollout_log_probs` (next_token), the engine's log-probs."""
    sample_weights: Annotated[
        str | None,
        InFile(Literal["rewards"] | None),
        doc("Weight the samples by their rewards, which must not be negative, scaled to a mean of 1."),
    ] = None
    """Name of a sample field of non-negative weights, normalised to a mean of 1 over the mini-batch."""
    aggregation: Aggregation = "token_mean"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.engine_ratio_cap is not None and self.engine_ratio_min > self.engine_ratio_cap:
            raise LossError(f"engine_ratio_min is {self.engine_ratio_min}: give a number from 0 to engine_ratio_cap")


@dataclass(frozen=True, kw_only=True)
class PolicySettings(PolicyGradientSettings):
    """Settings of the clipped policy gradient."""

    clip_low: PositiveShare = 0.2
    clip_high: Positive = 0.2
    """The ratio is clipped to [1 - clip_low, 1 + clip_high] (clip-higher: DAPO, Yu et al. 2025, arXiv 2503.14476)."""
    dual_clip: DualClip = None
    """With a negative advantage A the loss is at most -dual_clip * A; above 1 (Ye et al. 2020, arXiv 1912.09729).
    Above 1 + clip_high this is two-sided clipping, min(r, delta), of INTELLECT-2 (2025, arXiv 2505.07291) and TRL."""
    ratio: RatioOf = "token"
    """"sequence": one ratio s per sequence, the geometric mean of its tokens' (GSPO, Zheng et al. 2025, arXiv
    2507.18071; its clip range is much narrower, about 3e-4, and its aggregation "sequence_mean"). "sequence_token":
    sg(s) p / sg(p), the same value with each token's gradient, for advantages per token (its section 4.3; verl)."""


@dataclass(frozen=True, kw_only=True)
class CISPOSettings(PolicyGradientSettings):
    """Settings of CISPO."""

    clip_low: Share = 0.2
    clip_high: NotNegative = 0.2


@dataclass(frozen=True, kw_only=True)
class SAPOSettings(PolicyGradientSettings):
    """Settings of SAPO."""

    temperature_positive: Annotated[Positive, doc("Temperature of the gate for positive advantages.")] = 1.0
    temperature_negative: Annotated[Positive, doc("Temperature of the gate for other advantages.")] = 1.05
    """Higher, so that gradients that lower a token's probability fade sooner."""


@dataclass(frozen=True, kw_only=True)
class GMPOSettings(PolicyGradientSettings):
    """Settings of GMPO, whose range is one of log-ratios."""

    clip_low: Positive = 0.4
    clip_high: Positive = 0.4


@dataclass(frozen=True, kw_only=True)
class TOPRSettings(PolicyGradientSettings):
    """Settings of TOPR."""

    positive_weight: Annotated[NotNegative, doc("Weight of responses with a reward above 0.")] = 1.0
    negative_weight: Annotated[NotNegative, doc("Weight of other responses.")] = 1.0


@dataclass(frozen=True, kw_only=True)
class ClipCovSettings(PolicySettings):
    """Settings of Clip-Cov."""

    share: Annotated[PositiveShare, doc("Share of the step's tokens without loss, at least one token.")] = 0.0002
    lowest: Annotated[float, doc("Lower end of their covariances.")] = 1.0
    highest: Annotated[float, doc("Upper end of their covariances.")] = 5.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.lowest >= self.highest:
            raise LossError(f"lowest is {self.lowest}, highest {self.highest}: give a range of covariances")


@dataclass(frozen=True, kw_only=True)
class KlCovSettings(PolicyGradientSettings):
    """Settings of KL-Cov."""

    share: Annotated[PositiveShare, doc("Share of the step's tokens with a penalty, of the largest covariances.")] = (
        0.0002
    )
    penalty: Annotated[NotNegative, doc("Weight of their distance from the old policy.")] = 1.0


@dataclass(frozen=True, kw_only=True)
class SFTSettings(LossSettings):
    """Settings of supervised fine-tuning."""

    aggregation: Annotated[
        Aggregation,
        InFile(OfTokens),
        doc("How tokens are averaged, over the whole mini-batch on all ranks."),
    ] = "token_mean"


@dataclass(frozen=True, kw_only=True)
class PreferenceSettings(LossSettings):
    """Settings of the losses over pairs."""

    beta: Annotated[Positive, doc("Strength of the regularisation towards the reference.")] = 0.1
    average_log_probs: Annotated[bool, doc("Means over tokens instead of sums.")] = False
    """As in TRL's IPO and NeMo-RL's preference_average_log_probs."""
    sft_coef: Annotated[NotNegative, doc("Weight of the chosen responses' negative log-likelihood.")] = 0.0
    """Averaged over pairs (RPO, Pang et al. 2024, arXiv 2404.19733; NeMo-RL's sft_loss_weight)."""
    sft_average_log_probs: Annotated[bool, doc("Mean over tokens instead of the sum for that likelihood.")] = False


@dataclass(frozen=True, kw_only=True)
class DPOSettings(PreferenceSettings):
    """Settings of DPO."""

    label_smoothing: Annotated[float, Ge(0), Lt(0.5), doc("Assumed share of pairs with a wrong label.")] = 0.0
    """cDPO (Mitchell 2023)."""


@dataclass(frozen=True, kw_only=True)
class KTOSettings(LossSettings):
    """Settings of KTO."""

    beta: Annotated[Positive, doc("Strength of the regularisation towards the reference.")] = 0.1
    desirable_weight: Annotated[NotNegative, doc("Weight of desirable responses.")] = 1.0
    """With n_d and n_u of each kind the paper sets n_d w_d / (n_u w_u) to 1 to 4/3."""
    undesirable_weight: Annotated[NotNegative, doc("Weight of the others.")] = 1.0


DistillObjective = Literal[
    "forward_kl",
    "reverse_kl",
    "mixed_kl",
    "js_divergence",
    "skewed_forward_kl",
    "skewed_reverse_kl",
    "adaptive_kl",
]


@dataclass(frozen=True, kw_only=True)
class DistillSettings(LossSettings):
    """Settings of distillation. All have keys of the job."""

    objective: DistillObjective = "forward_kl"
    temperature: Positive = 1.0
    """Divides the log-probs of the teacher and the student."""
    weight: Share = 1.0
    """Weight of the divergence; the rest is that of the tokens' negative log-likelihood."""
    mixed_weight: Share = 0.5
    """mixed_kl: weight of the forward divergence."""
    skew: InnerShare = 0.1
    """Skewed divergences: the other distribution's share of the mixture."""
    adaptive_share: InnerShare = 0.5
    """adaptive_kl: probability of the teacher's tail."""
    zero_outside_topk: bool = False
    """Compare the student's distribution over the whole vocabulary; the teacher has about 0 outside its k tokens."""
    aggregation: Aggregation = "token_mean"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.zero_outside_topk and self.objective not in ("forward_kl", "reverse_kl", "mixed_kl"):
            raise LossError(f"zero_outside_topk is for forward_kl, reverse_kl and mixed_kl, not {self.objective}")
        if self.zero_outside_topk and self.temperature != 1:
            raise LossError(f"zero_outside_topk has no temperature, which is {self.temperature}: set it to 1")
