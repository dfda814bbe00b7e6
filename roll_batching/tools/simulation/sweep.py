"""Simulations of many combinations of sizes, best first."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from roll_batching.errors import ConfigError, PlanError
from roll_batching.planning.lengths_io import MOST_TOKENS
from roll_batching.tools.simulation.scenario import DYNAMIC, SIZES, Scenario
from roll_batching.tools.simulation.step import SimulatedStep

MOST_COMBINATIONS = 200
"""Most combinations of a sweep."""


@dataclass(frozen=True)
class Swept:
    """One combination: its step, or why it has none."""

    changes: Mapping[str, Any]
    step: SimulatedStep | None
    reason: str = ""

    @property
    def name(self) -> str:
        """Such as `cp 2, pp 4`."""
        return ", ".join(f"{key} {value}" for key, value in self.changes.items())


def parse_sweep(texts: Sequence[str]) -> dict[str, list[Any]]:
    """Values by size from texts such as `cp=1,2,dynamic`. Raises `ConfigError`."""
    values: dict[str, list[Any]] = {}
    for text in texts:
        key, equals, written = text.partition("=")
        key = key.strip().replace("-", "_")
        if not equals or key not in SIZES:
            raise ConfigError(
                f"--sweep {text!r} is not known: write a size and its values, such as max_tokens=8192,16384; sizes are "
                f"{', '.join(SIZES)}"
            )
        if key in values:
            raise ConfigError(f"--sweep names {key} twice: write all its values once, with commas")
        values[key] = list(dict.fromkeys(_value(key, part.strip()) for part in written.split(",")))
    count = 1
    for several in values.values():
        count *= len(several)
    if count > MOST_COMBINATIONS:
        raise ConfigError(f"--sweep asks for {count:,} combinations, at most {MOST_COMBINATIONS}: name fewer values")
    return values


def _value(key: str, text: str) -> Any:
    if key == "cp" and text == DYNAMIC:
        return DYNAMIC
    most = MOST_TOKENS if key == "max_tokens" else 1024
    if not text.isascii() or not text.isdecimal() or not 1 <= int(text[:12]) <= most:
        also = f", or {DYNAMIC}" if key == "cp" else ""
        raise ConfigError(f"--sweep {key}={text!r}: write whole numbers from 1 to {most:,}{also}")
    return int(text)


def run_sweep(scenario: Scenario, values: Mapping[str, Sequence[Any]]) -> list[Swept]:
    """All combinations of `values`: those with a step by falling tokens per second, then the impossible ones."""
    swept = []
    for combination in itertools.product(*values.values()):
        changes = dict(zip(values, combination, strict=True))
        try:
            swept.append(Swept(changes, scenario.vary(changes).simulate()))
        except PlanError as error:
            swept.append(Swept(changes, None, str(error)))
    return sorted(swept, key=lambda one: float("inf") if one.step is None else -one.step.tokens_per_second)
