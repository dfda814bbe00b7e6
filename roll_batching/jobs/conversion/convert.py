"""One file of another framework's to ours, whichever framework it is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from roll_batching.errors import ConfigError
from roll_batching.jobs.config.diagnostics import dotted
from roll_batching.jobs.config.frameworks import NAMES, framework_of
from roll_batching.jobs.config.yaml_source import read_yaml
from roll_batching.jobs.conversion.composing import Composed, compose_hydra, compose_inheriting
from roll_batching.jobs.conversion.draft import Draft, check_draft
from roll_batching.jobs.conversion.nemo_rl import draft_of_nemo_rl
from roll_batching.jobs.conversion.report import Conversion
from roll_batching.jobs.conversion.roll import draft_of_roll


@dataclass(frozen=True)
class Origin:
    """A framework whose files are converted."""

    name: str
    compose: Callable[[Path], Composed]
    translate: Callable[[str, dict[str, Any]], Draft]


ORIGINS: dict[str, Origin] = {
    "roll": Origin("roll", compose_hydra, draft_of_roll),
    "nemo_rl": Origin("nemo_rl", compose_inheriting, draft_of_nemo_rl),
}


def convert_file(path: Path, origin: Origin) -> Conversion:
    """The file at `path`, of `origin`, as ours. Raises ConfigError for another framework's, and for an empty one."""
    composed = origin.compose(path)
    if not composed.data and not composed.failed:
        raise ConfigError(f"{path} is empty: there is nothing to convert")
    framework = framework_of(composed.data)
    if framework not in (None, origin.name):
        raise ConfigError(f"{path} was written for {NAMES[framework]}: convert it with --from {framework}")
    draft = origin.translate(str(path), composed.data)
    for key, why in composed.failed.items():
        if not any(dotted(key[:end]) in draft.left_out for end in range(1, len(key))):
            draft.leave_out(dotted(key), "refused", why)
    moved = {origin: path for path, origin in draft.origins.items()}
    for key, written in composed.outside.items():
        place = moved.get(dotted(key), key)
        draft.meanings.setdefault(place, f"{written} as it was when this was converted")
    return check_draft(draft)


def origin_of(path: Path) -> Origin:
    """The framework that the file at `path` was written for, by its sections. Raises ConfigError: none is known."""
    data = read_yaml(path).data
    found = framework_of(data) or ("nemo_rl" if "policy" in data else "roll" if "actor_train" in data else None)
    if found is None:
        raise ConfigError(f"{path} is no file of ROLL's or NeMo-RL's by its sections; say whose: --from roll | nemo_rl")
    return ORIGINS[found]
