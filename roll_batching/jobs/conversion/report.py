"""What became of a converted file's keys: kept, kept with another meaning, left out."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import yaml

Kind = Literal["idle", "refused", "unknown"]
"""Why a key is left out: it would change nothing here; it asks for what is not done here; nothing here has its name."""


@dataclass(frozen=True)
class Moved:
    """A key that is kept."""

    key: str
    to: str
    """The key that it has here."""
    meaning: str = ""
    """What is different here; empty where nothing is."""


@dataclass(frozen=True)
class LeftOut:
    """A key that is not in the converted file."""

    key: str
    why: str
    kind: Kind


@dataclass
class Conversion:
    """A converted file: our settings and what became of every key."""

    source: str
    settings: dict[str, Any]
    framework: str = ""
    """Name of the framework that the file is for."""
    kept: list[Moved] = field(default_factory=list)
    changed: list[Moved] = field(default_factory=list)
    defaults: list[Moved] = field(default_factory=list)
    """Keys that the file leaves out: the framework's defaults, where they differ from ours."""
    left_out: list[LeftOut] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    """What a run needs and the file does not say."""

    def left_out_as(self, *kinds: Kind) -> list[LeftOut]:
        """The keys that are left out for one of these reasons."""
        return [one for one in self.left_out if one.kind in kinds]

    def to_yaml(self) -> str:
        """The settings as YAML, below the three lists as comments."""
        return "".join(f"# {line}\n" if line else "#\n" for line in self._comments()) + yaml.safe_dump(
            self.settings, sort_keys=False, allow_unicode=True, width=110
        )

    def to_json(self) -> str:
        """The three lists and what is missing, as JSON."""
        lists = {
            "source": self.source,
            "kept": [asdict(one) for one in self.kept],
            "kept_with_another_meaning": [asdict(one) for one in self.changed],
            "defaults_of_the_framework": [asdict(one) for one in self.defaults],
            "left_out": [asdict(one) for one in self.left_out],
            "missing": self.missing,
        }
        return json.dumps(lists, indent=1, ensure_ascii=False) + "\n"

    def _comments(self) -> Iterator[str]:
        yield f"Converted from {self.source} by roll-batching convert-config."
        yield "A key that no list names has its default here, which docs/configuration.md says."
        for title, lines in (
            ("To be filled in before a run:", self.missing),
            ("Left out, although it matters:", self._shown("refused")),
            ("Left out, because nothing here has such a setting:", self._shown("unknown")),
            ("Left out, because it would change nothing here:", self._shown("idle")),
            (f"{self.framework}'s defaults, which the file leaves unsaid:", [_explained(one) for one in self.defaults]),
            ("Kept with another meaning:", [_explained(one) for one in self.changed]),
            ("Kept:", [_names(one) for one in self.kept]),
        ):
            if lines:
                yield ""
                yield title
                yield from (f"  {' '.join(line.split())}" for line in lines)

    def _shown(self, kind: Kind) -> list[str]:
        return [f"{one.key}: {one.why}" for one in self.left_out_as(kind)]


def _explained(one: Moved) -> str:
    return f"{_names(one)}: {one.meaning}" if one.meaning else _names(one)


def _names(one: Moved) -> str:
    return one.key if one.key == one.to else f"{one.key} -> {one.to}"
