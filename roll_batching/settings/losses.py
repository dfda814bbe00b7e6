"""Settings of the losses, without torch: the dataclasses that the loss classes extend.

Fields made by `loss_arg` can stand in a job's `loss_args`. The other fields have keys of the job.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, get_args, get_type_hints

from pydantic import create_model

from roll_batching.errors import LossError
from roll_batching.settings.fields import Settings, setting

AggregationName = Literal["token_mean", "sequence_mean", "sequence_sum"]
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


def loss_arg(default: Any, *, help: str, in_file: Any = None, **limits: Any) -> Any:
    """A field that `loss_args` can give. `limits` are pydantic's; `in_file` is its type there, if narrower."""
    return dataclasses.field(
        default=default, metadata={"setting": setting(default, help=help, **limits), "type": in_file}
    )


def loss_args_section(settings: type[Any]) -> type[Settings]:
    """The section `loss_args` of a loss with these `settings`: its own fields before those of its bases."""
    declared = {field.name: field.metadata for field in dataclasses.fields(settings) if "setting" in field.metadata}
    types = get_type_hints(settings)
    names = [name for base in settings.__mro__ for name in inspect.get_annotations(base) if name in declared]
    fields: dict[str, Any] = {
        name: (declared[name]["type"] or types[name], declared[name]["setting"]) for name in names
    }
    return create_model(settings.__name__, __base__=Settings, **fields)


def _check_choice(name: str, value: object, choices: Any) -> None:
    if value not in get_args(choices):
        raise LossError(f"{name} {value!r}: give one of {', '.join(get_args(choices))}")


@dataclass(frozen=True, kw_only=True)
class PolicyGradientSettings:
    """Settings of all policy gradients."""

    kl_coef: float = 0.0
    """Weight of the KL penalty to the reference (GRPO, Shao et al. 2024, arXiv 2402.03300); reads `ref_log_probs`
    (next_token)."""
    kl_estimator: KlEstimator = loss_arg("k3", help="Estimator of the divergence from the reference.")
    kl_gradient: KlGradient = loss_arg(
        "value",
        help="The estimate's own gradient; k2's, which is the divergence's (verl: k1+, k3+); the estimate's and the "
        "score function's (NeMo-RL); or that of the estimate weighted by the ratio to the old policy (DeepSeek-V3.2).",
    )
    kl_bound: float | None = KL_BOUND
    """Upper bound of k3 per token, without gradient beyond (verl, ROLL: 10); None: no bound."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus."""
    engine_correction: EngineCorrection = loss_arg(
        "truncate",
        help="With engine_ratio_cap: weights w = p_trainer / p_rollout, clamped to the range (truncate, TIS); or 0 for "
        "tokens outside it (mask, IcePop); or 0 for sequences whose geometric mean is outside (mask_sequences, "
        "seq-mask-TIS).",
    )
    engine_ratio_min: float = loss_arg(0.0, help="Lower end of that range.", ge=0)
    engine_ratio_cap: float | None = loss_arg(
        None,
        help="Upper end: corrects for numerical differences of an engine by weights p_trainer / p_rollout. Default: no "
        "weights.",
        gt=0,
    )
    """Reads `rollout_log_probs` (next_token), the engine's log-probs."""
    sample_weights: str | None = loss_arg(
        None,
        help="Weight the samples by their rewards, which must not be negative, scaled to a mean of 1.",
        in_file=Literal["rewards"] | None,
    )
    """Name of a sample field of non-negative weights, normalised to a mean of 1 over the mini-batch."""
    aggregation: Aggregation = "token_mean"

    def __post_init__(self) -> None:
        if self.engine_ratio_cap is not None and self.engine_ratio_cap <= 0:
            raise LossError(f"engine_ratio_cap is {self.engine_ratio_cap}: give a positive number, such as 2, or None")
        if self.engine_ratio_min < 0 or self.engine_ratio_min > (self.engine_ratio_cap or float("inf")):
            raise LossError(f"engine_ratio_min is {self.engine_ratio_min}: give a number from 0 to engine_ratio_cap")
        _check_choice("engine_correction", self.engine_correction, EngineCorrection)
        _check_choice("kl_estimator", self.kl_estimator, KlEstimator)
        _check_choice("kl_gradient", self.kl_gradient, KlGradient)
        if self.kl_coef < 0:
            raise LossError(f"kl_coef is {self.kl_coef}: give 0 or more")
        if self.kl_bound is not None and self.kl_bound <= 0:
            raise LossError(f"kl_bound is {self.kl_bound}: give a positive number, such as 10, or None")
        check_aggregation(self.aggregation)


def check_aggregation(how: Aggregation) -> None:
    """Raises `LossError` unless `how` is a function or the name of an aggregation."""
    if not callable(how) and how not in get_args(AggregationName):
        names = ", ".join(get_args(AggregationName))
        raise LossError(f"aggregation {how!r}: give one of {names}, or a function of (view, per_token)")


@dataclass(frozen=True, kw_only=True)
class PolicySettings(PolicyGradientSettings):
    """Settings of the clipped policy gradient."""

    clip_low: float = 0.2
    clip_high: float = 0.2
    """The ratio is clipped to [1 - clip_low, 1 + clip_high] (clip-higher: DAPO, Yu et al. 2025, arXiv 2503.14476)."""
    dual_clip: float | None = None
    """With a negative advantage A the loss is at most -dual_clip * A; above 1 (Ye et al. 2020, arXiv 1912.09729).
    Above 1 + clip_high this is two-sided clipping, min(r, delta), of INTELLECT-2 (2025, arXiv 2505.07291) and TRL."""
    ratio: RatioOf = "token"
    """"sequence": one ratio s per sequence, the geometric mean of its tokens' (GSPO, Zheng et al. 2025, arXiv
    2507.18071; its clip range is much narrower, about 3e-4, and its aggregation "sequence_mean"). "sequence_token":
    sg(s) p / sg(p), the same value with each token's gradient, for advantages per token (its section 4.3; verl)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (0 < self.clip_low <= 1 and self.clip_high > 0):
            raise LossError(
                f"clip range ({self.clip_low}, {self.clip_high}): give clip_low in (0, 1] and clip_high above 0"
            )
        if self.dual_clip is not None and self.dual_clip <= 1:
            raise LossError(f"dual_clip is {self.dual_clip}: give a number above 1, such as 3, or None")
        _check_choice("ratio", self.ratio, RatioOf)


@dataclass(frozen=True, kw_only=True)
class CISPOSettings(PolicyGradientSettings):
    """Settings of CISPO."""

    clip_low: float = 0.2
    clip_high: float = 0.2

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (0 <= self.clip_low <= 1 and self.clip_high >= 0):
            raise LossError(
                f"clip range ({self.clip_low}, {self.clip_high}): give clip_low in [0, 1] and clip_high from 0"
            )


@dataclass(frozen=True, kw_only=True)
class SAPOSettings(PolicyGradientSettings):
    """Settings of SAPO."""

    temperature_positive: float = loss_arg(1.0, help="Temperature of the gate for positive advantages.", gt=0)
    temperature_negative: float = loss_arg(1.05, help="Temperature of the gate for other advantages.", gt=0)
    """Higher, so that gradients that lower a token's probability fade sooner."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if min(self.temperature_positive, self.temperature_negative) <= 0:
            raise LossError(
                f"temperatures ({self.temperature_positive}, {self.temperature_negative}): give positive numbers"
            )


@dataclass(frozen=True, kw_only=True)
class GMPOSettings(PolicyGradientSettings):
    """Settings of GMPO."""

    clip_low: float = 0.4
    clip_high: float = 0.4

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.clip_low <= 0 or self.clip_high <= 0:
            raise LossError(f"clip range ({self.clip_low}, {self.clip_high}): give positive bounds for log-ratios")


@dataclass(frozen=True, kw_only=True)
class TOPRSettings(PolicyGradientSettings):
    """Settings of TOPR."""

    positive_weight: float = loss_arg(1.0, help="Weight of responses with a reward above 0.", ge=0)
    negative_weight: float = loss_arg(1.0, help="Weight of other responses.", ge=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.positive_weight < 0 or self.negative_weight < 0:
            raise LossError(f"weights ({self.positive_weight}, {self.negative_weight}): give 0 or more")


@dataclass(frozen=True, kw_only=True)
class ClipCovSettings(PolicySettings):
    """Settings of Clip-Cov."""

    share: float = loss_arg(0.0002, help="Share of the step's tokens without loss, at least one token.", gt=0, le=1)
    lowest: float = loss_arg(1.0, help="Lower end of their covariances.")
    highest: float = loss_arg(5.0, help="Upper end of their covariances.")

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_share(self.share)
        if self.lowest >= self.highest:
            raise LossError(f"lowest is {self.lowest}, highest {self.highest}: give a range of covariances")


@dataclass(frozen=True, kw_only=True)
class KlCovSettings(PolicyGradientSettings):
    """Settings of KL-Cov."""

    share: float = loss_arg(
        0.0002, help="Share of the step's tokens with a penalty, of the largest covariances.", gt=0, le=1
    )
    penalty: float = loss_arg(1.0, help="Weight of their distance from the old policy.", ge=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_share(self.share)
        if self.penalty < 0:
            raise LossError(f"penalty is {self.penalty}: give 0 or more")


def _check_share(share: float) -> None:
    if not 0 < share <= 1:
        raise LossError(f"share is {share}: give a share of tokens above 0 and at most 1")


@dataclass(frozen=True, kw_only=True)
class SFTSettings:
    """Settings of supervised fine-tuning."""

    aggregation: Aggregation = loss_arg(
        "token_mean",
        help="How tokens are averaged, over the whole mini-batch on all ranks.",
        in_file=AggregationName,
    )


@dataclass(frozen=True, kw_only=True)
class PreferenceSettings:
    """Settings of the losses over pairs."""

    beta: float = loss_arg(0.1, help="Strength of the regularisation towards the reference.", gt=0)
    average_log_probs: bool = loss_arg(False, help="Means over tokens instead of sums.")
    """As in TRL's IPO and NeMo-RL's preference_average_log_probs."""
    sft_coef: float = loss_arg(0.0, help="Weight of the chosen responses' negative log-likelihood.", ge=0)
    """Averaged over pairs (RPO, Pang et al. 2024, arXiv 2404.19733; NeMo-RL's sft_loss_weight)."""
    sft_average_log_probs: bool = loss_arg(False, help="Mean over tokens instead of the sum for that likelihood.")

    def __post_init__(self) -> None:
        if self.beta <= 0 or self.sft_coef < 0:
            raise LossError(f"beta {self.beta}, sft_coef {self.sft_coef}: give beta above 0 and sft_coef from 0")


@dataclass(frozen=True, kw_only=True)
class DPOSettings(PreferenceSettings):
    """Settings of DPO."""

    label_smoothing: float = loss_arg(0.0, help="Assumed share of pairs with a wrong label.", ge=0, lt=0.5)
    """cDPO (Mitchell 2023)."""


@dataclass(frozen=True, kw_only=True)
class KTOSettings:
    """Settings of KTO."""

    beta: float = loss_arg(0.1, help="Strength of the regularisation towards the reference.", gt=0)
    desirable_weight: float = loss_arg(1.0, help="Weight of desirable responses.", ge=0)
    """With n_d and n_u of each kind the paper sets n_d w_d / (n_u w_u) to 1 to 4/3."""
    undesirable_weight: float = loss_arg(1.0, help="Weight of the others.", ge=0)

    def __post_init__(self) -> None:
        if self.beta <= 0 or min(self.desirable_weight, self.undesirable_weight) < 0:
            raise LossError(
                f"beta {self.beta}, desirable_weight {self.desirable_weight}, undesirable_weight "
                f"{self.undesirable_weight}: give beta above 0 and weights from 0"
            )


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
class DistillSettings:
    """Settings of distillation. All have keys of the job."""

    objective: DistillObjective = "forward_kl"
    temperature: float = 1.0
    """Divides the log-probs of the teacher and the student."""
    weight: float = 1.0
    """Weight of the divergence; the rest is that of the tokens' negative log-likelihood."""
    mixed_weight: float = 0.5
    """mixed_kl: weight of the forward divergence."""
    skew: float = 0.1
    """Skewed divergences: the other distribution's share of the mixture."""
    adaptive_share: float = 0.5
    """adaptive_kl: probability of the teacher's tail."""
    zero_outside_topk: bool = False
    """Compare the student's distribution over the whole vocabulary; the teacher has about 0 outside its k tokens."""
    aggregation: Aggregation = "token_mean"

    def __post_init__(self) -> None:
        _check_choice("objective", self.objective, DistillObjective)
        if not 0 < self.temperature < float("inf"):
            raise LossError(f"temperature is {self.temperature}: give a finite number above 0")
        for name in ("weight", "mixed_weight"):
            if not 0 <= getattr(self, name) <= 1:
                raise LossError(f"{name} is {getattr(self, name)}: give a number from 0 to 1")
        for name in ("skew", "adaptive_share"):
            if not 0 < getattr(self, name) < 1:
                raise LossError(f"{name} is {getattr(self, name)}: give a number between 0 and 1")
        if self.zero_outside_topk and self.objective not in ("forward_kl", "reverse_kl", "mixed_kl"):
            raise LossError(f"zero_outside_topk is for forward_kl, reverse_kl and mixed_kl, not {self.objective}")
        if self.zero_outside_topk and self.temperature != 1:
            raise LossError(f"zero_outside_topk has no temperature, which is {self.temperature}: set it to 1")
        check_aggregation(self.aggregation)
