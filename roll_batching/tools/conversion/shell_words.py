"""Splits a bash script into statements and words, without running anything.

It reads quotes, `$NAME`, `${NAME:-default}`, `$((...))`, arrays, comments, continued lines and redirections. What only
a shell could compute, such as `$(...)`, becomes an `Unread` part with the reason.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from roll_batching.jobs.config.diagnostics import ConfigFileError, Place, Problem

_DEEPEST = 20
"""Deepest nesting of quotes and expansions."""
_SPACE = " \t\r"
_ENDS = _SPACE + "\n;&|<>()"
_ASSIGNED = re.compile(r"([A-Za-z_]\w*)(\+?=)")
_EXPANSION = re.compile(r"(!?[A-Za-z_]\w*|[0-9]+|[@*#?$!-])(\[[@*]\])?(:?[-=])?")
_FOLDER = re.compile(
    r"\s*cd\s+(?:--\s+)?\"?\$\(\s*dirname\s+(?:--\s+)?\"?\$(?:\{BASH_SOURCE(?:\[0\])?\}|BASH_SOURCE|0)\"?\s*\)"
    r"((?:/\.\.)*)/?\"?\s*(?:(?:&>|>)\s*/dev/null)?\s*(?:2>&1)?\s*&&\s*pwd\s*(?:-P\s*)?"
)
"""Matches the usual command for the folder of the script; its group holds the `/..` that follow."""


@dataclass(frozen=True)
class Text:
    """Literal text."""

    text: str


@dataclass(frozen=True)
class Variable:
    """`$NAME`, `${NAME[@]}` or `${NAME:-default}`."""

    name: str
    quoted: bool
    default: tuple[Part, ...] | None = None
    is_array: bool = False


@dataclass(frozen=True)
class Arithmetic:
    """`$((expression))`."""

    expression: tuple[Part, ...]


@dataclass(frozen=True)
class ScriptFolder:
    """The folder of the script, followed by `above`, such as `/..`."""

    above: str


@dataclass(frozen=True)
class Unread:
    """An expansion that only a shell can compute."""

    why: str


Part = Text | Variable | Arithmetic | ScriptFolder | Unread


@dataclass(frozen=True)
class Word:
    """One word of a statement. An assignment has a `name`; the assignment of an array also has `items`."""

    parts: tuple[Part, ...]
    place: Place
    raw: str
    name: str = ""
    appends: bool = False
    items: tuple[Word, ...] | None = None


@dataclass(frozen=True)
class Statement:
    """Words between separators, and the operator before them."""

    words: tuple[Word, ...]
    after: str = ""


def statements(text: str, name: str) -> list[Statement]:
    """The statements of a script; `name` is the file's name in messages. Raises ConfigFileError."""
    if "\0" in text:
        raise ConfigFileError([Problem((), "holds binary data: give a shell script", Place(name))])
    return _Reader(text, name, 1).statements()


class _Reader:
    """A position in the text of a script."""

    def __init__(self, text: str, name: str, line: int, depth: int = 0) -> None:
        self.text, self.name, self.line, self.at, self.depth = text, name, line, 0, depth
        if depth > _DEEPEST:
            raise self.fault(line, f"has more than {_DEEPEST} expansions inside each other")

    def fault(self, line: int, message: str) -> ConfigFileError:
        return ConfigFileError([Problem((), message, Place(self.name, line))])

    def peek(self, length: int = 1) -> str:
        return self.text[self.at : self.at + length]

    def step(self, length: int = 1) -> str:
        """Moves behind the next `length` characters and returns them."""
        passed = self.peek(length)
        self.line += passed.count("\n")
        self.at += length
        return passed

    def statements(self) -> list[Statement]:
        """Reads the rest of the text as statements."""
        complete: list[Statement] = []
        words: list[Word] = []
        heredocs: list[str] = []
        after = ""
        while self.at < len(self.text):
            char = self.peek()
            if self.peek(2) == "\\\n":
                self.step(2)
            elif self.peek(3) == "\\\r\n":
                self.step(3)
            elif char in _SPACE:
                self.step()
            elif char == "#":
                self._pass_line()
            elif char in "<>" or self.peek(2) == "&>":
                heredocs += self._redirection()
            elif char in "\n;&|()":
                if words:
                    complete.append(Statement(tuple(words), after))
                    words = []
                after = self.peek(2) if self.peek(2) in ("&&", "||") else char
                self.step(len(after))
                if char == "\n":
                    self._pass_heredocs(heredocs)
            else:
                word = self.word()
                if not (word.raw.isdigit() and self.peek() in ("<", ">")):  # else a descriptor, as in 2>&1
                    words.append(word)
        return [*complete, Statement(tuple(words), after)] if words else complete

    def _pass_line(self) -> None:
        end = self.text.find("\n", self.at)
        self.at = len(self.text) if end < 0 else end

    def _redirection(self) -> list[str]:
        """Passes a redirection; returns the delimiter of a here-document."""
        operator = self.step(2 if self.peek() == "&" else 1)
        while self.peek() and self.peek() in "<>&|":
            operator += self.step()
        document = operator == "<<"
        if document and self.peek() == "-":
            self.step()
        while self.peek() and self.peek() in _SPACE:
            self.step()
        if not self.peek() or self.peek() in "\n;|&()":
            return []
        word = self.word()
        return [re.sub(r"[\"'\\]", "", word.raw)] if document else []

    def _pass_heredocs(self, delimiters: list[str]) -> None:
        """Moves behind the here-documents that end at `delimiters`, and empties the list."""
        for delimiter in delimiters:
            first = self.line - 1
            while True:
                if self.at >= len(self.text):
                    raise self.fault(
                        first, f"begins a here-document (<<) that no line `{delimiter}` ends: add that line"
                    )
                begin = self.at
                self._pass_line()
                line = self.text[begin : self.at]
                self.step()
                if line.strip() == delimiter:
                    break
        delimiters.clear()

    def word(self) -> Word:
        """The word that begins here, with the array that it assigns."""
        begin, place = self.at, Place(self.name, self.line)
        assigned = _ASSIGNED.match(self.text, self.at)
        if assigned is None:
            parts = self.parts(_ENDS)
            return Word(parts, place, self.text[begin : self.at])
        self.step(len(assigned[0]))
        name, appends = assigned[1], assigned[2] == "+="
        if self.peek() == "(":
            return Word((), place, assigned[0], name, appends, self._items())
        parts = self.parts(_ENDS)
        return Word(parts, place, self.text[begin : self.at], name, appends)

    def _items(self) -> tuple[Word, ...]:
        """Reads the items of an array from its `(` to behind its `)`."""
        first = self.line
        self.step()
        items: list[Word] = []
        while True:
            char = self.peek()
            if not char:
                raise self.fault(first, "begins an array with `(` that is never closed: add `)`")
            if char == ")":
                self.step()
                return tuple(items)
            if char in _SPACE or char == "\n":
                self.step()
            elif self.peek(2) == "\\\n":
                self.step(2)
            elif char == "#":
                self._pass_line()
            elif char in ";&|<>(":
                raise self.fault(self.line, f"has `{char}` in an array: quote it")
            else:
                begin, place = self.at, Place(self.name, self.line)
                items.append(Word(self.parts(_ENDS), place, self.text[begin : self.at]))

    def parts(self, ends: str, quoted: bool = False) -> tuple[Part, ...]:
        """Reads parts up to the first of the characters `ends`, and stops before it."""
        parts: list[Part] = []
        while self.at < len(self.text) and self.peek() not in ends:
            char = self.peek()
            if char == "\\":
                parts.append(Text(self._escaped(quoted)))
            elif self.peek(2) == "~/" and not quoted and not parts:
                self.step()
                parts.append(Variable("HOME", quoted=True))
            elif char == "'" and not quoted:
                parts.append(Text(self._until("'")))
            elif char == '"':
                parts += self._double()
            elif char == "$":
                parts.append(self._dollar(quoted))
            elif char == "`":
                self._until("`")
                parts.append(Unread("runs a command in backticks"))
            else:
                parts.append(Text(self.step()))
        merged: list[Part] = []  # neighbouring texts become one
        for part in parts:
            if isinstance(part, Text) and merged and isinstance(last := merged[-1], Text):
                merged[-1] = Text(last.text + part.text)
            else:
                merged.append(part)
        return tuple(merged)

    def _escaped(self, quoted: bool) -> str:
        """Reads a backslash and the character that it protects; returns the text that bash makes of them."""
        self.step()
        if quoted and self.peek() not in ('"', "\\", "$", "`", "\n"):
            return "\\"  # in double quotes, it protects only these characters
        following = self.step()
        return "" if following == "\n" else following

    def _until(self, mark: str) -> str:
        """Reads from one `mark` to behind the next; returns the text between them."""
        first = self.line
        self.step()
        end = self.text.find(mark, self.at)
        if end < 0:
            raise self.fault(first, f"opens a quote {mark} that is never closed")
        inside = self.step(end - self.at)
        self.step()
        return inside

    def _double(self) -> list[Part]:
        """Reads a text in double quotes."""
        first = self.line
        self.step()
        parts = list(self.parts('"', quoted=True))
        if not self.peek():
            raise self.fault(first, 'opens a quote " that is never closed')
        self.step()
        return parts or [Text("")]

    def _dollar(self, quoted: bool) -> Part:
        """Reads the expansion that begins at `$`, or the sign alone."""
        first = self.line
        if self.peek(3) == "$((":
            inside = self._balanced("(", ")")
            if inside.startswith("(") and inside.endswith(")"):
                return Arithmetic(_Reader(inside[1:-1], self.name, first, self.depth + 1).parts("", quoted=True))
            return Unread("runs a command, `$(...)`")
        if self.peek(2) == "$(":
            folder = _FOLDER.fullmatch(self._balanced("(", ")"))
            return ScriptFolder(folder[1]) if folder else Unread("runs a command, `$(...)`")
        if self.peek(2) == "${":
            return self._braces(self._balanced("{", "}"), quoted, first)
        name = re.compile(r"[A-Za-z_]\w*|[0-9@*#?$!-]").match(self.text, self.at + 1)
        if name is None:
            return Text(self.step())
        self.step(1 + len(name[0]))
        return Variable(name[0], quoted)

    def _braces(self, inside: str, quoted: bool, line: int) -> Part:
        """Converts the text between `${` and `}`: a name, perhaps `[@]` of an array, perhaps a default."""
        expansion = _EXPANSION.match(inside)
        rest = "" if expansion is None else inside[expansion.end() :]
        if expansion is None or expansion[1].startswith("!") or (rest and not expansion[3]):
            name = re.match(r"\W?(\w*)", inside)
            return Unread(f"changes the value of {name[1] if name else ''} with `${{...}}`")
        default = None
        if expansion[3]:
            default = _Reader(rest, self.name, line, self.depth + 1).parts("", quoted)
        return Variable(expansion[1], quoted, default, is_array=expansion[2] is not None)

    def _balanced(self, opening: str, closing: str) -> str:
        """Reads from `$(` or `${` to behind the sign that closes it; returns the text between them."""
        first = self.line
        self.step(2)
        begin, depth = self.at, 1
        while self.at < len(self.text):
            char = self.peek()
            if char == "\\":
                self.step(2)
                continue
            if char == "'" and opening == "(":
                self._until("'")
                continue
            if char == '"':
                self.depth += 1
                if self.depth > _DEEPEST:
                    raise self.fault(first, f"has more than {_DEEPEST} expansions inside each other")
                self._double()
                self.depth -= 1
                continue
            depth += (char == opening) - (char == closing)
            if depth == 0:
                inside = self.text[begin : self.at]
                self.step()
                return inside
            self.step()
        raise self.fault(first, f"opens `${opening}` that is never closed: add `{closing}`")
