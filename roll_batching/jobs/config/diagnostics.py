"""Problems and notices of a configuration, with key, file and line."""

from __future__ import annotations

import difflib
import enum
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from roll_batching.errors import ConfigError

KeyPath = tuple[str | int, ...]
"""Path of a value: keys and list positions from the top level."""


@dataclass(frozen=True)
class Place:
    """A file and line, or an override of the command line."""

    name: str
    line: int | None = None

    def __str__(self) -> str:
        return self.name if self.line is None else f"{self.name}:{self.line}"


LONGEST_MESSAGE = 600
MOST_SHOWN = 50
"""Problems that one message prints. It counts the others."""


def shortened(text: str, limit: int = 100) -> str:
    """`text` cut to `limit` characters, unprintable ones escaped."""
    text = text if len(text) <= limit else f"{text[: limit - 3]}..."
    return text if text.isprintable() else repr(text)[1:-1]


def dotted(path: Sequence[str | int]) -> str:
    """`("actor_train", "device_mapping", 0)` as `actor_train.device_mapping.0`."""
    return ".".join(shortened(str(part)) or "''" for part in path)


@dataclass(frozen=True)
class Problem:
    """One error of a configuration: the key, what is wrong and what to set instead, and the place."""

    path: KeyPath
    message: str
    place: Place | None = None
    unknown_key: bool = False
    """The schema has no such key."""

    def placed(self, place_of: Callable[[KeyPath], Place]) -> Problem:
        """The same problem with the place of its key."""
        return replace(self, place=place_of(self.path))

    def __str__(self) -> str:
        place_text = "" if self.place is None else f"{self.place}: "
        key = f"{dotted(self.path)}: " if self.path else ""
        return f"{place_text}{key}{shortened(self.message, LONGEST_MESSAGE)}"


class NoticeKind(enum.Enum):
    """The kind of a notice."""

    NO_EFFECT = "no effect"
    """The job does not read the key. As an override on the command line it is an error."""
    NOT_BUILT = "not built"
    """Nothing reads the role that the key describes."""
    OTHER_EFFECT = "other effect"
    """The job reads the key, with a consequence worth knowing."""


@dataclass(frozen=True)
class Notice:
    """A message on a key that is accepted but has no effect, or another effect than in other frameworks."""

    key: KeyPath
    text: str
    place: Place | None = None
    kind: NoticeKind = NoticeKind.OTHER_EFFECT

    @property
    def path(self) -> str:
        """The key, dotted."""
        return dotted(self.key)

    @property
    def line(self) -> int | None:
        """Line of the key in its file; None for overrides and for settings made in Python."""
        return self.place.line if self.place else None

    def __str__(self) -> str:
        place_text = "" if self.place is None else f" ({self.place})"
        return f"{self.path}{place_text}: {self.text}"


def no_effect(key: KeyPath, reason: str) -> Notice:
    """The notice of a key that the job does not read."""
    return Notice(key, f"has no effect: {reason}", kind=NoticeKind.NO_EFFECT)


class ConfigFileError(ConfigError):
    """All problems of one configuration, in the order of their lines; `more`: the number of further problems."""

    def __init__(self, problems: Iterable[Problem], more: int = 0) -> None:
        self.more = more
        # Problems without a place come first, overrides (which have no line) after all lines of the file.
        self.problems = tuple(sorted(problems, key=lambda item: (item.place.line or 10**9) if item.place else 0))
        count = len(self.problems) + more
        head = "the configuration has a problem" if count == 1 else f"the configuration has {count:,} problems"
        lines = [str(problem) for problem in self.problems[:MOST_SHOWN]]
        if count > len(lines):
            lines.append(f"and {count - len(lines):,} more")
        super().__init__("\n  ".join([f"{head}:", *lines]))


def nearest(word: str, choices: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The choice most similar to `word`, or None if no choice has difflib's ratio `cutoff` or contains `word`."""
    choices = list(choices)
    exact = [choice for choice in choices if choice.lower() == word.lower()]
    matches = exact or difflib.get_close_matches(word, choices, n=1, cutoff=cutoff)
    if not matches:
        # An abbreviation has a low ratio with the full name, which contains it.
        matches = [choice for choice in choices if len(word) > 3 and word in choice]
    return matches[0] if matches else None
