"""`JobConfig`, and `check_source`: plain data becomes a checked job, or one error with all problems."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, get_args, get_origin

from pydantic import PrivateAttr, ValidationError, model_validator
from pydantic_core import ErrorDetails

from roll_batching.checked_fields import unit_hint, unit_of
from roll_batching.jobs.config.advantages import REFUSED_ESTIMATORS
from roll_batching.jobs.config.auto_caps import with_caps, with_open_caps
from roll_batching.jobs.config.diagnostics import ConfigFileError, KeyPath, Notice, Problem, dotted, nearest
from roll_batching.jobs.config.foreign_keys import FOREIGN_KEYS, foreign_paths, given_foreign_keys, shown
from roll_batching.jobs.config.job_keys import JobKeys
from roll_batching.jobs.config.key_paths import all_keys, field_at, given_keys, heading_of, settings_at
from roll_batching.jobs.config.notices import collect_notices
from roll_batching.jobs.config.resolution import resolve
from roll_batching.jobs.config.rules import broken_rules, missing_for_a_run
from roll_batching.jobs.config.yaml_source import Source
from roll_batching.secret_names import is_secret, redact, redact_forms
from roll_batching.settings.fields import nested_settings, registered_name
from roll_batching.settings.megatron_config import FSDP_STRATEGIES


class JobConfig(JobKeys):
    """A training job: prompts -> rollouts -> reward -> advantages -> balanced, packed training steps."""

    _notices: tuple[Notice, ...] = PrivateAttr(default=())
    _source: Source | None = PrivateAttr(default=None)
    _resolved_caps: dict[str, int] = PrivateAttr(default_factory=dict)

    @model_validator(mode="after")
    def _resolve(self) -> JobConfig:
        for name, value in resolve(self).items():
            # Settings are frozen; this one is still under construction.
            object.__setattr__(self, name, value)
        return self

    @property
    def notices(self) -> tuple[Notice, ...]:
        """Notices on keys without effect or with another effect, in the order of the file."""
        return self._notices

    @property
    def resolved_caps(self) -> Mapping[str, int]:
        """Caps that are `auto` in the file, in tokens by dotted path; empty before they are resolved."""
        return dict(self._resolved_caps)

    def with_resolved_caps(self, caps: Mapping[str, int]) -> JobConfig:
        """Copy of this job with `caps` in place of its auto caps, by dotted path."""
        job: JobConfig = with_caps(self, caps)
        job._resolved_caps = dict(caps)
        return job

    def check_runnable(self) -> None:
        """Raises ConfigFileError with all keys that a run needs and this configuration lacks."""
        problems = missing_for_a_run(with_open_caps(self))
        if problems:
            raise self.error(*problems)

    def error(self, *problems: Problem) -> ConfigFileError:
        """An error of `problems`, each with file and line of its key."""
        source = self._source
        return ConfigFileError([problem.placed(source.place) if source else problem for problem in problems])

    def to_dict(self) -> dict[str, Any]:
        """The resolved settings as plain data, ready for YAML or JSON."""
        return self.model_dump(mode="json")


# ---- validation


MOST_EXPLAINED = 50
"""Faulty keys that get an explanation, which searches for similar names; further ones are only counted."""

_SIMILAR = 0.75
"""Least similarity (difflib's ratio) of an unknown key and a suggestion; custom_envs and system_envs have 0.73."""
_ROUNDS = 8
"""Validations of the rest after faulty keys are taken out, so that one run reports all problems."""


def check_source(source: Source) -> JobConfig:
    """Validates `source`. Raises ConfigFileError with all problems."""
    # What has been reported, and what another framework alone reads, is taken out before the next check.
    data = _without(source.data, [problem.path for problem in source.faults])
    other_framework_keys = list(given_foreign_keys(data))
    problems = [
        *source.faults,
        *(Problem(path, key.refusal(value)) for path, value, key in other_framework_keys if key.refuses(value)),
    ]
    data = _without(data, [foreign.path for foreign in other_framework_keys])
    problems += _booleans_for_numbers(data)
    data = _without(data, [problem.path for problem in problems])
    job = _validate_without_faults(data, problems, source)
    if job is not None:
        faulty = [problem.path for problem in problems]
        problems += [
            problem
            for problem in broken_rules(with_open_caps(job))
            if not any(_nested(problem.path, path) for path in faulty)
        ]
    if problems or job is None:
        unique = {problem.path + (problem.message,): problem for problem in problems}
        raise ConfigFileError(_placed(unique.values(), source))
    job._notices = collect_notices(job, source)
    job._source = source if source.places else None
    return job


def _validate_without_faults(data: Any, problems: list[Problem], source: Source) -> JobConfig | None:
    """Validates repeatedly: takes out each faulty key, so that later rounds find the rest. Appends to `problems`.

    Returns None if keys are still faulty in the last round: the caller then reports `problems`. Raises
    ConfigFileError for more than `MOST_EXPLAINED` faulty keys in one round.
    """
    for _ in range(_ROUNDS):
        try:
            return JobConfig.model_validate(data)
        except ValidationError as error:
            errors = error.errors()
            translated = [(_translate(item, data), item["type"] == "missing") for item in errors[:MOST_EXPLAINED]]
            reported = {problem.path for problem in problems}
            # A key that is missing because it was taken out has been reported. Its section is taken out, too.
            problems += [problem for problem, missing in translated if not (missing and problem.path in reported)]
            if len(errors) > MOST_EXPLAINED:
                raise ConfigFileError(_placed(problems, source), more=len(errors) - MOST_EXPLAINED) from None
            data = _without(data, [problem.path[:-1] if missing else problem.path for problem, missing in translated])
    return None


def _nested(path: KeyPath, other: KeyPath) -> bool:
    """Whether one path is the other or lies below it."""
    shorter = min(len(path), len(other))
    return path[:shorter] == other[:shorter]


def _placed(problems: Iterable[Problem], source: Source) -> list[Problem]:
    return [problem.placed(source.place) if source.places else problem for problem in problems]


def _booleans_for_numbers(data: Any) -> Iterator[Problem]:
    """Problems of true and false where a number belongs: pydantic would take them for 1 and 0."""
    for path, value in given_keys(data):
        field = field_at(path)
        leaves = [(path, value)]
        if field is not None and isinstance(value, list) and nested_settings(field) is not None:  # of sections
            sections = [(index, section) for index, section in enumerate(value) if isinstance(section, dict)]
            leaves = [((*path, index, key), leaf) for index, section in sections for key, leaf in section.items()]
        for leaf_path, leaf in leaves:
            field = field_at(leaf_path)
            if field is not None and isinstance(leaf, bool) and not _takes(field.annotation, bool):
                yield Problem(leaf_path, f"expected {_kind(field.annotation)}, got {str(leaf).lower()}")


def _takes(annotation: Any, kind: type) -> bool:
    return annotation in (Any, kind) or any(_takes(option, kind) for option in get_args(annotation))


def _kind(annotation: Any) -> str:
    if _takes(annotation, int):
        return "a whole number"
    return "a number" if _takes(annotation, float) else "another kind of value"


def _without(data: Any, paths: Sequence[KeyPath]) -> Any:
    """A copy of `data` without the keys at `paths`. The path of a list item takes out the whole list."""
    data = copy.deepcopy(data)
    for path in paths:
        section = data
        for depth, part in enumerate(path):
            if not isinstance(section, dict) or part not in section:
                break
            is_last = depth == len(path) - 1
            if is_last or not isinstance(section[part], dict):
                del section[part]
                break
            section = section[part]
    return data


def _translate(error: ErrorDetails, data: Any) -> Problem:
    """Pydantic's error as a problem: key, value, and the valid values."""
    path = _path_in(error["loc"], data, missing=error["type"] == "missing")
    kind = error["type"]
    # Messages are printed and logged: secrets are hidden, by their form and, under a key of the user's, by its name.
    given = redact_forms(error["input"])
    if field_at(path) is None:
        given = redact(given, name=path[-1] if path else "", secret=any(map(is_secret, path)))
    context = error.get("ctx", {})
    if kind == "extra_forbidden":
        return Problem(path, _unknown_key(path), unknown_key=True)
    if kind == "missing":
        return Problem(path, "is missing")
    field = field_at(path)
    registered = registered_name(field) if field is not None else None
    if registered is not None:
        return Problem(path, _bad_choice(given, registered.registry.names, "your own as package.module:name"))
    choices = _literals(field.annotation) if field is not None else []
    if kind == "literal_error" and not choices:  # an item of a list
        return Problem(path, f"{shown(given)} is not possible; choose {context['expected']}")
    if kind == "literal_error" or (choices and isinstance(given, str)):
        takes_number = field is not None and _takes(field.annotation, int)
        return Problem(path, _bad_choice(given, choices, "a whole number" if takes_number else None))
    if kind == "value_error":
        return Problem(path, str(context.get("error", error["msg"])))
    bounds = {"greater_than": "above {gt}", "greater_than_equal": "at least {ge}", "less_than": "below {lt}"}
    bounds["less_than_equal"] = "at most {le}"
    if kind in bounds:
        limit = {name: f"{value:.12g}" for name, value in context.items() if isinstance(value, int | float)}
        unit = unit_of(field.metadata) if field is not None else None
        text = f"is {given}; it must be {bounds[kind].format(**limit)}{f' {unit}' if unit else ''}"
        is_number = isinstance(given, int | float)
        hint = unit_hint(given, field.metadata, field.default) if field is not None and is_number else ""
        return Problem(path, f"{text}{hint}")
    if kind in ("model_type", "model_attributes_type", "dict_type"):
        return Problem(path, f"expected keys and values, got {shown(given)}")
    kinds = {
        "int": "a whole number",
        "float": "a number",
        "bool": "true or false",
        "string": "text (put it in quotes)",
        "finite": "a finite number",
        "tuple": "a list",
        "list": "a list",
    }
    expected = kinds.get(kind.split("_")[0])
    if expected:
        return Problem(path, f"expected {expected}, got {shown(given)}")
    return Problem(path, f"{error['msg'][0].lower()}{error['msg'][1:]}, got {shown(given)}")


def _path_in(location: Sequence[str | int], data: Any, *, missing: bool) -> KeyPath:
    """The keys of `data` that a pydantic location names, without the branches of unions that it also names.

    `missing`: the last key is not in `data`, and belongs to the path.
    """
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
    """The error for an unknown key: the section it belongs to, a similar name, or the list of keys."""
    name, settings = str(path[-1]), settings_at(path[:-1])
    siblings = [*settings.model_fields, *FOREIGN_KEYS.get(settings, ())] if settings is not None else []
    candidates = _candidates(path)
    sections = [dotted(key) for key in candidates if key[-1] == name]
    guess = nearest(name, siblings, _SIMILAR)
    if guess and not sections:
        return f"unknown key; did you mean {guess!r}?"
    if sections:
        return f"unknown key here; it belongs at {_in_role(sections, path)}"
    guess = nearest(name, {str(key[-1]) for key in candidates}, _SIMILAR)
    if guess:
        return f"unknown key; did you mean {_in_role([dotted(key) for key in candidates if key[-1] == guess], path)!r}?"
    return f"unknown key; all keys of this section: docs/configuration.md, {heading_of(path[:-1])!r}"


def _in_role(keys: list[str], path: KeyPath) -> str:
    """The first of `keys` in the role or section of `path`, else the first."""
    return next((key for key in keys if key.split(".")[0] == path[0]), keys[0])


def _candidates(path: KeyPath) -> list[KeyPath]:
    """Keys that an unknown key at `path` may mean: all keys; in a section, the section's and the top-level keys."""
    keys = [*(key.path for key in all_keys()), *foreign_paths()]
    return keys if len(path) == 1 else [key for key in keys if key[0] == path[0] or len(key) == 1]


def _literals(annotation: Any) -> list[str]:
    if get_origin(annotation) is Literal:
        return [choice for choice in get_args(annotation) if isinstance(choice, str)]
    return [choice for option in get_args(annotation) for choice in _literals(option)]


def _bad_choice(given: Any, choices: Sequence[str], other: str | None = None) -> str:
    """The error for a value that is none of `choices`; `other` describes further valid values."""
    if given in FSDP_STRATEGIES:
        return f"{given!r} does not exist here: training runs on Megatron-Core; use megatron_train or megatron_infer"
    if given == "yarn":
        return "'yarn' is refused: YaRN scaling is not supported for now; choose linear or llama3"
    if isinstance(given, str) and given in REFUSED_ESTIMATORS:
        return f"{given!r} is refused: {REFUSED_ESTIMATORS[given]}"
    guess = nearest(str(given), choices)
    hint = f"did you mean {guess!r}? " if guess else ""
    return f"{shown(given)} is not possible; {hint}choose {_one_of([*choices, other] if other else choices)}"


def _one_of(choices: Sequence[str]) -> str:
    return " or ".join([", ".join(choices[:-1]), choices[-1]]) if len(choices) > 1 else choices[0]
