"""State that an objective keeps between steps: moments of rewards, and the KL coefficient of the reward.

Both are the same on every rank. Checkpoints save them with the position in the data.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np

from roll_batching.errors import DataError

ARRIVALS = "arrivals"
"""Name of the state of `partial_rollout`."""


class Stateful(Protocol):
    """Saves its state as plain data, and restores it."""

    def state_dict(self) -> dict[str, Any]:
        """Plain data."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a saved state. Raises DataError where it does not fit."""


class RunningMoments:
    """Running mean and standard deviation, updated in batches (Chan et al. 1983; ROLL's RunningMoments)."""

    def __init__(self) -> None:
        self.count, self.mean, self._squares = 0, 0.0, 0.0

    def update(self, values: np.ndarray) -> None:
        """Add `values`, float[n]."""
        count, mean = len(values), float(values.mean())
        total, delta = self.count + count, mean - self.mean
        self._squares += float(((values - mean) ** 2).sum()) + delta**2 * self.count * count / total
        self.mean += delta * count / total
        self.count = total

    @property
    def deviation(self) -> float:
        """Sample standard deviation (over n - 1); 0 for fewer than two numbers."""
        return math.sqrt(self._squares / max(self.count - 1, 1))

    def state_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {"count": self.count, "mean": self.mean, "squares": self._squares}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a saved state."""
        self.count, self.mean, self._squares = int(state["count"]), float(state["mean"]), float(state["squares"])


class DomainMoments:
    """Running moments of each reward domain, by its name."""

    def __init__(self) -> None:
        self._moments: dict[str, RunningMoments] = {}

    def update(self, domain: str, values: np.ndarray) -> RunningMoments:
        """Adds `values`, float[n], to the moments of `domain`, and returns these."""
        moments = self._moments.setdefault(domain, RunningMoments())
        moments.update(values)
        return moments

    def state_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {domain: moments.state_dict() for domain, moments in self._moments.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a saved state. Raises DataError for an earlier version's moments of all domains together."""
        if not all(isinstance(saved, Mapping) for saved in state.values()):
            raise DataError(
                "the checkpoint has one mean reward for all domains: it was saved by an earlier version; resume with "
                "that version, or start a new run under another exp_name"
            )
        self._moments = {domain: RunningMoments() for domain in state}
        for domain, saved in state.items():
            self._moments[domain].load_state_dict(saved)


class KlCoefficient:
    """A KL coefficient, fixed or adapted so that the KL divergence approaches `target` (Ziegler et al., 1909.08593).

    value *= 1 + clip(kl / target - 1, -0.2, 0.2) * samples / horizon.
    """

    def __init__(self, value: float, *, target: float | None = None, horizon: int = 10000) -> None:
        self.value, self.target, self.horizon = value, target, horizon

    def update(self, divergence: float, samples: int) -> None:
        """Adapts the coefficient to a step of `samples` samples with the mean `divergence` per token."""
        if self.target is not None:
            self.value *= 1 + min(max(divergence / self.target - 1, -0.2), 0.2) * samples / self.horizon

    def state_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {"value": self.value}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a saved state; a fixed coefficient keeps its configured value."""
        if self.target is not None:
            self.value = float(state["value"])


class CompositeState:
    """Several states saved as one: the first at the top level, the others under their names."""

    def __init__(self, first: Stateful, **others: Stateful) -> None:
        self.first, self.others = first, others

    def state_dict(self) -> dict[str, Any]:
        """Plain data."""
        return self.first.state_dict() | {name: part.state_dict() for name, part in self.others.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a saved state. Raises DataError when a part was not saved."""
        if ARRIVALS in state and ARRIVALS not in self.others:  # the position in the data is not all that it has
            raise DataError(
                "the checkpoint was saved under partial_rollout: set it, or start a new run under another exp_name"
            )
        self.first.load_state_dict(state)
        for name, part in self.others.items():
            if name not in state:
                raise DataError(
                    f"the checkpoint has no {name}: it was saved by a job without that setting; unset it, or start a "
                    "new run under another exp_name"
                )
            part.load_state_dict(state[name])
