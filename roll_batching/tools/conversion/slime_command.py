"""Reads the command of a slime script as options with their values, as argparse would."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from roll_batching.jobs.config.diagnostics import ConfigFileError, Problem, shortened
from roll_batching.jobs.config.frameworks import PROGRAMS
from roll_batching.secret_names import is_secret
from roll_batching.tools.conversion.composing import Composed
from roll_batching.tools.conversion.foreign_file import Tables
from roll_batching.tools.conversion.shell_script import SECRET, Value, read_script, training_command

SLIME = Tables("slime")
PROGRAM = "program"
"""Key of the program's name among the options."""


def is_program(word: str) -> bool:
    """Whether `word` is slime's training program."""
    return PROGRAMS["slime"].fullmatch(word.strip("\"'")) is not None


def compose_slime(path: Path) -> Composed:
    """The options of the script at `path`. Raises ConfigError."""
    script = read_script(path)
    command, at = training_command(script, is_program, "train.py or train_async.py")
    program = command.words[at].text or command.words[at].raw
    composed = Composed({PROGRAM: program.rpartition("/")[2].strip("\"'")})
    problems = [problem for problem in (_read(*one, composed) for one in _options(command.words[at + 1 :])) if problem]
    if problems:
        raise ConfigFileError(problems)
    for place, why in script.unread_sources:
        composed.failed[(f"source (line {place.line})",)] = why
    return composed


def _options(words: tuple[Value, ...]) -> Iterator[tuple[Value, list[Value]]]:
    """Yields each option of a command line with its values; splits `--name=value` into option and value.

    An argument that cannot be read before the first option, or an array of arguments, is yielded as an option itself.
    """
    option: Value | None = None
    values: list[Value] = []
    for word in words:
        if (word.text or word.raw).startswith("--") and (word.text or "").strip() != "--":
            if option is not None:
                yield option, values
            name, equals, value = (word.text or word.raw).partition("=")
            option = Value(name, word.place, word.raw, conditional=word.conditional)
            values = [Value(value if word.text else None, word.place, why=word.why)] if equals else []
        elif option is None:
            if word.text is None:
                option, values = Value(word.raw.strip("\"'"), word.place, why=word.why), [word]
                yield option, values
                option, values = None, []
        elif word.text is None and word.raw.lstrip('"').startswith("${") and "[" in word.raw:
            yield option, values
            yield Value(word.raw.strip("\"'"), word.place, why=word.why), [word]
            option, values = None, []
        else:
            values.append(word)
    if option is not None:
        yield option, values


def _read(option: Value, values: list[Value], composed: Composed) -> Problem | None:
    """Puts one option into `composed`; returns the problem of its value, None for a valid one."""
    name, place = option.text or "", option.place
    unread = next((value for value in values if value.text is None), None)
    if option.conditional:
        why = "a condition, which is not evaluated, decides whether it is given: set it here if it applies"
        composed.failed[(f"{name} (line {place.line})",)] = why
        return None
    before, first = composed.data.get(name), composed.places.get((name,))
    composed.failed.pop((name,), None)
    composed.places[(name,)] = place
    composed.data[name] = None
    if any(is_secret(name, value.text) for value in values):
        composed.failed[(name,)] = SECRET
    elif unread is not None and not SLIME.is_idle(name):
        composed.failed[(name,)] = f"line {unread.place.line}: {unread.why}"
    else:
        texts = [value.text or "" for value in values]
        try:
            composed.data[name] = _value(name, texts)
        except ValueError as error:
            return Problem((name,), str(error), place)
        if any(value.from_home for value in values):
            composed.outside[(name,)] = "$HOME"
    if first is not None and before != composed.data[name]:
        why = f"is given again on line {place.line}, whose value counts"
        composed.failed.setdefault((f"{name} (line {first.line})",), why)
    return None


def _value(name: str, texts: list[str]) -> Any:
    """The value of an option in its type. Raises ValueError with the fault and its cure."""
    integers, floats, lists = SLIME.of_type("counts", "integers"), SLIME.of_type("floats"), SLIME.of_type("lists")
    if name in SLIME.of_type("flags"):
        if texts:
            raise ValueError(f"takes no value, but {shortened(repr(texts[0]))} follows it: remove one of them")
        return True
    if name in lists or name not in (*integers, *floats, *SLIME.of_type("texts")):
        if name in lists and not texts:
            raise ValueError("has no value: write one behind it")
        return texts[0] if len(texts) == 1 and name not in lists else texts or True
    if not texts:
        raise ValueError("has no value: write one behind it")
    if len(texts) > 1:
        raise ValueError(f"has {len(texts)} values, {shortened(', '.join(map(repr, texts)))}: write one")
    kind: Any = int if name in integers else float if name in floats else str
    try:
        value = kind(texts[0])
    except ValueError:
        value = math.nan
    if isinstance(value, float) and not math.isfinite(value):
        wanted = "a whole number" if kind is int else "a number"
        raise ValueError(f"is {shortened(repr(texts[0]))}: write {wanted}")
    return value
