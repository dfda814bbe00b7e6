"""From keys in our names to settings that load: what the schema knows, what its rules allow, what would do nothing.

The loader itself judges: what it refuses is left out with its message, and what it would only give a notice for, too.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from roll_batching.jobs.config.diagnostics import ConfigFileError, KeyPath, Problem, dotted
from roll_batching.jobs.config.job import JobConfig
from roll_batching.jobs.config.key_paths import field_at, given_keys
from roll_batching.jobs.config.validation import check_source
from roll_batching.jobs.config.withheld import is_free
from roll_batching.jobs.config.yaml_source import Source
from roll_batching.jobs.conversion.report import Conversion, Kind, LeftOut, Moved
from roll_batching.secret_names import is_secret, withhold
from roll_batching.settings.fields import Noticed, Refused, use_of

_STAND_INS: Mapping[KeyPath, Any] = {("warmup", "file_name"): "?"}
"""Values that only whoever converts can give, in whose place these let the rest be judged."""
_SECRET = "looks like a secret, which no file should hold: set it where the job starts"
_ROUNDS = 20
"""Times that the loader is asked again; each time finds what others hid."""


@dataclass
class Draft:
    """Settings in our names, before anything has judged them."""

    source: str
    values: dict[str, Any] = field(default_factory=dict)
    origins: dict[KeyPath, str] = field(default_factory=dict)
    """The key of the file that a value came from, where its name was another."""
    meanings: dict[KeyPath, str] = field(default_factory=dict)
    """What a key means here, where that is not what it meant there."""
    left_out: dict[str, tuple[Kind, str]] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    """What a run needs beyond what the loader asks for, as `key: what`."""
    framework: str = ""
    """Name of the framework that the file is for."""
    defaults: set[str] = field(default_factory=set)
    """Keys that the file leaves out and that have the framework's defaults (`framework_defaults.fill_defaults`)."""

    def origin(self, path: KeyPath) -> str:
        """The key of the file that the value at `path` came from."""
        return self.origins.get(path) or dotted(path)

    def put(self, path: KeyPath, value: Any, origin: str | None = None, meaning: str = "") -> None:
        """Sets the value at `path`."""
        here = self.values
        for part in path[:-1]:
            below = here.get(str(part))
            if not isinstance(below, dict):
                below = here[str(part)] = {}
            here = below
        here[str(path[-1])] = value
        if origin is not None:
            self.origins[path] = origin
        if meaning:
            self.meanings[path] = meaning

    def leave_out(self, key: str, kind: Kind, why: str) -> None:
        """Notes that `key` of the file is not carried over; the first reason stays."""
        self.left_out.setdefault(key, (kind, why))


def settled(draft: Draft) -> Conversion:
    """`draft` as a conversion whose settings the loader accepts without a notice."""
    data: dict[str, Any] = _of_the_schema(draft)
    absent = [path for path in _STAND_INS if path[0] in data and _at(data, path) is _NOTHING]
    for path in absent:
        data[str(path[0])][path[1]] = _STAND_INS[path]
    job = _accepted(data, draft)
    for path in absent:
        del data[str(path[0])][path[1]]
    missing = [*draft.missing, *(f"{dotted(path)}: is missing" for path in absent)]
    if job is not None:
        try:
            job.check_runnable()
        except ConfigFileError as error:
            missing += [f"{dotted(problem.path)}: {problem.message}" for problem in error.problems]
    result = Conversion(draft.source, data, framework=draft.framework, missing=missing)
    for path, _ in given_keys(data):
        origin, meaning = draft.origin(path), _meaning(draft, path)
        written = result.changed if meaning else result.kept
        (result.defaults if origin in draft.defaults else written).append(Moved(origin, dotted(path), meaning))
    for key, (kind, why) in sorted(draft.left_out.items()):
        if key not in draft.defaults:
            result.left_out.append(LeftOut(key, why, kind))
        elif kind == "refused":
            result.left_out.append(LeftOut(key, f"{draft.framework}'s default; {why}", kind))
    return result


def _meaning(draft: Draft, path: KeyPath) -> str:
    return next((draft.meanings[path[:end]] for end in range(len(path), 0, -1) if path[:end] in draft.meanings), "")


def _of_the_schema(draft: Draft) -> dict[str, Any]:
    """The values whose keys the schema has, and that it neither refuses nor only notices."""
    data: dict[str, Any] = copy.deepcopy(draft.values)
    for path, value in list(_pairs(data)):
        if is_free(path) and not isinstance(value, dict) and withhold(value, secret=any(map(is_secret, path))) != value:
            draft.leave_out(draft.origin(path), "refused", _SECRET)
            _remove(data, path)
            continue
        field_here = field_at(path)
        use = use_of(field_here) if field_here is not None else None
        if isinstance(use, Noticed):
            _drop(data, draft, path, "idle", use.notice)
        elif isinstance(use, Refused):
            nothing = value is None or value in use.allowed
            _drop(data, draft, path, "idle" if nothing else "refused", use.reason)
        elif field_here is not None and draft.origin(path) in draft.defaults and not isinstance(value, dict):
            ours = field_here.get_default(call_default_factory=True)
            if value == ours and isinstance(value, bool) == isinstance(ours, bool):
                _remove(data, path)
    return data


def _remove(data: dict[str, Any], path: KeyPath) -> None:
    """Takes the value at `path` out of `data`, and the sections that become empty."""
    above = _at(data, path[:-1])
    del above[path[-1]]
    if not above and path[:-1]:
        _remove(data, path[:-1])


def _pairs(data: Any, prefix: KeyPath = ()) -> Iterator[tuple[KeyPath, Any]]:
    for key, value in data.items():
        yield (*prefix, key), value
        if isinstance(value, dict):
            yield from _pairs(value, (*prefix, key))


def _accepted(data: dict[str, Any], draft: Draft) -> JobConfig | None:
    """The job that `data` describes once all that the loader objects to is taken out of it."""
    for _ in range(_ROUNDS):
        try:
            job = check_source(Source(draft.source, copy.deepcopy(data)))
        except ConfigFileError as error:
            if not sum(_refused(data, draft, problem) for problem in error.problems):
                draft.leave_out("(the whole file)", "refused", str(error))
                return None
            continue
        idle = [notice for notice in job.notices if _is_idle(notice.text)]
        for notice in idle:
            path = _path_of(data, notice.path)
            if path is None:
                continue
            _drop(data, draft, path, "idle", notice.text.removeprefix("has no effect: "))
        for notice in job.notices:
            path = _path_of(data, notice.path)
            if path is not None and not _is_idle(notice.text):
                draft.meanings.setdefault(path, notice.text)
        if not idle:
            return job
    return None


def _is_idle(text: str) -> bool:
    return text.startswith(("has no effect", "is not built"))


def _refused(data: dict[str, Any], draft: Draft, problem: Problem) -> bool:
    """Takes out what `problem` is about. False where nothing of it is given."""
    path = problem.path
    while path and _at(data, path) is _NOTHING:
        path = path[:-1]
    if not path or (path != problem.path and isinstance(_at(data, path), Mapping) and len(path) < 2):
        return False
    unknown = problem.message.startswith("unknown key")
    why = "there is no such setting here" if unknown else problem.message
    _drop(data, draft, path, "unknown" if unknown else "refused", why)
    return True


_NOTHING = object()


def _at(data: Any, path: KeyPath) -> Any:
    for part in path:
        if isinstance(data, Mapping) and part in data:
            data = data[part]
        elif isinstance(data, list) and isinstance(part, int) and part < len(data):
            data = data[part]
        else:
            return _NOTHING
    return data


def _path_of(data: Any, name: str) -> KeyPath | None:
    return next((path for path, _ in _pairs(data) if dotted(path) == name), None)


def _drop(data: dict[str, Any], draft: Draft, path: KeyPath, kind: Kind, why: str) -> None:
    if _at(data, path) is _NOTHING:
        return
    draft.leave_out(draft.origin(path), kind, why)
    here: Any = data
    for part in path[:-1]:
        here = here[part]
    del here[path[-1]]
