"""Settings translated from another framework's file, reduced to those that load without an error or notice.

The loader decides: keys that it refuses are left out with its message, and so are keys that have no effect. The
report of a conversion tells which keys are kept, kept with another meaning, or left out.
"""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, Literal

import yaml

from roll_batching.jobs.config.diagnostics import ConfigFileError, KeyPath, NoticeKind, Problem, dotted
from roll_batching.jobs.config.foreign_keys import given_foreign_keys
from roll_batching.jobs.config.job import JobConfig, check_source
from roll_batching.jobs.config.job_keys import NOT_EVALUATED
from roll_batching.jobs.config.key_paths import field_at, given_keys
from roll_batching.jobs.config.plain_data import is_free
from roll_batching.jobs.config.yaml_source import Source
from roll_batching.secret_names import is_secret, redact, redact_forms

_PLACEHOLDERS: Mapping[KeyPath, Any] = {("warmup", "file_name"): "?"}
"""Values of required keys that the user fills in later; with them the loader checks the rest of their section."""
_SECRET = "looks like a secret, which no file should hold: set it where the job starts"
_ROUNDS = 20
"""Most calls of the loader. Each one can find problems that an earlier one hid."""


@dataclass
class Draft:
    """Settings under our keys, not yet checked, with the origin of each."""

    source: str
    values: dict[str, Any] = field(default_factory=dict)
    origins: dict[KeyPath, str] = field(default_factory=dict)
    """Key of the file by our key, where the two differ."""
    meanings: dict[KeyPath, str] = field(default_factory=dict)
    """Difference between our meaning of a key and the framework's, by our key."""
    left_out: dict[str, tuple[Kind, str]] = field(default_factory=dict)
    """Reason why a key is not converted, by key of the file."""
    missing: list[str] = field(default_factory=list)
    """Values that a run needs and the loader does not ask for, as `key: explanation`."""
    framework: str = ""
    """Name of the framework that the file is for."""
    defaults: set[str] = field(default_factory=set)
    """Keys that the file leaves out and that have the framework's defaults (`foreign_file.fill_defaults`)."""

    def origin(self, path: KeyPath) -> str:
        """The key of the file that the value at `path` came from."""
        return self.origins.get(path) or dotted(path)

    def put(self, path: KeyPath, value: Any, origin: str | None = None, meaning: str = "") -> None:
        """Sets the value at `path`, making sections as needed."""
        section = self.values
        for part in path[:-1]:
            below = section.get(str(part))
            if not isinstance(below, dict):
                below = section[str(part)] = {}
            section = below
        section[str(path[-1])] = value
        if origin is not None:
            self.origins[path] = origin
        if meaning:
            self.meanings[path] = meaning

    def leave_out(self, key: str, kind: Kind, why: str) -> None:
        """Records that `key` of the file is not converted. The first reason of a key stays."""
        self.left_out.setdefault(key, (kind, redact_forms(why)))


def check_draft(draft: Draft) -> Conversion:
    """Reduces `draft` to settings that load without an error or notice; reports every key that is left out.

    Keys of an evaluation without data stay, although they bring a notice.
    """
    data = _known_values(draft)
    absent = [path for path in _PLACEHOLDERS if path[0] in data and _value_at(data, path) is _ABSENT]
    for path in absent:
        data[str(path[0])][path[1]] = _PLACEHOLDERS[path]
    job = _load_without_problems(data, draft)
    for path in absent:
        del data[str(path[0])][path[1]]
    missing = [*draft.missing, *(f"{dotted(path)}: is missing" for path in absent)]
    if job is not None:
        checks: list[Callable[[], Any]] = [job.check_runnable]
        if job.world_size is not None:
            checks.append(partial(job.dp_size, job.world_size))
        for check in checks:
            try:
                check()
            except ConfigFileError as error:
                missing += [f"{dotted(problem.path)}: {problem.message}" for problem in error.problems]
    result = Conversion(draft.source, data, framework=draft.framework, missing=missing)
    for path, _ in given_keys(data):
        origin, meaning = draft.origin(path), _meaning(draft, path)
        written = result.changed if meaning else result.kept
        (result.defaults if origin in draft.defaults else written).append(KeptKey(origin, dotted(path), meaning))
    for key, (kind, why) in sorted(draft.left_out.items()):
        if key not in draft.defaults:
            result.left_out.append(LeftOut(key, why, kind))
        elif kind == "refused":
            result.left_out.append(LeftOut(key, f"{draft.framework}'s default; {why}", kind))
    return result


def _meaning(draft: Draft, path: KeyPath) -> str:
    """The difference in meaning of the key at `path`, else of the innermost section with one; empty for none."""
    return next((draft.meanings[path[:end]] for end in range(len(path), 0, -1) if path[:end] in draft.meanings), "")


def _known_values(draft: Draft) -> dict[str, Any]:
    """Copies the draft's values without secrets, keys without effect here, and defaults that equal ours."""
    data: dict[str, Any] = copy.deepcopy(draft.values)
    for path, value, key in list(given_foreign_keys(data)):
        _drop(data, draft, path, "refused" if key.refuses(value) else "idle", key.reason)
    for path, value in list(_pairs(data)):
        if not isinstance(value, dict) and _without_secrets(path, value) != value:
            draft.leave_out(draft.origin(path), "refused", _SECRET)
            _remove(data, path)
            continue
        schema_field = field_at(path)
        if schema_field is not None and draft.origin(path) in draft.defaults and not isinstance(value, dict):
            ours = schema_field.get_default(call_default_factory=True)
            if value == ours and isinstance(value, bool) == isinstance(ours, bool):  # 1 == True in Python
                _remove(data, path)
    return data


def _without_secrets(path: KeyPath, value: Any) -> Any:
    if is_free(path):
        return redact(value, name=path[-1], secret=any(map(is_secret, path)))
    return redact_forms(value)


def _remove(data: dict[str, Any], path: KeyPath) -> None:
    """Removes the value at `path` from `data`, and then every section that became empty."""
    section = _value_at(data, path[:-1])
    del section[path[-1]]
    if not section and path[:-1]:
        _remove(data, path[:-1])


def _pairs(data: Mapping[str, Any], prefix: KeyPath = ()) -> Iterator[tuple[KeyPath, Any]]:
    """Path and value of every key, sections before their keys."""
    for key, value in data.items():
        yield (*prefix, key), value
        if isinstance(value, dict):
            yield from _pairs(value, (*prefix, key))


def _load_without_problems(data: dict[str, Any], draft: Draft) -> JobConfig | None:
    """Removes from `data` every key that the loader refuses or does not read; returns the job that it then loads.

    None: no settings are left that load.
    """
    for _ in range(_ROUNDS):
        try:
            job = check_source(Source(draft.source, copy.deepcopy(data)))
        except ConfigFileError as error:
            first = {problem.path: problem for problem in reversed(error.problems)}  # a second would drop the section
            if not sum(_drop_problem(data, draft, problem) for problem in first.values()):
                draft.leave_out("(the whole file)", "refused", str(error))
                return None
            continue
        # An evaluation's keys stay: a user who adds held-out data or a reward gets the framework's values.
        unread = [
            notice
            for notice in job.notices
            if notice.kind is not NoticeKind.OTHER_EFFECT and not notice.text.endswith(NOT_EVALUATED)
        ]
        for notice in unread:
            _drop(data, draft, notice.key, "idle", notice.text.removeprefix("has no effect: "))
        for notice in job.notices:
            if notice.kind is NoticeKind.OTHER_EFFECT and _value_at(data, notice.key) is not _ABSENT:
                draft.meanings.setdefault(notice.key, notice.text)
        if not unread:
            return job
    return None


def _drop_problem(data: dict[str, Any], draft: Draft, problem: Problem) -> bool:
    """Removes the key that `problem` names, or the section that lacks it; returns whether there was one."""
    path = problem.path
    while path and _value_at(data, path) is _ABSENT:
        path = path[:-1]
    # A whole role such as actor_train stays, whatever it lacks.
    if not path or (path != problem.path and isinstance(_value_at(data, path), Mapping) and len(path) < 2):
        return False
    why = "there is no such setting here" if problem.unknown_key else problem.message
    _drop(data, draft, path, "unknown" if problem.unknown_key else "refused", why)
    return True


_ABSENT = object()


def _value_at(data: Any, path: KeyPath) -> Any:
    for part in path:
        if isinstance(data, Mapping) and part in data:
            data = data[part]
        elif isinstance(data, list) and isinstance(part, int) and part < len(data):
            data = data[part]
        else:
            return _ABSENT
    return data


def _drop(data: dict[str, Any], draft: Draft, path: KeyPath, kind: Kind, why: str) -> None:
    """Removes the value at `path` from `data` and records why; does nothing if it is absent."""
    if _value_at(data, path) is _ABSENT:
        return
    draft.leave_out(draft.origin(path), kind, why)
    del _value_at(data, path[:-1])[path[-1]]


# ---- report


_COMMAND = "roll-batching convert-config"
_DIGEST = "# Digest of the lines below, which tells whether they were edited: "
Kind = Literal["idle", "refused", "unknown"]
"""Why a key is left out: no effect here (idle), not supported (refused), or no such setting (unknown)."""


@dataclass(frozen=True)
class KeptKey:
    """A key that is kept."""

    key: str
    to: str
    """Our key."""
    meaning: str = ""
    """The difference in meaning; empty without one."""


@dataclass(frozen=True)
class LeftOut:
    """A key that is not converted."""

    key: str
    why: str
    kind: Kind


@dataclass
class Conversion:
    """A converted file: settings, and the fate of every key of the original."""

    source: str
    settings: dict[str, Any]
    framework: str = ""
    """Name of the framework that the file is for."""
    kept: list[KeptKey] = field(default_factory=list)
    changed: list[KeptKey] = field(default_factory=list)
    defaults: list[KeptKey] = field(default_factory=list)
    """Defaults of the framework that differ from ours, for keys that the file leaves out."""
    left_out: list[LeftOut] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    """Keys that a run needs and the file lacks, as `key: explanation`."""

    def left_out_as(self, *kinds: Kind) -> list[LeftOut]:
        """The keys that were left out, of these kinds."""
        return [entry for entry in self.left_out if entry.kind in kinds]

    def to_yaml(self) -> str:
        """The settings as YAML, below comments with the lists of keys."""
        comments = "".join(f"# {line}\n" if line else "#\n" for line in self._comments())
        text = comments + yaml.safe_dump(self.settings, sort_keys=False, allow_unicode=True, width=110)
        return f"# Converted from {' '.join(self.source.split())} by {_COMMAND}.\n{_DIGEST}{_digest(text)}\n{text}"

    def to_json(self) -> str:
        """The lists of keys as JSON."""
        lists = {
            "written_by": _COMMAND,
            "source": self.source,
            "kept": [asdict(entry) for entry in self.kept],
            "kept_with_another_meaning": [asdict(entry) for entry in self.changed],
            "defaults_of_the_framework": [asdict(entry) for entry in self.defaults],
            "left_out": [asdict(entry) for entry in self.left_out],
            "missing": self.missing,
        }
        return json.dumps(lists, indent=1, ensure_ascii=False) + "\n"

    def _comments(self) -> Iterator[str]:
        yield "Keys in none of these lists have our defaults (docs/configuration.md)."
        for title, lines in (
            ("To be filled in before a run:", self.missing),
            ("Left out, although they matter:", self._shown("refused")),
            ("Left out, because there are no such settings here:", self._shown("unknown")),
            ("Left out, because they have no effect here:", self._shown("idle")),
            (
                f"{self.framework}'s defaults, for keys that the file leaves out:",
                [_explained(entry) for entry in self.defaults],
            ),
            ("Kept with another meaning:", [_explained(entry) for entry in self.changed]),
            ("Kept:", [_names(entry) for entry in self.kept]),
        ):
            if lines:
                yield ""
                yield title
                yield from (f"  {' '.join(line.split())}" for line in lines)

    def _shown(self, kind: Kind) -> list[str]:
        return [f"{entry.key}: {entry.why}" for entry in self.left_out_as(kind)]


def is_unedited_yaml(content: bytes) -> bool:
    """Whether `content` was written by `to_yaml` and not edited since."""
    _, digest, text = (*content.decode("utf-8", "replace").split("\n", 2), "", "")[:3]
    return digest == f"{_DIGEST}{_digest(text)}"


def is_json_report(content: bytes) -> bool:
    """Whether `content` was written by `to_json`."""
    return content[:200].startswith(f'{{\n "written_by": "{_COMMAND}"'.encode())


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode(errors="replace")).hexdigest()[:16]


def _explained(entry: KeptKey) -> str:
    return f"{_names(entry)}: {entry.meaning}" if entry.meaning else _names(entry)


def _names(entry: KeptKey) -> str:
    return entry.key if entry.key == entry.to else f"{entry.key} -> {entry.to}"
