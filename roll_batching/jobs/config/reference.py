"""The reference page of all settings, made from the schema.

python -m roll_batching.jobs.config.reference docs/configuration.md
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

from roll_batching.jobs.config.job_keys import ROLES, JobKeys
from roll_batching.jobs.config.key_paths import ANY_NAME, schema_keys
from roll_batching.jobs.config.losses import LOSSES, ROLLOUT_FIELDS
from roll_batching.jobs.config.notices import unread_in
from roll_batching.jobs.config.worker import WorkerConfig
from roll_batching.settings.fields import (
    Honoured,
    Noticed,
    Refused,
    Settings,
    named_settings,
    nested_settings,
    ordered_fields,
    use_of,
)
from roll_batching.settings.registered import registered_name
from roll_batching.settings.training import TrainingArgs

INTRODUCTION = """# Configuration

<!-- Made from the schema by `python -m roll_batching.jobs.config.reference docs/configuration.md`; do not edit. -->

A job is one YAML file, in ROLL's shape and, where ROLL has a name, under ROLL's name:

    python examples/ledger/make_data.py --out data/ledger
    roll-batching train --config configs/demo_grpo.yaml actor_train.training_args.learning_rate=1e-4 seed=3

- `path.to.key=value` on the command line changes a key; the value is read as YAML.
- `${path.to.key}` in a value stands for another key's value.
- A key that is unknown, a value that is impossible and keys that contradict each other are errors. They are
  reported together, each with its line, its path and the nearest valid name or value.
- A file has at most 256 KiB, and stands for at most 20,000 values once aliases, merges and references are expanded.
- A key that other systems read and that does nothing here is accepted with a notice, printed when the job
  starts. Nothing is ignored silently.

Each section lists the keys that are read. Below them stand ROLL's and Megatron's keys that do nothing here: *no
effect* marks those that are accepted with a notice, *refused* those that have one possible value.
"""

ROLES_NOTE = """The roles are `actor_train`, `actor_infer` and `reference`. Model and parallel layout are given
in `actor_train`; the other roles take over what they leave out. Their model is the same; `actor_infer` and
`reference` may have parallel sizes of their own ([roles and placement](roles-and-placement.md)). Some keys have no
effect in some roles, and then get a notice:

"""


LOSSES_NOTE = """The fields of a class of your own, or the keywords of its `__init__`, are the names of its `loss_args`
(docs/custom-losses.md). What `policy` has keys for, above, cannot be given in `loss_args` as well. A loss that reads
what rollouts do not have, such as `dpo`, serves the task that has it (`task: dpo`) and your own training loop.
"""


def reference_page() -> str:
    """The whole page, Markdown."""
    parts = [INTRODUCTION, "## The job\n", _table(JobKeys)]
    for name, settings in _sections(JobKeys, ()):
        if settings is WorkerConfig:
            continue
        if settings is TrainingArgs:
            parts += [f"## `{name}`\n", "The keys of a role's `training_args`, below; `max_steps` is required.\n"]
            continue
        parts += [f"## `{name}`\n", _table(settings)]
    parts += ["## Losses\n", _losses()]
    parts += ["## Roles\n", ROLES_NOTE + _unread_table(), _table(WorkerConfig)]
    for name, settings in _sections(WorkerConfig, ()):
        parts += [f"### `{name}`\n", _summary(settings), _table(settings)]
    return "\n".join(parts)


def _losses() -> str:
    lines = [LOSSES_NOTE, "| loss_function | reads |", "|---|---|"]
    lines += [f"| `{loss.name}` | {', '.join(f'`{name}`' for name in loss.reads)} |" for loss in LOSSES]
    lines += ["", f"Rollouts have {'; '.join(f'`{name}` ({what})' for name, what in ROLLOUT_FIELDS.items())}."]
    for loss in LOSSES:
        lines += [f"\n### `loss_args` of `{loss.name}`\n", _table(loss.settings).rstrip()]
    return "\n".join(lines) + "\n"


def _sections(root: type[Settings], prefix: tuple[str, ...]) -> list[tuple[str, type[Settings]]]:
    found = []
    for name, field in ordered_fields(root).items():
        named = named_settings(field)
        if named is not None:
            found.append((".".join((*prefix, name, ANY_NAME)), named))
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
    for role in ROLES:
        reasons: dict[str, list[str]] = {}
        sections: list[tuple[str, ...]] = []
        for key in schema_keys(WorkerConfig):
            reason = unread_in(role, key.path)
            if reason is not None and key.path[:1] not in sections:
                sections.append(key.path)
                reasons.setdefault(reason, []).append(f"`{'.'.join(key.path)}`")
        lines += [f"| `{role}` | {', '.join(names)} | {reason} |" for reason, names in reasons.items()]
    return "\n".join(lines) + "\n"


def _table(settings: type[Settings]) -> str:
    """The keys that are read, and those without effect in a table of their own."""
    fields = ordered_fields(settings)
    read = {name: field for name, field in fields.items() if isinstance(use_of(field), Honoured)}
    idle = {name: field for name, field in fields.items() if name not in read}
    blocks = [_rows("key", "what it does", read), *_registered(read), _rows("without effect here", "why", idle)]
    return "\n\n".join(block for block in blocks if block) + "\n"


def _rows(key: str, effect: str, fields: dict[str, FieldInfo]) -> str:
    lines = [f"| {key} | value | default | {effect} |", "|---|---|---|---|"]
    lines += [
        f"| `{name}` | {_values(field)} | {_default(field)} | {_effect(field)} |" for name, field in fields.items()
    ]
    return "\n".join(lines) if fields else ""


def _registered(fields: dict[str, FieldInfo]) -> list[str]:
    """What may be named in those of `fields` that name something registered."""
    blocks = []
    for name, field in fields.items():
        names = registered_name(field)
        if names is not None:
            lines = [f"| `{name}` | |", "|---|---|", *(f"| `{e.name}` | {e.summary} |" for e in names.registry)]
            blocks.append("\n".join([*lines, "| `package.module:name` | of your own |"]))
    return blocks


def _effect(field: FieldInfo) -> str:
    use = use_of(field)
    text = (field.description or "").replace("|", "\\|")
    if isinstance(use, Noticed):
        return f"{text} *No effect*: {use.notice}."
    if isinstance(use, Refused):
        allowed = " or ".join(f"`{_plain(value)}`" for value in use.allowed)
        return f"{text} *Refused* unless {allowed}: {use.reason}."
    return text


def _values(field: FieldInfo) -> str:
    words = "a name, below" if registered_name(field) is not None else _annotation(field.annotation)
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
