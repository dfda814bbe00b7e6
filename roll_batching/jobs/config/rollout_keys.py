"""The keys of rollouts by a function of the user's, and their rules."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pydantic import field_validator

from roll_batching.jobs.config.diagnostics import Problem
from roll_batching.registry import is_dotted
from roll_batching.settings.fields import Settings, setting

NEMO_GYM = "roll_batching.jobs.rollouts.nemo_gym:rollout"
"""The rollout function of NeMo-Gym."""


class RolloutKeys(Settings):
    """The keys of a rollout function."""

    rollout_function: str | None = setting(
        None,
        help="Your own async function of one sample's rollout, as package.module:function: several turns, tools and "
        "environments (docs/rollouts.md). Default: the model answers each prompt once.",
    )
    rollout_args: dict[str, Any] = setting(default_factory=dict, help="Keyword arguments for the rollout function.")
    rollout_function_timeout: float = setting(
        300.0,
        help="Most seconds that a sample's rollout function may take between two calls of its client, before the "
        "first and after the last: the time of tools and environments, not of sampling.",
        gt=0,
    )
    rollout_max_calls: int = setting(
        64, help="Most calls of the client for one sample: a rollout function that exceeds it is an error.", ge=1
    )

    @field_validator("rollout_function")
    @classmethod
    def _is_dotted(cls, path: str | None) -> str | None:
        if path is not None and not is_dotted(path):
            raise ValueError(f"{path!r} names no function: write it as package.module:function")
        return path


def rollout_problems(keys: RolloutKeys) -> Iterator[Problem]:
    """Problems of keys that only a rollout function reads."""
    if keys.rollout_function is not None:
        return
    for name in ("rollout_args", "rollout_function_timeout", "rollout_max_calls"):
        if name in keys.model_fields_set and getattr(keys, name) != RolloutKeys.model_fields[name].get_default(
            call_default_factory=True
        ):
            yield Problem((name,), "is read by a rollout function only: set rollout_function, or leave it out")
