"""The result of translating a `config.json`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from roll_batching.huggingface.families import Family


@dataclass
class Translation:
    """The architecture that a `config.json` describes, and what is wrong with it."""

    family: Family | None = None
    architecture: dict[str, Any] = field(default_factory=dict)
    """Settings of `model_args.architecture`; complete only without problems."""
    problems: list[str] = field(default_factory=list)
    """One error per field that is missing or not supported; each names its field."""
