"""Differences between a host's figures and ours, each with the reason that the conversion gives its reader.

A difference is explained only by what `roll-batching convert-config` says of this file: `REASONS` tells which figures
what sentence about which key explains. `ALWAYS` are the two that hold for every file.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from roll_batching.tools.conversion import Conversion
from tests.campaigns.conversion_proof.answers import Figures
from tests.campaigns.conversion_proof.samples import is_equal_group

TOLERANCE = 2e-5
"""Largest relative difference of numbers: hosts compute advantages and losses in fp32."""
WITHIN, EQUAL = "learning_rates.within_rl_step", "advantages.equal_rewards"
REASONS: tuple[tuple[str, str, str], ...] = (
    (r"sampling\.(prompt|response)_length", r"(prompt|response)_length", "a limit each"),
    (r"validation\.response_length", "--eval-max-response-len", "more than the job's response_length"),
    (r"validation\..*", "eval_samples", "there is no evaluation"),
    (r"loss(\..*)?", "async_generation_ratio", "old log-probs are the sampler's"),
    (r"loss(\..*)?", r"loss_args\.kl_gradient", "weighted by the ratio to the old policy"),
    (r"loss(\..*)?", "loss_agg_mode", "only its KL and entropy as loss_agg_mode says"),
    (r"loss(\..*)?", "loss_agg_mode", "by the longest response of a micro-batch"),
    (r"loss(\..*)?", r".*policy_loss\.loss_mode", "there is no such loss here"),
    (r"advantages", r"algorithm\.use_kl_in_reward", "lowers the reward of a response by its KL"),
    (
        r"batch\.(mini_batch|optimizer_steps)|learning_rates.*",
        r"actor_train\.training_args\.gradient_accumulation_steps",
        "do not divide by",
    ),
    (r"batch\..*|learning_rates", r"(data\.train|.*ppo_mini|.*ppo_micro)_batch_size.*", "condition"),
    (r"sampling\..*", r"data\.max_(prompt|response)_length.*", "condition"),
    (r"(learning_rates|optimizer).*", r".*ENGINE_CONFIG.*", "condition"),
    (r"batch\.cap_forward", r"policy\.sequence_packing\.logprob_mb_tokens", "old log-probs use training's plans"),
)
"""Figure, key (ours, or the host's where it is left out), and a part of what the conversion says about it; patterns."""
ALWAYS = {
    WITHIN: "the host's schedule moves once per RL step; ours moves with every optimizer step",
    EQUAL: "equal rewards: the host's fp32 mean misses them in the last bit, over a deviation of 1e-6; zeros here",
}
_LARGEST = {WITHIN: np.inf, EQUAL: 0.3}
"""Up to which difference the reason of `ALWAYS` holds."""


@dataclass(frozen=True)
class Difference:
    """One figure of one file that differs."""

    file: str
    figure: str
    host: str
    ours: str
    size: float
    """Largest difference, relative to the host's largest number; infinite for values of another kind."""
    reason: str
    """Empty: unexplained."""


def differences(file: str, host: Figures, ours: Figures, conversion: Conversion, steps: int) -> Iterator[Difference]:
    """The figures of `host` that ours differ from. `steps` are the RL steps of `learning_rates`."""
    group = ours.get("batch.group", 1)
    for name, theirs in host.items():
        parts = _parts(name, theirs, ours.get(name), steps, group)
        for figure, (left, right) in parts.items():
            size = _difference(left, right, 1.0 if figure == EQUAL else None)
            if size > TOLERANCE:
                text = _largest_pair(left, right)
                yield Difference(file, figure, *text, size, _reason(figure, size, conversion))


def _parts(name: str, theirs: Any, mine: Any, steps: int, group: int) -> dict[str, tuple[Any, Any]]:
    """The figure, split where a part of it has a reason of its own in every file."""
    if mine is None or theirs is None or len(np.shape(theirs)) == 0 or np.shape(theirs) != np.shape(mine):
        return {name: (theirs, mine)}
    left, right = np.asarray(theirs, dtype=float), np.asarray(mine, dtype=float)
    if name == "learning_rates":
        first = np.arange(len(left)) % (len(left) // steps) == 0
        per_step = left[first]
        after = np.append(per_step[1:], 2 * per_step[-1] - per_step[-2] if steps > 1 else per_step[-1])
        following = np.repeat(after, len(left) // steps)
        bounded = np.clip(right, np.minimum(left, following), np.maximum(left, following))
        beyond = np.where(first, left, bounded)  # inside a step ours is on its way to the host's next
        return {name: (beyond, right), WITHIN: (left[~first], right[~first])}
    if name == "advantages":
        equal = is_equal_group(group)
        is_zero = equal[: len(right)] & (right == 0).all(axis=1)
        return {name: (left[~is_zero], right[~is_zero]), EQUAL: (left[is_zero], right[is_zero])}
    return {name: (left, right)}


def _difference(theirs: Any, mine: Any, scale: float | None = None) -> float:
    if isinstance(theirs, np.ndarray | list | float | int) and isinstance(mine, np.ndarray | list | float | int):
        left, right = np.asarray(theirs, dtype=float), np.asarray(mine, dtype=float)
        if left.shape == right.shape:
            if not left.size:
                return 0.0
            scale = np.abs(left).max() if scale is None else scale
            worst = float(np.abs(left - right).max())
            if not np.isfinite(worst):
                return float("inf")
            return worst / float(scale) if scale else worst
    return 0.0 if theirs == mine else float("inf")


def _largest_pair(theirs: Any, mine: Any) -> tuple[str, str]:
    """The two numbers that differ most, as text; other values whole."""
    if np.shape(theirs) == np.shape(mine) != ():
        left, right = np.asarray(theirs, dtype=float).ravel(), np.asarray(mine, dtype=float).ravel()
        at = int(np.abs(left - right).argmax())
        return f"{left[at]:.6g}", f"{right[at]:.6g}"
    return tuple(f"shape {np.shape(one)}" if np.shape(one) else str(one) for one in (theirs, mine))  # type: ignore[return-value]


def _reason(figure: str, size: float, conversion: Conversion) -> str:
    if figure in ALWAYS:
        return ALWAYS[figure] if size <= _LARGEST[figure] else ""
    said = [(one.to, one.meaning) for one in (*conversion.changed, *conversion.defaults) if one.meaning]
    said += [(one.key, one.why) for one in conversion.left_out]
    found = [
        " ".join(f"{key}: {text}".split())
        for about, of_key, part in REASONS
        if re.fullmatch(about, figure)
        for key, text in said
        if re.fullmatch(of_key, key) and part in text
    ]
    return "; ".join(dict.fromkeys(found))
