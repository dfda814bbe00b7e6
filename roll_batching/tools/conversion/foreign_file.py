"""The settings of another framework's file, and what is known of its keys: `data/FRAMEWORK.yaml`, read by `Tables`.

A data file has these sections, whose keys are dotted names of the framework:

    prefix, short_names    what all keys begin with; beginnings of keys in the data file, each with the whole beginning
    types                  keys that are sections, counts (whole numbers of at least 1) or numbers
    defaults               by group, the framework's defaults, which are filled in before a file is translated, so that
                           it means what the original meant; `check_draft` keeps those that differ from ours
    moves                  by group, keys that need no more than a name here: ours, or a list of it and the difference;
                           DATA, LAYOUT, TRAIN, STRATEGY and SAMPLING are our sections of these names (`foreign_file`)
    checks                 by group, keys whose value alone matters: values that change nothing here ("off": null,
                           false, 0 and the like), and kind and reason for leaving out the key with another one
    speed                  names of settings that change speed or memory, not results, in any section
    left_out               by kind and reason, the keys that are left out; one that ends in `_`, `-` or `.` begins keys
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib import resources
from typing import Any

import yaml

from roll_batching.jobs.config.diagnostics import ConfigFileError, Place, Problem, shortened
from roll_batching.tools.conversion.draft import Draft, Kind

ROLE = "actor_train"
DATA = (ROLE, "data_args")
LAYOUT = (ROLE, "strategy_args", "strategy_config")
PACKING = (ROLE, "sequence_packing_args")
TRAIN = (ROLE, "training_args")
STRATEGY = ("actor_infer", "strategy_args")
SAMPLING = ("actor_infer", "generating_args")
HELD_OUT = ("validation", "generating_args")
_SECTIONS = {"DATA": DATA, "LAYOUT": LAYOUT, "TRAIN": TRAIN, "STRATEGY": STRATEGY, "SAMPLING": SAMPLING}
"""Our sections by their names in data files."""
FASTER = "changes speed or memory, not results"
REWARDS = "no such reward exists here: write a function, and name it in reward_function or rewards"
STOP = "a response ends at the tokenizer's end token, or the model's stop tokens"


@functools.cache
class Tables:
    """The data file of a framework."""

    def __init__(self, framework: str) -> None:
        text = resources.files(__package__).joinpath("data", f"{framework}.yaml").read_text(encoding="utf-8")
        self.data: dict[str, Any] = yaml.safe_load(text)
        self.speed = frozenset(str(self.data.get("speed", "")).split())
        reasons = [
            (name, kind, why)
            for kind, names_of_reasons in self.data.get("left_out", {}).items()
            for why, names in names_of_reasons.items()
            for name in self.keys(names)
        ]
        # Longest first, so that `reason` finds the most specific one.
        self.reasons: tuple[tuple[str, str, str], ...] = tuple(sorted(reasons, key=lambda entry: -len(entry[0])))
        """(Beginning of keys, kind, reason for leaving them out), the longest beginning first."""

    def key(self, name: str) -> str:
        """The whole key of the framework for a name in the data file, which may be shortened."""
        first, dot, rest = name.partition(".")
        return f"{self.data.get('prefix', '')}{self.data.get('short_names', {}).get(first, first)}{dot}{rest}"

    def keys(self, names: str) -> tuple[str, ...]:
        """The whole keys for names in the data file that are separated by spaces."""
        return tuple(map(self.key, names.split()))

    def of_type(self, *kinds: str) -> tuple[str, ...]:
        """The keys that the data file lists under `types` for these kinds."""
        return tuple(key for kind in kinds for key in self.keys(self.data["types"].get(kind, "")))

    def defaults(self, *groups: str) -> dict[str, Any]:
        """The framework's defaults by whole key, of these groups of the data file."""
        return {self.key(key): value for group in groups for key, value in self.data["defaults"][group].items()}

    def reason(self, key: str) -> tuple[str, str, str] | None:
        """The first entry of `reasons` whose beginning matches `key`; None: the data file does not mention it."""
        return next((entry for entry in self.reasons if _is_below(entry[0], key)), None)

    def is_idle(self, key: str) -> bool:
        """Whether `key`, whatever its value, has no effect here."""
        reason = self.reason(key)
        return reason is not None and reason[1] == "idle"

    def check_types(self, data: Mapping[str, Any], source: str, sections_type: str = "sections") -> None:
        """Raises ConfigFileError that lists every value of a wrong type. `source`: the file's name in messages."""
        sections, counts, numbers = (self.of_type(kind) for kind in (sections_type, "counts", "numbers"))
        if problems := list(wrong_types(data, sections, counts, numbers)):
            raise ConfigFileError([Problem(path, message, Place(source)) for path, message in problems])


@dataclass(frozen=True)
class Given:
    """A value of a foreign file, its key there, and how its meaning differs here."""

    value: Any
    key: str
    meaning: str = ""


class ForeignFile:
    """Settings of a foreign file and the draft of their conversion. Converting a key takes it out of the settings."""

    def __init__(self, tables: Tables, data: dict[str, Any], draft: Draft) -> None:
        self.tables, self.data, self.draft = tables, data, draft

    def peek(self, key: str, default: Any = None) -> Any:
        """Returns the value of `key` and leaves it in the file."""
        here: Any = self.data
        for part in key.split("."):
            if not isinstance(here, dict) or part not in here:
                return default
            here = here[part]
        return here

    def take(self, key: str, default: Any = None) -> Any:
        """Returns the value of `key` and removes it from the file."""
        value = self.peek(key, default)
        *sections, last = key.split(".")
        section = self.peek(".".join(sections)) if sections else self.data
        if isinstance(section, dict):
            section.pop(last, None)
        return value

    def given(self, key: str, meaning: str = "") -> Given | None:
        """Removes `key` from the file; returns its value with the key, or None where there is no value."""
        value = self.take(key)
        return None if value is None else Given(value, key, meaning)

    def fill_defaults(self, defaults: Mapping[str, Any]) -> None:
        """Adds `defaults`, by dotted key, for keys that the file lacks, and records them in the draft."""
        self.draft.defaults |= fill_defaults(self.data, defaults)

    def put(self, path: tuple[str, ...], value: Any, key: str, meaning: str = "") -> None:
        """Puts `value` at `path` of the draft, with the origin `key`; does nothing for None."""
        if value is not None:
            self.draft.put(path, value, key, meaning)

    def move(
        self, key: str, path: tuple[str, ...], change: Callable[[Any], Any] = lambda value: value, meaning: str = ""
    ) -> None:
        """Moves the value of `key`, changed by `change`, to `path` of the draft; nothing without a value."""
        value = self.take(key)
        if value is not None:
            self.draft.put(path, change(value), key, meaning)

    def move_all(self, group: str, section: str = "") -> None:
        """Moves every key that the data file lists under `moves.GROUP` to our key of it.

        `section`: the section of this file that holds these keys; empty: the names in the data file are whole keys.
        """
        for name, target in self.tables.data["moves"][group].items():
            key = f"{section}.{name}" if section else self.tables.key(name)
            ours, meaning = target if isinstance(target, list) else (target, "")
            first, *rest = ours.split(".")
            self.move(key, (*_SECTIONS.get(first, (first,)), *rest), meaning=meaning)

    def check_all(self, group: str, section: str = "") -> None:
        """Takes every key that the data file lists under `checks.GROUP`; leaves out those with other values.

        `section`: as in `move_all`.
        """
        for name, (accepted, kind, why) in self.tables.data["checks"][group].items():
            key = f"{section}.{name}" if section else self.tables.key(name)
            if accepted == "off":
                self.expect_off(key, why=why)
            elif (value := self.take(key)) is not None and value not in accepted:
                self.draft.leave_out(key, kind, why.replace("{value}", str(value)))

    def leave_out(self, key: str, kind: Kind, why: str) -> None:
        """Removes `key` from the file; if it has a value, records why it is not converted."""
        if self.take(key) is not None:
            self.draft.leave_out(key, kind, why)

    def expect_off(self, *keys: str, why: str) -> None:
        """Takes keys that must be off here. A key that is on is refused with the reason `why`."""
        for key in keys:
            value = self.take(key)
            if value is not None:
                off = _is_off(value)
                self.draft.leave_out(key, "idle" if off else "refused", "is off, as here" if off else why)

    def leave_out_rest(self) -> None:
        """Leaves out every key that was not taken yet, with the reason that the data file gives for it."""
        self._rest(self.data, "")

    def _rest(self, section: Mapping[str, Any], above: str) -> None:
        for name, value in section.items():
            key = f"{above}{name}"
            reason = self.tables.reason(key)
            if value == {}:
                continue  # all its keys were taken
            # A section without a switch is only called off as a whole if the data file names it; else its keys are.
            if _is_off(value) and (
                not isinstance(value, dict) or {"enabled", "enable"} & value.keys() or (reason and key == reason[0])
            ):
                self.draft.leave_out(key, "idle", "is off, as here")
            elif name in self.tables.speed or (name == "expert_tensor_parallel_size" and value == 1):
                self.draft.leave_out(key, "idle", FASTER)
            elif reason is not None and (reason[1] == "idle" or not isinstance(value, dict) or key == reason[0]):
                self.draft.leave_out(key, "refused" if reason[1] == "refused" else "idle", reason[2])
            elif isinstance(value, dict):
                self._rest(value, f"{key}.")
            else:
                self.draft.leave_out(key, "unknown", "there is no such setting here")


def _is_below(prefix: str, key: str) -> bool:
    """Whether `key` is `prefix` or lies in that section. A `prefix` that ends in `_`, `-` or `.` begins keys."""
    return key == prefix or key.startswith(prefix if prefix.endswith(("_", "-", ".")) else f"{prefix}.")


def _is_off(value: Any) -> bool:
    """Whether `value` is off, or a section that is switched off."""
    if isinstance(value, dict):
        return False in (value.get("enabled"), value.get("enable")) or all(_is_off(below) for below in value.values())
    return value in (None, False, 0, "none", [])


# ---- types and defaults


def wrong_types(
    data: Mapping[str, Any], sections: Iterable[str], counts: Iterable[str], numbers: Iterable[str]
) -> Iterator[tuple[tuple[str, ...], str]]:
    """Path and message of each value of a wrong type, by dotted keys that must be sections, counts or numbers."""
    for key in sections:
        value = value_at(data, key)
        if value is not None and not isinstance(value, Mapping):
            yield tuple(key.split(".")), f"is {shortened(repr(value))}, but it is a section of keys and values"
    for key in counts:
        value = value_at(data, key)
        if value is not None and not (_is_whole(value) and value >= 1):
            yield tuple(key.split(".")), f"is {shortened(repr(value))}: write a whole number of at least 1"
    for key in numbers:
        value = value_at(data, key)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float) or value != value):
            yield tuple(key.split(".")), f"is {shortened(repr(value))}: write a number"


def _is_whole(value: Any) -> bool:
    """Whether `value` is a whole number; a float counts, as the result of a division."""
    if isinstance(value, float):
        return math.isfinite(value) and value % 1 == 0
    return isinstance(value, int) and not isinstance(value, bool)


def value_at(data: Any, key: str) -> Any:
    """The value of a dotted key; None if absent."""
    for part in key.split("."):
        data = data.get(part) if isinstance(data, Mapping) else None
    return data


def number_of(value: Any) -> Any:
    """Converts a text to int, else to float; returns other texts and values unchanged."""
    if isinstance(value, str):
        for kind in (int, float):
            with suppress(ValueError):
                return kind(value)  # int first: "8" stays a whole number
    return value


def fill_defaults(data: dict[str, Any], defaults: Mapping[str, Any]) -> set[str]:
    """Adds `defaults`, by dotted key, for keys that `data` lacks; returns the added keys and sections.

    A key below a value that is not a section, such as null, stays absent.
    """
    filled: set[str] = set()
    for key, default in defaults.items():
        section: Any = data
        *parents, last = key.split(".")
        for depth, part in enumerate(parents, 1):
            if isinstance(section, dict) and part not in section:
                section[part] = {}
                filled.add(".".join(parents[:depth]))
            section = section.get(part) if isinstance(section, dict) else None
        if isinstance(section, dict) and last not in section:
            section[last] = copy.deepcopy(default)
            filled.add(key)
    return filled


def section_at(data: Any, *path: str | int) -> dict[str, Any]:
    """The section at `path` of `data`; where there is none, a new empty one that is not part of `data`."""
    for part in path:
        data = data.get(part) if isinstance(data, dict) else None
    return data if isinstance(data, dict) else {}
