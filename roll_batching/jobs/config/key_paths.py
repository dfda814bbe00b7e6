"""Paths of the keys of the schema, and of the keys that a file gives."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

from pydantic.fields import FieldInfo

from roll_batching.jobs.config.diagnostics import KeyPath
from roll_batching.jobs.config.job_keys import ROLES, JobKeys
from roll_batching.settings.fields import Settings, named_settings, nested_settings, ordered_fields

ANY_NAME = "NAME"
"""Stands in schema paths for a name that the user chooses."""


@dataclass(frozen=True)
class SchemaKey:
    """One key of the schema."""

    path: tuple[str, ...]
    field: FieldInfo
    owner: type[Settings]

    @property
    def section(self) -> type[Settings] | None:
        """The settings class below this key; None for a plain value."""
        return nested_settings(self.field)


def schema_keys(root: type[Settings] = JobKeys, prefix: tuple[str, ...] = ()) -> Iterator[SchemaKey]:
    """Every key of the schema, parents before children, own fields before inherited ones."""
    for name, field in ordered_fields(root).items():
        key = SchemaKey((*prefix, name), field, root)
        yield key
        if key.section is not None:
            yield from schema_keys(key.section, key.path)
        named = named_settings(field)
        if named is not None:
            yield from schema_keys(named, (*key.path, ANY_NAME))


@cache
def all_keys() -> tuple[SchemaKey, ...]:
    """Every key of a job."""
    return tuple(schema_keys())


def settings_at(path: KeyPath) -> type[Settings] | None:
    """The settings class of the section at `path`; None for plain values and unknown paths."""
    section: type[Settings] | None = JobKeys
    named: type[Settings] | None = None  # after a map of sections: their class, which the next part, a name, selects
    for part in path:
        if isinstance(part, int) and named is None:  # an item of a list of sections
            continue
        if named is not None:
            section, named = named, None
            continue
        if section is None or part not in section.model_fields:
            return None
        field = section.model_fields[str(part)]
        section, named = nested_settings(field), named_settings(field)
    return section


def heading_of(path: KeyPath) -> str:
    """The heading of docs/configuration.md under which the keys of the section at `path` are listed."""
    if not path:
        return "The job"
    # The page lists the keys of a role once for all roles, so the name of the role is no part of a heading.
    below_role = path[1:] if path[0] in ROLES else path
    return ".".join(map(str, below_role)) or "Roles"


def field_at(path: KeyPath) -> FieldInfo | None:
    """The field at `path`; None when the schema has no such key."""
    parent = settings_at(path[:-1]) if path else None
    return parent.model_fields.get(str(path[-1])) if parent is not None else None


def given_keys(
    data: Any, prefix: KeyPath = (), settings: type[Settings] | None = JobKeys
) -> Iterator[tuple[KeyPath, Any]]:
    """Paths and values of the keys in `data`: plain values, entries of free-form maps, unknown keys."""
    if not isinstance(data, dict):
        return
    for name, value in data.items():
        path = (*prefix, name)
        field = settings.model_fields.get(name) if settings is not None else None
        named = named_settings(field) if field is not None else None
        if named is not None and isinstance(value, dict):
            for chosen, section in value.items():
                yield from given_keys(section, (*path, chosen), named)
        elif field is not None and isinstance(value, dict) and value:
            yield from given_keys(value, path, nested_settings(field))
        else:
            yield path, value
