"""Hides secrets in files and trackers: by name and value in free-form sections, by value elsewhere."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from roll_batching.jobs.config.diagnostics import KeyPath, Problem
from roll_batching.jobs.config.key_paths import field_at, given_keys, settings_at
from roll_batching.secret_names import REDACTED, redact, redact_forms


def without_secrets(data: Mapping[str, Any], prefix: KeyPath = ()) -> dict[str, Any]:
    """`data`, plain settings of a job, with `REDACTED` for secrets. Keys of the schema (eos_token) are not secrets."""
    result: dict[str, Any] = {}
    for key, value in data.items():
        path = (*prefix, key)
        if is_free(path):
            result[key] = redact(value, name=key)
        else:
            result[key] = without_secrets(value, path) if isinstance(value, dict) else redact_forms(value)
    return result


def withheld_problems(data: Mapping[str, Any]) -> list[Problem]:
    """One problem per value of `data` that `without_secrets` has hidden."""
    text = "was not saved with the run, since its name or value looks like a secret's: set it, or remove its line"
    return [Problem(path, text) for top, value in given_keys(data) for path in _withheld(top, value)]


def is_free(path: KeyPath) -> bool:
    """Whether `path` lies in a map whose keys the user chooses."""
    if field_at(path) is not None or settings_at(path) is not None:
        return False
    above = (path[:end] for end in range(1, len(path)))
    return any(field_at(part) is not None and settings_at(part) is None for part in above)


def _withheld(path: KeyPath, value: Any) -> Iterator[KeyPath]:
    if isinstance(value, dict | list):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _withheld((*path, key), item)
    elif isinstance(value, str) and REDACTED in value:
        yield path
