"""Settings of the correction for the mismatch between the log-probs of the sampler and of the trainer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from roll_batching.settings.fields import Settings, setting

WeightType = Literal["token", "segment", "geometric", "sequence"]
FilterLevel = Literal["token", "segment", "geometric", "sequence", "max"]
_BOUNDS = ("ratio_low", "ratio_high", "diff_low", "diff_high", "k2_high", "k3_high", "error_high")
_LEVELS = (
    "token: of each token; segment: the mean over a turn; geometric: the mean over the response; sequence: the sum "
    "over the response"
)


class ISWeight(Settings):
    """Weights p_train / p_infer of the tokens in the loss: importance sampling."""

    weight_type: WeightType = setting("token", help=f"What the log-ratio in the weight is of. {_LEVELS}.")
    upper_bound: float | None = setting(1.2, help="Weights above are truncated to it. ~: no bound.", gt=0)
    lower_bound: float = setting(0.0, help="Weights below are raised to it.", ge=0)
    batch_normalize: bool = setting(
        False, help="Divide by the mean over the samples of the RL step: over tokens, of geometric and sequence over "
        "responses."
    )  # fmt: skip


class TrainInferFilter(Settings):
    """A filter of tokens, turns or responses, whose values must all be inside the given bounds."""

    agg_type: FilterLevel = setting("token", help=f"What is compared with the bounds. {_LEVELS}; max: the largest.")
    ratio_low: float | None = setting(None, help="Least p_train / p_infer.", ge=0)
    ratio_high: float | None = setting(None, help="Largest p_train / p_infer.", gt=0)
    diff_low: float | None = setting(None, help="Least p_train - p_infer.")
    diff_high: float | None = setting(None, help="Largest p_train - p_infer.")
    k2_high: float | None = setting(None, help="Largest d^2 / 2, with d = log p_train - log p_infer.", ge=0)
    k3_high: float | None = setting(None, help="Largest exp(d) - 1 - d.", ge=0)
    error_high: float | None = setting(None, help="Largest exp(|d|).", ge=1)
    effect: Literal["mask", "zero"] = setting(
        "mask",
        help="mask: what is outside leaves the response mask, so that it does not count in the loss's means either. "
        "zero: it has the weight 0, and counts.",
    )

    def problems(self) -> Iterator[tuple[str, str]]:
        """Key and text of each contradiction."""
        bounds_set = [name for name in _BOUNDS if getattr(self, name) is not None]
        if not bounds_set:
            yield "agg_type", f"has no bound; give one of {', '.join(_BOUNDS)}"
        for low, high in (("ratio_low", "ratio_high"), ("diff_low", "diff_high")):
            least, largest = getattr(self, low), getattr(self, high)
            if least is not None and largest is not None and least > largest:
                yield low, f"is {least}, above {high}, which is {largest}; swap them"
        of_mean = [name for name in bounds_set if name.startswith(("ratio", "diff"))]
        if self.agg_type == "max" and of_mean:
            yield of_mean[0], "has no largest value of a response; use agg_type: token, or k2_high or k3_high"


class TrainInferCorrection(Settings):
    """The correction: weights, and filters, all of which must pass."""

    is_weight: ISWeight | None = setting(None, help="Importance weights. Default: none.")
    filters: list[TrainInferFilter] = setting(default_factory=list, help="Filters, all of which must pass.")

    def problems(self) -> Iterator[tuple[tuple[str | int, ...], str]]:
        """Path below this section and text of each contradiction."""
        if self.is_weight is None and not self.filters:
            yield (), "corrects nothing; give is_weight or filters, or leave the section out"
        weight = self.is_weight
        if weight is not None and weight.upper_bound is not None and weight.lower_bound > weight.upper_bound:
            text = f"is {weight.lower_bound}, above upper_bound, which is {weight.upper_bound}; swap them"
            yield ("is_weight", "lower_bound"), text
        for index, filter_ in enumerate(self.filters):
            for key, text in filter_.problems():
                yield ("filters", index, key), text
