"""What the loader reports: problems (errors), notices, and the places they speak of."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from roll_batching.errors import ConfigError

KeyPath = tuple[str | int, ...]
"""Where a value stands: the keys and list positions that lead to it."""


@dataclass(frozen=True)
class Place:
    """Where a value was written: a file and its line, or an override of the command line."""

    name: str
    line: int | None = None

    def __str__(self) -> str:
        return self.name if self.line is None else f"{self.name}:{self.line}"


LONGEST_MESSAGE = 600
MOST_SHOWN = 50
"""Problems that one message prints; the rest are counted."""


def shortened(text: str, limit: int = 100) -> str:
    """`text`, cut where it is long; unprintable characters are escaped."""
    text = text if len(text) <= limit else f"{text[: limit - 3]}..."
    return text if text.isprintable() else repr(text)[1:-1]


def dotted(path: Sequence[str | int]) -> str:
    """`("actor_train", "device_mapping", 0)` as `actor_train.device_mapping.0`."""
    return ".".join(shortened(str(part)) or "''" for part in path)


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong: the key's path, what is wrong with it and what to do, and its place."""

    path: tuple[str | int, ...]
    message: str
    place: Place | None = None

    def placed(self, place: Callable[[tuple[str | int, ...]], Place]) -> Problem:
        """The same problem with the place that `place` gives for its path."""
        return Problem(self.path, self.message, place(self.path))

    def __str__(self) -> str:
        where = "" if self.place is None else f"{self.place}: "
        key = f"{dotted(self.path)}: " if self.path else ""
        return f"{where}{key}{shortened(self.message, LONGEST_MESSAGE)}"


NO_EFFECT = "has no effect: "
"""How the notice of a key begins that does nothing."""


@dataclass(frozen=True)
class Notice:
    """A key that is accepted but does something else here than its reader may expect."""

    path: str
    text: str
    place: Place | None = None

    @property
    def line(self) -> int | None:
        """Line of the key in its file; None for overrides and for settings made in Python."""
        return self.place.line if self.place else None

    def __str__(self) -> str:
        where = "" if self.place is None else f" ({self.place})"
        return f"{self.path}{where}: {self.text}"


class ConfigFileError(ConfigError):
    """All problems of one configuration, in the order of their lines; `more` were counted and not looked at."""

    def __init__(self, problems: Iterable[Problem], more: int = 0) -> None:
        self.more = more
        self.problems = tuple(sorted(problems, key=lambda item: (item.place.line or 10**9) if item.place else 0))
        count = len(self.problems) + more
        head = "the configuration has a problem" if count == 1 else f"the configuration has {count:,} problems"
        shown = [str(problem) for problem in self.problems[:MOST_SHOWN]]
        if count > len(shown):
            shown.append(f"and {count - len(shown):,} more")
        super().__init__("\n  ".join([f"{head}:", *shown]))


def nearest(word: str, choices: Iterable[str], alike: float = 0.6) -> str | None:
    """The choice most like `word`, or None when nothing is close: `alike` is difflib's ratio."""
    known = list(choices)
    exact = [choice for choice in known if choice.lower() == word.lower()]
    found = exact or difflib.get_close_matches(word, known, n=1, cutoff=alike)
    if not found:
        # A shortened name ("tp" apart) shares its beginning rather than most of its letters.
        found = [choice for choice in known if len(word) > 3 and (choice.startswith(word) or word in choice)]
    return found[0] if found else None
