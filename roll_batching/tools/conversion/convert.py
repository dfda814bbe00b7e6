"""Converts one file of a supported framework."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from roll_batching.errors import ConfigError
from roll_batching.jobs.config.diagnostics import ConfigFileError, Problem, dotted
from roll_batching.jobs.config.frameworks import NAMES, framework_of
from roll_batching.jobs.config.yaml_source import read_yaml
from roll_batching.tools.conversion.composing import Composed, compose_hydra, compose_inheriting
from roll_batching.tools.conversion.draft import Conversion, Draft, check_draft
from roll_batching.tools.conversion.nemo_rl import draft_of_nemo_rl
from roll_batching.tools.conversion.roll import draft_of_roll
from roll_batching.tools.conversion.shell_script import read_script
from roll_batching.tools.conversion.slime import draft_of_slime
from roll_batching.tools.conversion.slime_command import compose_slime
from roll_batching.tools.conversion.slime_command import is_program as is_slime
from roll_batching.tools.conversion.verl import draft_of_verl
from roll_batching.tools.conversion.verl_command import compose_verl
from roll_batching.tools.conversion.verl_command import is_program as is_verl


@dataclass(frozen=True)
class Origin:
    """A framework whose files can be converted."""

    name: str
    compose: Callable[[Path], Composed]
    translate: Callable[[str, dict[str, Any]], Draft]


ORIGINS: dict[str, Origin] = {
    "roll": Origin("roll", compose_hydra, draft_of_roll),
    "nemo_rl": Origin("nemo_rl", compose_inheriting, draft_of_nemo_rl),
    "verl": Origin("verl", compose_verl, draft_of_verl),
    "slime": Origin("slime", compose_slime, draft_of_slime),
}


def convert_file(path: Path, origin: Origin) -> Conversion:
    """Converts the file at `path`. Raises ConfigError for a file of another framework and for an empty one."""
    composed = origin.compose(path)
    if not composed.data and not composed.failed:
        raise ConfigError(f"{path} is empty: there is nothing to convert")
    framework = framework_of(composed.data)
    if framework not in (None, origin.name):
        raise ConfigError(f"{path} was written for {NAMES[framework]}: convert it with --from {framework}")
    try:
        draft = origin.translate(str(path), composed.data)
    except ConfigFileError as error:
        raise ConfigFileError((_placed(problem, composed) for problem in error.problems), more=error.more) from None
    for key, why in composed.failed.items():
        sections = [name for end in range(1, len(key)) if (name := dotted(key[:end])) in draft.left_out]
        # The value's own reason replaces the section's, where that was left out for the lack of this value.
        if all(str(key[-1]) in draft.left_out[name][1] for name in sections):
            draft.left_out[dotted(key)] = ("refused", why)
    paths = {origin: path for path, origin in draft.origins.items()}
    for key, written in composed.outside.items():
        path_here = paths.get(dotted(key), key)
        draft.meanings.setdefault(path_here, f"the value of {written} at conversion")
    return check_draft(draft)


def _placed(problem: Problem, composed: Composed) -> Problem:
    """Copy of `problem` with file and line of its key, if `composed` knows them."""
    place = composed.places.get(problem.path)
    return problem if place is None else replace(problem, place=place)


def origin_of(path: Path) -> Origin:
    """Recognises the framework of the file at `path` by its content. Raises ConfigError if it is none of ours."""
    if path.suffix == ".sh":
        words = [word.text or word.raw for command in read_script(path).commands for word in command.words]
        framework = "verl" if any(map(is_verl, words)) else "slime" if any(map(is_slime, words)) else None
        if framework is None:
            raise ConfigError(f"{path} has no command that starts training with verl or slime: give a script with one")
        return ORIGINS[framework]
    data = read_yaml(path).data
    framework = framework_of(data) or ("nemo_rl" if "policy" in data else "roll" if "actor_train" in data else None)
    if framework is None:
        names = ", ".join(f"--from {name}" for name in ORIGINS)
        raise ConfigError(f"{path} has no section of {', '.join(NAMES.values())}; name the framework with {names}")
    return ORIGINS[framework]
