"""Generates the reference page of all settings from the schema, and the page of what goes with what.

python -m roll_batching.jobs.config.reference docs/configuration.md docs/what-goes-with-what.md
"""

from __future__ import annotations

import sys
import types
import typing
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from roll_batching.checked_fields import bounds_of
from roll_batching.jobs.config.diagnostics import KeyPath
from roll_batching.jobs.config.foreign_keys import FOREIGN_KEYS, FRAMEWORK_OF, ForeignKey, Verdict
from roll_batching.jobs.config.job_keys import ROLES, JobKeys
from roll_batching.jobs.config.key_paths import ANY_NAME, heading_of, schema_keys
from roll_batching.jobs.config.losses import LOSSES, ROLLOUT_FIELDS
from roll_batching.jobs.config.notices import unread_in
from roll_batching.jobs.config.support import PACKING_REFUSALS, PACKING_TESTED, REFUSALS, TESTED
from roll_batching.jobs.config.trained_together import TOGETHER, TRAINED_OF_JOBS, TRAINED_TOGETHER
from roll_batching.jobs.config.worker import WorkerConfig
from roll_batching.settings.fields import Settings, named_settings, nested_settings, ordered_fields, registered_name
from roll_batching.settings.support import ROLE_REFUSALS, ROLE_TESTED, Feature, Refusal
from roll_batching.settings.training import TrainingArgs

INTRODUCTION = """# Configuration

<!-- Made from the schema by `python -m roll_batching.jobs.config.reference docs/configuration.md`; do not edit. -->

A job is one YAML file, in ROLL's shape and, where ROLL has a name, under ROLL's name:

    python examples/ledger/make_data.py --out data/ledger
    roll-batching train --config configs/demo_grpo.yaml actor_train.training_args.learning_rate=1e-4 seed=3

- `path.to.key=value` on the command line changes a key; the value is read as YAML.
- `${path.to.key}` in a value stands for another key's value.
- Unknown keys, impossible values and keys that contradict each other are errors. They are reported together, each with
  its line, its path and the nearest valid name or value.
- Editors complete and check files by a [JSON schema](yaml-jobs.md#in-an-editor), which `roll-batching schema` prints.
- A file has at most 256 KiB, and at most 20,000 values after aliases, merges and references are expanded.
- Keys of other frameworks that have no effect here get a notice when the job starts, or an error
  ([list](#keys-of-other-frameworks)). Nothing is ignored silently.
"""

ROLES_NOTE = """The roles are `actor_train`, `actor_infer`, `reference`, `critic` and `teacher`. Model and parallel
layout are given in `actor_train`; the other roles inherit what they leave out, `teacher` all but the model.
`actor_infer`, `reference` and `teacher` may have other parallel sizes ([roles and placement](cluster.md#roles)).
Some keys have no effect in some roles, and then get a notice:

"""


LOSSES_NOTE = """The `loss_args` of your own loss are the fields of its class, or the keywords of its `__init__`
(docs/custom-losses.md). Settings that have a key of the job, such as `pg_clip`, cannot be given in `loss_args` as well.
A loss that reads fields which rollouts do not have, such as `dpo`, works in the task that has them (`task: dpo`) and in
your own training loop.
"""

FOREIGN_NOTE = """These keys of ROLL, Megatron-Core and cosmos-rl do nothing in a job; files that have them load.
*No effect*: any value is accepted, with a notice. *Refused*: values other than null and those named are errors.

| section | key | of | here |
|---|---|---|---|
"""

SUPPORT = """# What goes with what

<!-- Made by `python -m roll_batching.jobs.config.reference docs/what-goes-with-what.md`; do not edit. -->

Features meet in pairs. This page lists the pairs that a job refuses, with the key that the error names, the reason and
the cure, and pairs that a test trains. A pair that is not listed, and not of the features at
[the end](#trained-in-pairs), works as far as is known: no rule refuses it, and no test is about it. `{task}` and the
like stand for values of the job.

## Features of a job

"""


def support_page() -> str:
    """The page on which features combine, as Markdown."""
    packing = f"## Packing and layout of a role\n\n{_support_rows(PACKING_REFUSALS, PACKING_TESTED)}"
    parts = f"## Parts of a model, adapters, precision and layers\n\n{_support_rows(ROLE_REFUSALS, ROLE_TESTED)}"
    return f"{SUPPORT}{_support_rows(REFUSALS, TESTED)}\n{packing}\n{parts}\n{_trained_together()}"


def _trained_together() -> str:
    """The features of which a suite trains every pair, as Markdown."""
    names = [feature.name for feature in TRAINED_TOGETHER]
    lines = ["## Trained in pairs", "", f"`tests/{TOGETHER}` trains two steps with any two of these that no row above"]
    lines += ["refuses, unless one has no meaning beside the other, in a drawn layout and mode, against the same model"]
    lines += ["on one rank:", "", *(f"- {name}" for name in names)]
    lines += ["", "It also trains, of the features of a job:", ""]
    lines += [f"- {feature.name} with {other.name}" for feature, other in TRAINED_OF_JOBS]
    return "\n".join(lines) + "\n"


def _support_rows(refusals: Iterable[Refusal], tested: Mapping[tuple[Feature, Feature], str]) -> str:
    """Markdown table of pairs: refused with reason and cure, or tested and by which test."""
    lines = ["| feature | with | |", "|---|---|---|"]
    for row in refusals:
        text = f"{row.reason}; {row.cure}".replace("{1.name}", row.feature.name).replace("{0.", "{").replace("|", "\\|")
        text = text.replace("{{", "{").replace("}}", "}")  # braces are escaped for `format`, which is not called here
        lines.append(f"| {row.feature.name} | {row.other.name} | refused: `{row.feature.key}` {text} |")
    lines += [f"| {feature.name} | {other.name} | works: `tests/{test}` |" for (feature, other), test in tested.items()]
    return "\n".join(lines) + "\n"


def reference_page() -> str:
    """The page of all settings, as Markdown."""
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
    parts += ["## Keys of other frameworks\n", FOREIGN_NOTE + _foreign_keys()]
    return "\n".join(parts)


def _losses() -> str:
    lines = [LOSSES_NOTE, "| loss_function | reads |", "|---|---|"]
    lines += [f"| `{loss.name}` | {', '.join(f'`{name}`' for name in loss.reads)} |" for loss in LOSSES]
    lines += ["", f"Rollouts have {'; '.join(f'`{name}` ({what})' for name, what in ROLLOUT_FIELDS.items())}."]
    for loss in LOSSES:
        lines += [f"\n### `loss_args` of `{loss.name}`\n", _table(loss.settings).rstrip()]
    return "\n".join(lines) + "\n"


def _sections(root: type[Settings], prefix: tuple[str, ...]) -> list[tuple[str, type[Settings]]]:
    """Dotted path and class of every section below `root`; not of the sections within a role."""
    sections = []
    for name, field in ordered_fields(root).items():
        named = named_settings(field)
        if named is not None:
            sections.append((".".join((*prefix, name, ANY_NAME)), named))
        below = nested_settings(field)
        if below is None:
            continue
        sections.append((".".join((*prefix, name)), below))
        if below is not WorkerConfig:
            sections += _sections(below, (*prefix, name))
    return sections


def _summary(settings: type[Settings]) -> str:
    first = (settings.__doc__ or "").strip().splitlines()[0]
    return f"{first}\n"


def _unread_table() -> str:
    """Table of the keys that a role never reads; of an unread section, its name alone."""
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
    """Table of the keys of a section, then tables of the registered names that are values of these keys."""
    fields = ordered_fields(settings)
    lines = ["| key | value | default | what it does |", "|---|---|---|---|"]
    for name, field in fields.items():
        help = (field.description or "").replace("|", "\\|")
        lines.append(f"| `{name}` | {_values(field)} | {_default(field)} | {help} |")
    return "\n\n".join(["\n".join(lines), *_registered(fields)]) + "\n"


def _foreign_keys() -> str:
    """One row per foreign key, by the section of the schema that would hold it."""
    # Of several sections of one class the last path counts, so the role's come last.
    keys = [*schema_keys(), *schema_keys(WorkerConfig, ("actor_train",))]
    paths: dict[type[Settings], KeyPath] = {JobKeys: ()}
    paths |= {key.section: key.path for key in keys if key.section is not None}
    lines = [
        f"| {heading_of(paths[section])} | `{key.name}` | {FRAMEWORK_OF[section]} | {_verdict(key)} |"
        for section, foreign in FOREIGN_KEYS.items()
        for key in foreign.values()
    ]
    return "\n".join(lines) + "\n"


def _verdict(key: ForeignKey) -> str:
    if key.verdict is Verdict.NO_EFFECT:
        return f"*No effect*: {key.reason}."
    allowed = " or ".join(f"`{_plain(value)}`" for value in key.allowed)
    return f"*Refused*{f' unless {allowed}' if allowed else ''}: {key.reason}."


def _registered(fields: dict[str, FieldInfo]) -> list[str]:
    """Tables of the registered names that values of `fields` can have."""
    blocks = []
    for name, field in fields.items():
        names = registered_name(field)
        if names is not None:
            lines = [f"| `{name}` | |", "|---|---|", *(f"| `{e.name}` | {e.summary} |" for e in names.registry)]
            blocks.append("\n".join([*lines, "| `package.module:name` | of your own |"]))
    return blocks


def _values(field: FieldInfo) -> str:
    values = "a name, below" if registered_name(field) is not None else _annotation(field.annotation)
    return ", ".join([values, *bounds_of(field.metadata)])


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
    for path in map(Path, sys.argv[1:]):
        path.write_text(support_page() if path.stem == "what-goes-with-what" else reference_page(), encoding="utf-8")
