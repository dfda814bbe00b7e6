"""From plain data to a checked `JobConfig`, or to one error that names all problems."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from typing import Any, Literal, get_args, get_origin

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from roll_batching.jobs.config.advantages import REFUSED_ESTIMATORS
from roll_batching.jobs.config.diagnostics import ConfigFileError, KeyPath, Problem, dotted, nearest, shortened
from roll_batching.jobs.config.job import JobConfig
from roll_batching.jobs.config.key_paths import SchemaKey, all_keys, field_at, given_keys, heading_of, settings_at
from roll_batching.jobs.config.notices import collect_notices
from roll_batching.jobs.config.rules import broken_rules
from roll_batching.jobs.config.yaml_source import Source
from roll_batching.secret_names import is_secret, withhold
from roll_batching.settings.fields import Refused, use_of
from roll_batching.settings.registered import registered_name
from roll_batching.settings.strategy import FSDP_STRATEGIES

MOST_EXPLAINED = 50
"""Faulty keys that are looked at closely (the nearest valid names); the rest are counted."""

_ALIKE = 0.75
"""How alike an unknown key and a known one must be to be taken for a slip of the pen (`custom_envs` is no
`system_envs`, whose ratio is 0.73)."""


def check_source(source: Source) -> JobConfig:
    """Validates `source`. Raises ConfigFileError."""
    data = _without(source.data, [problem.path for problem in source.faults])
    problems = [*source.faults, *_plain_faults(data)]
    data = _without(data, [problem.path for problem in problems])
    job: JobConfig | None = None
    # A faulty key is set aside and the rest is read again, so that one run reports all problems.
    for _ in range(8):
        try:
            job = JobConfig.model_validate(data)
            break
        except ValidationError as error:
            errors = error.errors()
            found = [(_translate(item, data), item["type"] == "missing") for item in errors[:MOST_EXPLAINED]]
            known = {problem.path for problem in problems}
            # What is missing because it was set aside has been reported; its section goes with it.
            problems += [problem for problem, missing in found if not (missing and problem.path in known)]
            if len(errors) > MOST_EXPLAINED:
                raise ConfigFileError(_placed(problems, source), more=len(errors) - MOST_EXPLAINED) from None
            data = _without(data, [problem.path[:-1] if missing else problem.path for problem, missing in found])
    faulty = {problem.path for problem in problems}
    if job is not None:
        for problem in broken_rules(job):
            if not any(
                path[: len(problem.path)] == problem.path or problem.path[: len(path)] == path for path in faulty
            ):
                problems.append(problem)
    if problems or job is None:
        unique = {problem.path + (problem.message,): problem for problem in problems}
        raise ConfigFileError(_placed(unique.values(), source))
    job._notices = collect_notices(job, source)
    job._source = source if source.places else None
    return job


def _placed(problems: Iterable[Problem], source: Source) -> list[Problem]:
    return [problem.placed(source.place) if source.places else problem for problem in problems]


def _plain_faults(data: Any) -> list[Problem]:
    """Values refused by name, and true or false where a number belongs."""
    problems = []
    for path, value in _given_at_any_depth(data):
        field = field_at(path)
        if field is None:
            continue
        use = use_of(field)
        if isinstance(use, Refused) and not any(
            value == choice and _same_kind(value, choice) for choice in use.allowed
        ):
            problems.append(Problem(path, f"{_show(value)} is refused: {use.reason}"))
        elif isinstance(value, bool) and not _takes(field.annotation, bool):
            problems.append(Problem(path, f"expected {_kind(field.annotation)}, got {str(value).lower()}"))
    return problems


def _given_at_any_depth(data: Any) -> list[tuple[KeyPath, Any]]:
    found: dict[KeyPath, Any] = {}
    for path, value in given_keys(data):
        for end in range(1, len(path)):
            found.setdefault(path[:end], _at(data, path[:end]))
        found[path] = value
    return list(found.items())


def _same_kind(value: Any, choice: Any) -> bool:
    return isinstance(value, bool) == isinstance(choice, bool)


def _takes(annotation: Any, kind: type) -> bool:
    return annotation in (Any, kind) or any(_takes(option, kind) for option in get_args(annotation))


def _kind(annotation: Any) -> str:
    if _takes(annotation, int):
        return "a whole number"
    return "a number" if _takes(annotation, float) else "another kind of value"


def _show(value: Any) -> str:
    if isinstance(value, dict):
        return "this section"
    return str(value).lower() if isinstance(value, bool) else shortened(repr(value))


def _at(data: Any, path: KeyPath) -> Any:
    for part in path:
        data = data[part]
    return data


def _without(data: Any, paths: Sequence[KeyPath]) -> Any:
    """`data` less the keys at `paths` (a list item is left out with its whole list)."""
    data = copy.deepcopy(data)
    for path in paths:
        here = data
        for number, part in enumerate(path):
            if not isinstance(here, dict) or part not in here:
                break
            last = number == len(path) - 1
            if last or not isinstance(here[part], dict):
                del here[part]
                break
            here = here[part]
    return data


def _translate(error: ErrorDetails, data: Any) -> Problem:
    path = _path_in(error["loc"], data, missing=error["type"] == "missing")
    kind = error["type"]
    given = withhold(error["input"], secret=any(map(is_secret, path)) and field_at(path) is None)
    context = error.get("ctx", {})
    if kind == "extra_forbidden":
        return Problem(path, _unknown_key(path))
    if kind == "missing":
        return Problem(path, "is missing")
    field = field_at(path)
    registered = registered_name(field) if field is not None else None
    if registered is not None:
        return Problem(path, _bad_choice(given, registered.registry.names, "your own as package.module:name"))
    choices = _literals(field.annotation) if field is not None else []
    if kind == "literal_error" or (choices and isinstance(given, str)):
        number = field is not None and _takes(field.annotation, int)
        return Problem(path, _bad_choice(given, choices, "a whole number" if number else None))
    if kind == "value_error":
        return Problem(path, str(context.get("error", error["msg"])))
    bounds = {"greater_than": "above {gt}", "greater_than_equal": "at least {ge}", "less_than": "below {lt}"}
    bounds["less_than_equal"] = "at most {le}"
    if kind in bounds:
        limit = {name: f"{value:.12g}" for name, value in context.items() if isinstance(value, int | float)}
        return Problem(path, f"is {given}; it must be {bounds[kind].format(**limit)}")
    if kind in ("model_type", "model_attributes_type", "dict_type"):
        return Problem(path, f"expected keys and values, got {_show(given)}")
    words = {
        "int": "a whole number",
        "float": "a number",
        "bool": "true or false",
        "string": "text (put it in quotes)",
        "finite": "a finite number",
        "tuple": "a list",
        "list": "a list",
    }
    expected = words.get(kind.split("_")[0])
    if expected:
        return Problem(path, f"expected {expected}, got {_show(given)}")
    return Problem(path, f"{error['msg'][0].lower()}{error['msg'][1:]}, got {_show(given)}")


def _path_in(location: Sequence[str | int], data: Any, *, missing: bool) -> KeyPath:
    """The part of pydantic's location that is a path of keys; union branches add words of their own."""
    path: KeyPath = ()
    for part in location:
        if isinstance(data, dict) and part in data:
            data = data[part]
        elif isinstance(data, list) and isinstance(part, int) and part < len(data):
            data = data[part]
        else:
            return (*path, part) if missing else path
        path = (*path, part)
    return path


def _unknown_key(path: KeyPath) -> str:
    name, settings = str(path[-1]), settings_at(path[:-1])
    known = list(settings.model_fields) if settings is not None else []
    elsewhere = [dotted(key.path) for key in _keys_for(path) if key.path[-1] == name]
    guess = nearest(name, known, _ALIKE)
    if guess and not elsewhere:
        return f"unknown key; did you mean {guess!r}?"
    if elsewhere:
        same_role = [key for key in elsewhere if key.split(".")[0] == path[0]]
        return f"unknown key here; it belongs at {(same_role or elsewhere)[0]}"
    anywhere = nearest(name, {key.path[-1] for key in _keys_for(path)}, _ALIKE)
    if anywhere:
        places = [dotted(key.path) for key in _keys_for(path) if key.path[-1] == anywhere]
        same_role = [key for key in places if key.split(".")[0] == path[0]]
        return f"unknown key; did you mean {(same_role or places)[0]!r}?"
    return f"unknown key; the keys that there are: docs/configuration.md, {heading_of(path[:-1])!r}"


def _keys_for(path: KeyPath) -> list[SchemaKey]:
    """The keys that an unknown key at `path` may be meant for: inside a section, that section's and the job's own."""
    if len(path) == 1:
        return list(all_keys())
    return [key for key in all_keys() if key.path[0] == path[0] or len(key.path) == 1]


def _literals(annotation: Any) -> list[str]:
    if get_origin(annotation) is Literal:
        return [choice for choice in get_args(annotation) if isinstance(choice, str)]
    return [choice for option in get_args(annotation) for choice in _literals(option)]


def _bad_choice(given: Any, choices: Sequence[str], other: str | None = None) -> str:
    """`choices` are the values that may be written, `other` says in words what else may be."""
    if given in FSDP_STRATEGIES:
        return f"{given!r} does not exist here: training runs on Megatron-Core; use megatron_train or megatron_infer"
    if given == "yarn":
        return "'yarn' is refused: YaRN scaling is not supported for now; choose linear or llama3"
    if isinstance(given, str) and given in REFUSED_ESTIMATORS:
        return f"{given!r} is refused: {REFUSED_ESTIMATORS[given]}"
    guess = nearest(str(given), choices)
    hint = f"did you mean {guess!r}? " if guess else ""
    return f"{_show(given)} is not possible; {hint}choose {_one_of([*choices, other] if other else choices)}"


def _one_of(choices: Sequence[str]) -> str:
    return " or ".join([", ".join(choices[:-1]), choices[-1]]) if len(choices) > 1 else choices[0]
