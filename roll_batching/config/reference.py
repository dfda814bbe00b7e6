"""The reference page of all settings, made from the schema.

python -m roll_batching.config.reference docs/configuration.md
"""

from __future__ import annotations

import sys
import types
import typing
from pathlib import Path
from typing import Any, Literal

from annotated_types import Ge, Gt, Le, Lt
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from roll_batching.config.fields import Settings, nested_settings, use_of
from roll_batching.config.job import JobConfig
from roll_batching.config.notices import UNREAD
from roll_batching.config.worker import TrainingArgs, WorkerConfig

INTRODUCTION = """# Configuration

<!-- Made from the schema by `python -m roll_batching.config.reference docs/configuration.md`; do not edit. -->

A job is one YAML file, in ROLL's shape and, where ROLL has a name, under ROLL's name:

    roll-batching train --config configs/demo_grpo.yaml actor_train.infer_batch_size=8 seed=3

- `path.to.key=value` on the command line changes a key; the value is read as YAML.
- `${path.to.key}` in a value stands for another key's value.
- A key that is unknown, a value that is impossible and keys that contradict each other are errors. They are
  reported together, each with its line, its path and the nearest valid name or value.
- A file has at most 256 KiB, and stands for at most 20,000 values once aliases, merges and references are expanded.
- A key that other systems read and that does nothing here is accepted with a notice, printed when the job
  starts. Nothing is ignored silently.

In the tables, *no effect* marks such keys, and *refused* marks keys that have one possible value here.
"""

ROLES_NOTE = """The roles are `actor_train`, `actor_infer` and `reference`. Model and parallel layout are given
in `actor_train`; the other roles take them over and may repeat them, but not differ. Some keys have no effect
in some roles, and then get a notice:

"""


def reference_page() -> str:
    """The whole page, Markdown."""
    parts = [INTRODUCTION, "## The job\n", _table(JobConfig)]
    for name, settings in _sections(JobConfig, ()):
        if settings is WorkerConfig:
            continue
        if settings is TrainingArgs:
            parts += [f"## `{name}`\n", "The keys of a role's `training_args`, below; `max_steps` is required.\n"]
            continue
        parts += [f"## `{name}`\n", _table(settings)]
    parts += ["## Roles\n", ROLES_NOTE + _unread_table(), _table(WorkerConfig)]
    for name, settings in _sections(WorkerConfig, ()):
        parts += [f"### `{name}`\n", _summary(settings), _table(settings)]
    return "\n".join(parts)


def _sections(root: type[Settings], prefix: tuple[str, ...]) -> list[tuple[str, type[Settings]]]:
    found = []
    for name, field in root.model_fields.items():
        below = nested_settings(field)
        if below is None:
            continue
        found.append((".".join((*prefix, name)), below))
        if below is not WorkerConfig:
            found += _sections(below, (*prefix, name))
    return found


def _summary(settings: type[Settings]) -> str:
    first = (settings.__doc__ or "").strip().splitlines()[0]
    return f"{first}\n"


def _unread_table() -> str:
    lines = ["| role | keys | why |", "|---|---|---|"]
    for role, keys in UNREAD.items():
        reasons: dict[str, list[str]] = {}
        for key, reason in keys.items():
            reasons.setdefault(reason, []).append(f"`{key}`")
        lines += [f"| `{role}` | {', '.join(names)} | {reason} |" for reason, names in reasons.items()]
    return "\n".join(lines) + "\n"


def _table(settings: type[Settings]) -> str:
    lines = ["| key | value | default | what it does |", "|---|---|---|---|"]
    for name, field in settings.model_fields.items():
        lines.append(f"| `{name}` | {_values(field)} | {_default(field)} | {_effect(field)} |")
    return "\n".join(lines) + "\n"


def _effect(field: FieldInfo) -> str:
    use = use_of(field)
    text = (field.description or "").replace("|", "\\|")
    if use["use"] == "noticed":
        return f"{text} *No effect*: {use['notice']}."
    if use["use"] == "refused":
        allowed = " or ".join(f"`{_plain(value)}`" for value in use["allowed"])
        return f"{text} *Refused* unless {allowed}: {use['reason']}."
    return text


def _values(field: FieldInfo) -> str:
    words = _annotation(field.annotation)
    bounds = {Gt: "above {}", Ge: "at least {}", Lt: "below {}", Le: "at most {}"}
    for limit in field.metadata:
        if type(limit) in bounds:
            words += ", " + bounds[type(limit)].format(getattr(limit, type(limit).__name__.lower()))
    return words


def _annotation(annotation: Any) -> str:
    origin, inner = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Literal:
        return ", ".join(f"`{value}`" for value in inner)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_annotation(part) for part in inner if part is not type(None))
    if origin in (list, tuple):
        return f"list of {_annotation(inner[0])}"
    if origin is dict:
        return "keys and values"
    if isinstance(annotation, type) and issubclass(annotation, Settings):
        return "section"
    names = {bool: "`true`, `false`", int: "whole number", float: "number", str: "text"}
    return names.get(annotation, "any")


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    if nested_settings(field) is not None or field.default_factory is not None:
        return ""
    return "" if field.default in (None, PydanticUndefined) else f"`{_plain(field.default)}`"


def _plain(value: Any) -> str:
    if value is None:
        return "~"
    return str(value).lower() if isinstance(value, bool) else str(value)


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(reference_page(), encoding="utf-8")
