"""Keys of rollouts: a rollout function, asynchronous and dynamic sampling, shaped rewards, distillation."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from pydantic import field_validator

from roll_batching.checked_fields import Positive, Share
from roll_batching.jobs.config.diagnostics import Problem
from roll_batching.registry import is_dotted
from roll_batching.settings.fields import MOST_TOKENS, ROLLOUTS, Settings, Switch, setting
from roll_batching.settings.losses import DistillObjective, InnerShare

NEMO_GYM = "roll_batching.jobs.rollouts.nemo_gym:rollout"
"""The rollout function of NeMo-Gym."""


class RolloutKeys(Settings, read_if={"*": ROLLOUTS}):
    """The keys of a rollout function."""

    rollout_function: str | None = setting(
        None,
        help="Your own async function of one rollout, as package.module:function: several turns, tools and "
        "environments (docs/rollouts.md). Default: the model answers each prompt once.",
    )
    rollout_args: dict[str, Any] = setting(default_factory=dict, help="Keyword arguments for the rollout function.")
    rollout_function_timeout: float = setting(
        300.0,
        help="Most seconds that a rollout function may take between two calls of its client, before the "
        "first and after the last: the time of tools and environments, not of sampling.",
        gt=0,
    )
    rollout_max_calls: int = setting(
        64, help="Most calls of the client for one rollout: a rollout function that exceeds it is an error.", ge=1
    )

    @field_validator("rollout_function")
    @classmethod
    def _is_dotted(cls, path: str | None) -> str | None:
        if path is not None and not is_dotted(path):
            raise ValueError(f"{path!r} names no function: write it as package.module:function")
        return path


def rollout_problems(keys: RolloutKeys) -> Iterator[Problem]:
    """One problem for each key that only a rollout function reads, if it is set and the job has no rollout function."""
    if keys.rollout_function is not None:
        return
    for name in ("rollout_args", "rollout_function_timeout", "rollout_max_calls"):
        if name in keys.model_fields_set and getattr(keys, name) != RolloutKeys.model_fields[name].get_default(
            call_default_factory=True
        ):
            yield Problem((name,), "is read by a rollout function only: set rollout_function, or leave it out")


# ---- asynchronous rollouts


_AHEAD = "async_generation_ratio is 0"
_READ_IF_ASYNC = {
    "*": ROLLOUTS,
    "max_staleness in_flight_updates partial_rollout": (ROLLOUTS, Switch(lambda job: job.asynchronous, _AHEAD)),
    "sampler_restarts rollout_timeout": (
        ROLLOUTS,
        Switch(lambda job: job.has_sampler or job.own_devices("reference") is not None, _AHEAD),
    ),
}


class AsyncKeys(Settings, read_if=_READ_IF_ASYNC):
    """The keys of asynchronous rollouts."""

    async_generation_ratio: float = setting(
        0,
        help="How far rollouts run ahead of training, in units of rollout_batch_size: a separate process, the sampler, "
        "generates and scores them while the model trains. 0: synchronous, with the training model.",
        ge=0,
    )
    max_staleness: int | None = setting(
        None,
        help="async_generation_ratio: most RL steps between the weights that sampled a response and the current ones; "
        "older samples are dropped, counted and sampled again; under in_flight_updates the loss skips older tokens. "
        "Default: async_generation_ratio, rounded up, which drops none; under in_flight_updates no limit.",
        ge=0,
    )
    in_flight_updates: bool = setting(
        False,
        help="async_generation_ratio: sglang or vllm take new weights while they sample; the responses under way go on "
        "with these. Default: they complete what training has asked for first.",
    )
    partial_rollout: bool = setting(
        False,
        help="in_flight_updates: a step takes the groups that are complete first, and a slow one goes on for a later "
        "step. Default: a step waits for the rollouts of its prompts.",
    )
    sampler_restarts: int = setting(
        2,
        help="Most restarts of the processes of a separate role (the sampler of async_generation_ratio, roles on "
        "separate devices) after one was killed or stalled; their unanswered requests are sent again. After that, and "
        "with 0 at once, the job ends.",
        ge=0,
    )
    rollout_timeout: float = setting(
        1800.0,
        help="Seconds that training waits for such processes without hearing of them before it takes them for stalled.",
        gt=0,
    )

    @property
    def asynchronous(self) -> bool:
        """Whether rollouts run ahead of training."""
        return self.async_generation_ratio > 0

    @property
    def staleness_bound(self) -> int:
        """Most RL steps between the weights that sampled a response and the current ones."""
        return math.ceil(self.async_generation_ratio) if self.max_staleness is None else self.max_staleness


# ---- dynamic sampling


_READ_IF_DYNAMIC = {
    "*": ROLLOUTS,
    "dynamic_sampling_max_batches dynamic_sampling_batch_size": (
        ROLLOUTS,
        Switch(lambda job: job.dynamic_sampling, "dynamic_sampling is false"),
    ),
}


class DynamicSamplingKeys(Settings, read_if=_READ_IF_DYNAMIC):
    """The keys of dynamic sampling."""

    dynamic_sampling: bool = setting(
        False,
        help="Train on rollout_batch_size prompts whose responses have different rewards: other groups are discarded, "
        "and more prompts are sampled until the step is full (docs/grpo.md).",
    )
    dynamic_sampling_max_batches: int | None = setting(
        10,
        help="dynamic_sampling: most generation batches of a step; a step that is not full then ends the job with an "
        "error. ~: no limit.",
        ge=1,
    )
    dynamic_sampling_batch_size: int | None = setting(
        None,
        help="dynamic_sampling: prompts of one generation batch. Default: rollout_batch_size.",
        ge=1,
        le=MOST_TOKENS,
    )


# ---- shaped rewards


class RewardScaling(Settings):
    """`reward_scaling`: a linear map of rewards, clamped at both ends."""

    source_min: float = setting(0.0, help="Rewards up to this become target_min.")
    source_max: float = setting(1.0, help="Rewards from this on become target_max.")
    target_min: float = setting(0.0, help="Least reward.")
    target_max: float = setting(1.0, help="Largest reward.")


class OverlongBuffer(Settings):
    """`overlong_buffer`: a penalty on the last tokens before the longest response (DAPO)."""

    length: int = setting(help="Tokens before response_length over which the penalty grows from 0.", ge=1)
    penalty: float = setting(1.0, help="Subtracted from the reward of a response of response_length tokens.", gt=0)
    response_length: int | None = setting(
        None, help="Tokens at which the penalty is whole; it grows beyond. Default: the job's response_length.", ge=1
    )


class RewardShapingKeys(Settings, read_if={"*": ROLLOUTS}):
    """The keys that change rewards before advantages."""

    reward_scaling: RewardScaling | None = setting(
        None, help="Map rewards linearly before advantages are computed: source_min to target_min, and so on."
    )
    overlong_buffer: OverlongBuffer | None = setting(
        None, help="Subtract a penalty from the rewards of long responses before advantages are computed."
    )

    @property
    def shapes_rewards(self) -> bool:
        """Whether advantages have other rewards than the reward function's."""
        return self.reward_scaling is not None or self.overlong_buffer is not None


# ---- distillation


def _objective(*names: str) -> Switch:
    """The switch of keys that only the objectives `names` read."""
    return Switch(lambda job: job.kd_objective in names, "kd_objective is {0.kd_objective}")


_READ_IF_DISTILL = {
    "mixed_kl_weight": _objective("mixed_kl"),
    "skew_lambda": _objective("skewed_forward_kl", "skewed_reverse_kl"),
    "adaptive_kl_alpha": _objective("adaptive_kl"),
}


class DistillKeys(Settings, read_if=_READ_IF_DISTILL):
    """The keys of the loss `distill` and of its teacher."""

    logits_topk: int = setting(
        64, help="distill: likely tokens of the teacher at each position that are compared; 0: the vocabulary.", ge=0
    )
    kd_objective: DistillObjective = setting(
        "forward_kl",
        help="distill: the divergence, with the teacher's p and the student's q. forward_kl: KL(p, q). reverse_kl: "
        "KL(q, p). mixed_kl: both (mixed_kl_weight). js_divergence: of both from their mean. skewed_*: from a mixture "
        "(skew_lambda). adaptive_kl: both, weighted by where p and q differ (adaptive_kl_alpha).",
    )
    mixed_kl_weight: Share = setting(
        0.5, help="mixed_kl: weight of the forward divergence; the reverse one has the rest."
    )
    skew_lambda: InnerShare = setting(
        0.1,
        help="skewed_forward_kl: p is compared with skew_lambda p + (1 - skew_lambda) q; skewed_reverse_kl: q with "
        "skew_lambda p + (1 - skew_lambda) q.",
    )
    adaptive_kl_alpha: InnerShare = setting(
        0.5, help="adaptive_kl: probability of the teacher's least likely tokens, its tail."
    )
    kd_temperature: Positive = setting(1.0, help="distill: divides the logits of teacher and student.")
    teacher_temperature: Positive = setting(1.0, help="distill: divides the logits of the teacher as well.")
    distill_loss_weight: Share = setting(
        1.0,
        help="distill: weight of the divergence; the negative log-likelihood of the texts has the rest (ROLL: 0.5). "
        "Under task: distill 1, as the student's own tokens are no target.",
    )
    zero_outside_topk: bool = setting(
        False,
        help="distill: the student's distribution over the whole vocabulary, and the teacher's with a log-probability "
        "of -100 beyond its logits_topk tokens (NeMo-RL). Default: both are renormalised over these tokens.",
    )
