"""Translates corrections for the mismatch of sampler and trainer to `train_infer_correction`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from roll_batching.tools.conversion.draft import Draft

SECTION = "train_infer_correction"
_ROLL_RATIO = {"ratio_low": 0.8, "ratio_high": 1.2}
_ROLL_DIFF = {"diff_low": -0.2, "diff_high": 0.2}
"""Defaults of ROLL's filters."""
_ROLL_KEYS = {
    "is_weight": {"enabled", "weight_type", "upper_bound", "detach"},
    "filters": {"enabled", "agg_type", "ratio_enabled", "diff_enabled", *_ROLL_RATIO, *_ROLL_DIFF},
}
_LEVELS = {"token": "token", "seq_sum": "sequence", "seq_mean": "geometric", "seq_max": "max"}
"""Our `agg_type` by the level of verl's `rollout_rs`."""


def convert_roll_section(draft: Draft, data: dict[str, Any]) -> None:
    """Replaces ROLL's section in `data` by ours: the enabled weight and filters, with ROLL's defaults."""
    theirs = data.pop(SECTION, None)
    if theirs is None:
        return
    if not isinstance(theirs, dict) or not isinstance(theirs.get("filters") or [], list):
        draft.leave_out(SECTION, "refused", "is no section with is_weight and filters: write one, or leave it out")
        return
    section: dict[str, Any] = {}
    for key in theirs.keys() - _ROLL_KEYS.keys():
        draft.leave_out(f"{SECTION}.{key}", "refused", "is no key of ROLL's section")
    weight = _roll_keys(draft, "is_weight", theirs.get("is_weight"))
    if weight.get("enabled"):
        section["is_weight"] = {"weight_type": weight.get("weight_type", "token")}
        section["is_weight"]["upper_bound"] = weight.get("upper_bound", 1.2)
        if weight.get("detach") is False:
            draft.leave_out(f"{SECTION}.is_weight.detach", "refused", "weights have no gradient")
    parts = [_roll_keys(draft, "filters", part, f".{index}") for index, part in enumerate(theirs.get("filters") or [])]
    filters = [_roll_filter(part) for part in parts if part.get("enabled")]
    if filters := [bounds for bounds in filters if len(bounds) > 1]:  # a filter with agg_type alone has no bounds
        section["filters"] = filters
    if not section:
        draft.leave_out(SECTION, "idle", "nothing in it is enabled")
        return
    data[SECTION] = section
    meaning = "filters drop tokens after advantages are computed, and before the loss's means"
    draft.meanings[SECTION,] = meaning


def _roll_keys(draft: Draft, name: str, given: Any, place: str = "") -> Mapping[str, Any]:
    """Returns the part `name` of ROLL's section, empty for none; records its unknown keys as left out."""
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        draft.leave_out(f"{SECTION}.{name}{place}", "refused", "is no section with enabled and bounds")
        return {}
    for key in given.keys() - _ROLL_KEYS[name]:
        draft.leave_out(f"{SECTION}.{name}{place}.{key}", "refused", "is no key of ROLL's section")
    return given


def _roll_filter(theirs: Mapping[str, Any]) -> dict[str, Any]:
    """Our filter for one of ROLL's, with ROLL's defaults."""
    ours: dict[str, Any] = {"agg_type": theirs.get("agg_type", "token")}
    if theirs.get("ratio_enabled", True):
        ours |= {key: theirs.get(key, default) for key, default in _ROLL_RATIO.items()}
    if theirs.get("diff_enabled", False):
        ours |= {key: theirs.get(key, default) for key, default in _ROLL_DIFF.items()}
    return ours


def verl_weight(kind: str, limit: Any, normalize: bool) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """(Our `is_weight`, our `filters`) for verl's `rollout_is` and `rollout_is_threshold`.

    A limit of one number truncates weights. Two numbers, such as 0.5_2.0, set the weights outside to 0, as IcePop does,
    and truncate none. Raises ValueError for a limit that is not made of numbers.
    """
    low, _, high = str(limit).rpartition("_")
    weight = {"weight_type": kind, "upper_bound": None if low else float(high)}
    weight |= {"batch_normalize": True} if normalize else {}
    if not low:
        return weight, []
    return weight, [{"agg_type": kind, "ratio_low": float(low), "ratio_high": float(high), "effect": "zero"}]


def verl_filters(modes: str, thresholds: Any) -> list[dict[str, Any]]:
    """Our filters for verl's `rollout_rs` and `rollout_rs_threshold`. Raises ValueError for unknown names.

    verl compares the k1 estimate, -log p_train / p_infer, with the logarithms of its bounds: the ratio lies between
    their reciprocals.
    """
    names = list(dict.fromkeys(name.strip() for name in modes.split(",") if name.strip()))
    values = [value.strip() for value in str(thresholds).split(",") if value.strip()]
    if len(values) == 1:
        values *= len(names)
    if not names or len(values) != len(names):
        raise ValueError(f"{thresholds!r}: give one threshold, or one for each of {modes}")
    return [_verl_filter(*pair) for pair in zip(names, values, strict=True)]


def _verl_filter(name: str, threshold: str) -> dict[str, Any]:
    """Our filter for one of verl's, such as `seq_mean_k1`. One bound of k1 holds for both directions."""
    match = re.fullmatch(r"(token|seq_sum|seq_mean|seq_max)_(k[123])", name)
    if match is None or name == "seq_max_k1":
        raise ValueError(f"{name!r} is no filter of verl's: leave it out")
    level, estimator = _LEVELS[match[1]], match[2]
    if estimator != "k1":
        return {"agg_type": level, f"{estimator}_high": float(threshold)}
    low, _, high = threshold.rpartition("_")
    largest = float(high)
    least = float(low) if low else 1 / largest
    return {"agg_type": level, "ratio_low": 1 / largest, "ratio_high": 1 / least}


def nemo_rl_correction(
    kind: str | None, cap: float | None, lowest: float | None, *, per_sequence: bool, error: float | None
) -> dict[str, Any]:
    """Our section for NeMo-RL's importance weights and its threshold of the engine's log-prob error.

    Args:
        kind: `truncated_importance_sampling_type`; "none": there are no weights.
        cap: largest weight.
        lowest: smallest weight.
        per_sequence: whether a sequence has one weight.
        error: `seq_logprob_error_threshold`.
    """
    section: dict[str, Any] = {}
    filters: list[dict[str, Any]] = []
    if kind != "none":
        truncates = kind in (None, "tis")
        weight = {"weight_type": "sequence" if per_sequence else "token", "upper_bound": cap if truncates else None}
        section["is_weight"] = weight | ({"lower_bound": lowest} if truncates and lowest else {})
        if not truncates:
            level = "geometric" if kind == "seq-mask-tis" else weight["weight_type"]
            filters.append({"agg_type": level, "ratio_low": lowest, "ratio_high": cap, "effect": "zero"})
    if error is not None:
        filters.append({"agg_type": "geometric", "error_high": error})
    return section | ({"filters": filters} if filters else {})
