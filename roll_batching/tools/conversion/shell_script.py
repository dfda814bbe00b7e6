"""The commands of a shell script with their arguments, as far as the script alone tells them. Nothing is run.

It replaces variables and arrays that the script, or a `.sh` file that it sources, assigns by `NAME=value`; takes the
default of `${NAME:-default}`, whatever the environment holds; and computes whole numbers in `$((...))`, HOME and the
script's folder. Every other value has a reason instead of a text. Conditions are not evaluated: an assignment inside
`if`, `case`, a loop or a function, or after `&&`, is marked as conditional.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

from roll_batching.errors import ConfigError
from roll_batching.jobs.config.diagnostics import ConfigFileError, Place, Problem, shortened
from roll_batching.jobs.config.yaml_source import read_text
from roll_batching.secret_names import is_secret
from roll_batching.tools.conversion.shell_words import (
    Arithmetic,
    Part,
    ScriptFolder,
    Statement,
    Text,
    Unread,
    Variable,
    Word,
    statements,
)

SECRET = "looks like a secret, which no file should hold: set it where the job starts"
_LONGEST_VALUE = 1 << 16
_MOST_WORDS = 20_000
_LONGEST_SUM = 500
_LARGEST = 1 << 62
_DEEPEST_SOURCE = 5
_FOLDERS_ABOVE = 4
"""Folders above the script's in which a relative `source` is looked for."""
_OPENING = ("if", "while", "until", "for", "case", "select", "function", "{")
_CLOSING = ("fi", "done", "esac", "}")
_BETWEEN = ("then", "else", "do", "elif", "!", "time")
_DECLARING = ("export", "declare", "local", "readonly", "typeset")
_OPERATORS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    # Bash rounds to zero, `//` down. Above 2**52 a float would lose digits.
    ast.Div: lambda left, right: int(left / right) if abs(left) < 1 << 52 else left // right,
    ast.Mod: operator.mod,
}


@dataclass(frozen=True)
class Value:
    """One argument: its text, or the reason why it has none."""

    text: str | None
    place: Place
    raw: str = ""
    why: str = ""
    """Why there is no text."""
    conditional: bool = False
    """Whether the argument is only given under a condition."""
    from_home: bool = False
    """Whether the text contains the home directory of the current user."""


@dataclass(frozen=True)
class Command:
    """A command with its arguments."""

    words: tuple[Value, ...]
    place: Place


@dataclass
class Script:
    """The commands of a script."""

    path: Path
    commands: list[Command] = field(default_factory=list)
    unread_sources: list[tuple[Place, str]] = field(default_factory=list)
    """`source` statements that were not followed, with the reason."""


def read_script(path: Path) -> Script:
    """Reads the script at `path`. Raises ConfigFileError for a file that is no readable script."""
    script = Script(path)
    _Interpreter(script).read(path, ())
    return script


def training_command(script: Script, is_program: Callable[[str], bool], what: str) -> tuple[Command, int]:
    """(Command of `script` that trains, position of the program in it). Raises ConfigError unless there is just one.

    `what`: the program, for messages.
    """
    matches = []
    for command in script.commands:
        position = next((at for at, word in enumerate(command.words) if is_program(word.text or word.raw)), None)
        if position is not None:
            matches.append((command, position))
    if not matches:
        raise ConfigError(f"{script.path} has no command that starts {what}: give a script with one")
    if len(matches) > 1:
        lines = ", ".join(str(command.place.line) for command, _ in matches)
        raise ConfigFileError(
            [Problem((), f"{len(matches)} commands start {what} (lines {lines}): keep one", matches[1][0].place)]
        )
    return matches[0]


class _Interpreter:
    def __init__(self, script: Script) -> None:
        self.script = script
        self.variables: dict[str, tuple[Value, ...]] = {}
        self.length = 0

    def read(self, path: Path, above: tuple[Path, ...]) -> None:
        """Reads the file at `path`. `above`: the files that source it; of a sourced file, only assignments count."""
        depth = 0
        for statement in statements(read_text(path), str(path)):
            words = list(statement.words)
            while words and words[0].raw in (*_BETWEEN, *_OPENING, *_CLOSING):
                keyword = words.pop(0).raw
                depth = max(0, depth + (keyword in _OPENING) - (keyword in _CLOSING))
                if keyword in ("for", "select") and words:
                    self.variables[words[0].raw] = (_unread(words[0], "is the variable of a loop"),)
                if keyword in ("for", "select", "case", "function"):
                    words = []
            if words:
                self._statement(Statement(tuple(words), statement.after), depth > 0, path, above)

    def _statement(self, statement: Statement, conditional: bool, path: Path, above: tuple[Path, ...]) -> None:
        words = statement.words
        conditional = conditional or statement.after in ("&&", "||")
        if words[0].raw in _DECLARING:
            words = tuple(word for word in words[1:] if word.name)
        if all(word.name for word in words):
            for word in words:
                self._assign(word, conditional, path)
        elif words[0].raw in ("source", ".") and len(words) > 1:
            self._source(words[1], path, above)
        elif not above:
            arguments = tuple(self._expand_all((word for word in words), path))
            self.script.commands.append(Command(arguments, words[0].place))

    def _assign(self, word: Word, conditional: bool, path: Path) -> None:
        """Stores the value of an assignment. Under a condition a variable gets a reason, and an array marked items."""
        before = self.variables.get(word.name, ())
        if word.items is None:
            value = self._join(word, path)
            if word.appends and before:
                text = None if value.text is None or before[-1].text is None else before[-1].text + value.text
                value = replace(value, text=text, why=value.why or before[-1].why)
            if conditional:
                value = _unread(word, f"gets a value under a condition on line {word.place.line}")
            self.variables[word.name] = (value,)
            return
        items = tuple(self._expand_all(word.items, path))
        if conditional:
            items = tuple(replace(item, conditional=True, place=word.place) for item in items)
        self.variables[word.name] = (*before, *items) if word.appends or conditional else items
        self._limit(len(self.variables[word.name]), word)

    def _limit(self, words: int, word: Word) -> None:
        """Raises ConfigFileError if `word` expands to too many words, or the script as a whole does."""
        self.length += words
        if words > _MOST_WORDS or self.length > 50 * _MOST_WORDS:
            raise ConfigFileError([Problem((), f"expands to more than {_MOST_WORDS:,} words: write fewer", word.place)])

    def _source(self, word: Word, path: Path, above: tuple[Path, ...]) -> None:
        """Reads the file that `source` names, or records why it is not read."""
        value = self._join(word, path)
        why = value.why
        if value.text is not None:
            name = Path(value.text)
            folders = (path.resolve().parent, *path.resolve().parents[1 : 1 + _FOLDERS_ABOVE])
            sourced = next((folder / name for folder in folders if (folder / name).is_file()), None)
            if name.suffix != ".sh":
                why = f"{shortened(str(name))} is not read: only files that end in .sh are"
            elif sourced is None:
                why = f"{shortened(str(name))} is not there: what it assigns is missing"
            elif sourced.resolve() in (*above, path.resolve()) or len(above) >= _DEEPEST_SOURCE:
                why = f"{shortened(str(name))} is sourced by itself"
            else:
                self.read(sourced, (*above, path.resolve()))
                return
        self.script.unread_sources.append((word.place, why))

    def _expand_all(self, words: Iterable[Word], path: Path) -> list[Value]:
        values: list[Value] = []
        for word in words:
            values += self._expand(word, path)
            self._limit(len(values), word)
        return values

    def _expand(self, word: Word, path: Path) -> list[Value]:
        """The arguments that bash makes of a word: none, one, or several (arrays, unquoted variables with spaces)."""
        only = word.parts[0] if len(word.parts) == 1 and not word.name else None
        if isinstance(only, Variable) and only.name in ("@", "*"):
            return []  # arguments of the script itself
        if isinstance(only, Variable) and only.is_array and not only.default and only.name not in self.variables:
            if not self.script.unread_sources:
                return []  # the environment holds no arrays
        if isinstance(only, Variable) and only.name in self.variables and not is_secret(only.name):
            values = self.variables[only.name]
            if only.quoted or any(value.text is None for value in values):  # without a text nothing can be divided
                return [replace(value, raw=value.raw or word.raw) for value in values]
            return [_part_of(value, text) for value in values for text in (value.text or "").split()]
        value = self._join(word, path)
        if isinstance(only, Variable) and not only.quoted and value.text is not None:
            return [_part_of(value, text) for text in value.text.split()]
        return [replace(value, text=f"{word.name}={value.text}") if word.name and value.text is not None else value]

    def _join(self, word: Word, path: Path) -> Value:
        text, why, home = self._text(word.parts, path)
        if text is not None and len(text) > _LONGEST_VALUE:
            raise ConfigFileError([Problem((), f"a value has more than {_LONGEST_VALUE:,} characters", word.place)])
        return Value(text, word.place, word.raw, why, from_home=home)

    def _text(self, parts: tuple[Part, ...], path: Path) -> tuple[str | None, str, bool]:
        """(text, why there is none, whether it contains the home directory) of joined parts."""
        texts: list[str] = []
        from_home = False
        for part in parts:
            home = False
            text: str | None
            if isinstance(part, Text):
                text, why = part.text, ""
            elif isinstance(part, Unread):
                text, why = None, part.why
            elif isinstance(part, ScriptFolder):
                text, why = f"{path.resolve().parent}{part.above}", ""
            elif isinstance(part, Arithmetic):
                text, why, home = self._text(part.expression, path)
                text, why = (None, why) if text is None else self._sum(text)
            else:
                text, why, home = self._variable(part, path)
            if text is None:
                return None, why, False
            texts.append(text)
            from_home = from_home or home
        return "".join(texts), "", from_home

    def _variable(self, part: Variable, path: Path) -> tuple[str | None, str, bool]:
        """(Text, why there is none, whether it contains the home directory) of a variable."""
        if is_secret(part.name):
            return None, f"{part.name} {SECRET}", False
        if part.name.isdigit() and part.name != "0" and part.default is None:
            return None, f"${part.name} is an argument of the script", False
        values = self.variables.get(part.name)
        if values is not None and (len(values) != 1 or values[0].text or part.default is None):
            unread = next((value for value in values if value.text is None), None)
            if unread is not None:
                why = unread.why if unread.why.startswith(f"{part.name} ") else f"{part.name} {unread.why}"
                return None, why, False
            if any(value.conditional for value in values):
                return None, f"{part.name} gets a value under a condition on line {values[-1].place.line}", False
            return " ".join(value.text or "" for value in values), "", any(value.from_home for value in values)
        if part.default is not None:
            return self._text(part.default, path)
        if part.name == "HOME":
            return str(Path.home()), "", True
        if part.name in ("@", "*"):
            return "", "", False
        return None, f"{part.name} has no value in this file", False

    def _sum(self, expression: str) -> tuple[str | None, str]:
        """The value of a whole-number expression, or why there is none."""
        why = f"`$(({shortened(expression.strip(), 40)}))` cannot be computed from this file"
        if len(expression) > _LONGEST_SUM:
            return None, why
        try:
            return str(self._number(ast.parse(expression.strip(), mode="eval").body)), ""
        except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError, OverflowError):
            return None, why

    def _number(self, node: ast.expr) -> int:
        """The value of `node`. Raises ValueError for anything but whole numbers and the operators of `_OPERATORS`."""
        if isinstance(node, ast.Constant) and type(node.value) is int:
            result = node.value
        elif isinstance(node, ast.Name):
            values = self.variables.get(node.id) or ()
            # int("") raises the ValueError that `_sum` turns into a reason.
            result = int(values[0].text or "") if len(values) == 1 and not is_secret(node.id) else int("")
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            result = -self._number(node.operand)
        elif isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
            result = _OPERATORS[type(node.op)](self._number(node.left), self._number(node.right))
        else:
            raise ValueError
        if abs(result) > _LARGEST:
            raise ValueError
        return result


def _part_of(value: Value, text: str) -> Value:
    """A copy of `value` with `text`, one of the words into which the shell divides it."""
    return replace(value, text=text, from_home=value.from_home and str(Path.home()) in text)


def _unread(word: Word, why: str) -> Value:
    return Value(None, word.place, word.raw, f"{word.name or word.raw} {why}")
