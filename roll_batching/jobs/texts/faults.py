"""Faults of data files, collected in bounded memory and reported together."""

from __future__ import annotations

from dataclasses import dataclass, field

from roll_batching.errors import DataError

_SHOWN = 4
"""Number of places that the message lists for one kind of fault in one file."""
_SHOWN_CHARACTERS = 40


class Fault(Exception):
    """A fault of a file, a line or an image, and its cure."""

    def __init__(self, what: str, cure: str) -> None:
        super().__init__(what)
        self.what, self.cure = what, cure


@dataclass
class _Kind:
    """Faults of one file with the same cure."""

    shown: list[str] = field(default_factory=list)
    count: int = 0
    longest: int = 0
    characters: set[str] = field(default_factory=set)


class Faults:
    """Faults by file and cure: the first few of each kind are listed, the others counted."""

    def __init__(self) -> None:
        self._kinds: dict[tuple[str, str], _Kind] = {}

    def __len__(self) -> int:
        return sum(kind.count for kind in self._kinds.values())

    def add(
        self, source: str, what: str, cure: str, *, tokens: int = 0, characters: frozenset[str] = frozenset()
    ) -> None:
        """Adds the fault `what` at `source`, which is `file` or `file:line`.

        `tokens` is the length of a text that is too long, `characters` are unknown to the tokenizer: the message names
        the greatest length and all characters.
        """
        file, colon, line = source.rpartition(":")
        of_line = bool(colon) and line.isdigit()
        kind = self._kinds.setdefault((file if of_line else source, cure), _Kind())
        kind.count += 1
        kind.longest = max(kind.longest, tokens)
        kind.characters |= characters
        if len(kind.shown) < _SHOWN:
            kind.shown.append(f"{source}: {what}" if of_line else f"{source} {what}")

    def merge(self, other: Faults) -> None:
        """Add the faults of `other`."""
        for key, kind in other._kinds.items():
            merged = self._kinds.setdefault(key, _Kind())
            merged.shown += kind.shown[: _SHOWN - len(merged.shown)]
            merged.count += kind.count
            merged.longest = max(merged.longest, kind.longest)
            merged.characters |= kind.characters

    def check(self) -> None:
        """Raises DataError with all faults, if there are any."""
        if self._kinds:
            raise DataError(str(self))

    def __str__(self) -> str:
        if len(self) == 1:
            (((_, cure), kind),) = self._kinds.items()
            return f"{kind.shown[0]}. {cure}"
        kinds = "\n".join(_describe(cure, kind) for (_, cure), kind in self._kinds.items())
        return f"the data files have {len(self):,} faults:\n{kinds}"


def _describe(cure: str, kind: _Kind) -> str:
    lines = [f"  {shown}" for shown in kind.shown]
    if kind.count > len(kind.shown):
        lines.append(f"  and {kind.count - len(kind.shown):,} more of this kind in the same file")
    if kind.longest:
        cure = f"The longest has {kind.longest:,} tokens. {cure}"
    if len(kind.characters) > 1:
        characters = sorted(kind.characters)[:_SHOWN_CHARACTERS]
        num_hidden = len(kind.characters) - len(characters)
        others = f" and {num_hidden} more" if num_hidden else ""
        cure = f"The characters are {', '.join(map(ascii, characters))}{others}. {cure}"
    return "\n".join([*lines, f"    {cure}"])
