"""Report of a conversion: keys that are kept, kept with another meaning, or left out."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import yaml

_COMMAND = "roll-batching convert-config"
_DIGEST = "# Digest of the lines below, which tells whether they were edited: "
Kind = Literal["idle", "refused", "unknown"]
"""Why a key is left out: no effect here (idle), not supported (refused), or no such setting (unknown)."""


@dataclass(frozen=True)
class KeptKey:
    """A key that is kept."""

    key: str
    to: str
    """Its key in our file."""
    meaning: str = ""
    """The difference in meaning; empty without one."""


@dataclass(frozen=True)
class LeftOut:
    """A key that is not converted."""

    key: str
    why: str
    kind: Kind


@dataclass
class Conversion:
    """A converted file: settings, and the fate of every key of the original."""

    source: str
    settings: dict[str, Any]
    framework: str = ""
    """Name of the framework that the file is for."""
    kept: list[KeptKey] = field(default_factory=list)
    changed: list[KeptKey] = field(default_factory=list)
    defaults: list[KeptKey] = field(default_factory=list)
    """Defaults of the framework that differ from ours, for keys that the file leaves out."""
    left_out: list[LeftOut] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    """Keys that a run needs and the file lacks, as `key: what`."""

    def left_out_as(self, *kinds: Kind) -> list[LeftOut]:
        """The keys left out for one of these reasons."""
        return [one for one in self.left_out if one.kind in kinds]

    def to_yaml(self) -> str:
        """The settings as YAML, below comments with the lists of keys."""
        comments = "".join(f"# {line}\n" if line else "#\n" for line in self._comments())
        text = comments + yaml.safe_dump(self.settings, sort_keys=False, allow_unicode=True, width=110)
        return f"# Converted from {' '.join(self.source.split())} by {_COMMAND}.\n{_DIGEST}{_digest(text)}\n{text}"

    def to_json(self) -> str:
        """The lists of keys as JSON."""
        lists = {
            "written_by": _COMMAND,
            "source": self.source,
            "kept": [asdict(one) for one in self.kept],
            "kept_with_another_meaning": [asdict(one) for one in self.changed],
            "defaults_of_the_framework": [asdict(one) for one in self.defaults],
            "left_out": [asdict(one) for one in self.left_out],
            "missing": self.missing,
        }
        return json.dumps(lists, indent=1, ensure_ascii=False) + "\n"

    def _comments(self) -> Iterator[str]:
        yield "Keys in none of these lists have our defaults (docs/configuration.md)."
        for title, lines in (
            ("To be filled in before a run:", self.missing),
            ("Left out, although they matter:", self._shown("refused")),
            ("Left out, because there are no such settings here:", self._shown("unknown")),
            ("Left out, because they have no effect here:", self._shown("idle")),
            (
                f"{self.framework}'s defaults, for keys that the file leaves out:",
                [_explained(one) for one in self.defaults],
            ),
            ("Kept with another meaning:", [_explained(one) for one in self.changed]),
            ("Kept:", [_names(one) for one in self.kept]),
        ):
            if lines:
                yield ""
                yield title
                yield from (f"  {' '.join(line.split())}" for line in lines)

    def _shown(self, kind: Kind) -> list[str]:
        return [f"{one.key}: {one.why}" for one in self.left_out_as(kind)]


def is_unedited_yaml(content: bytes) -> bool:
    """Whether `content` is a file of `to_yaml` that nobody has edited since."""
    _, digest, text = (*content.decode("utf-8", "replace").split("\n", 2), "", "")[:3]
    return digest == f"{_DIGEST}{_digest(text)}"


def is_json_report(content: bytes) -> bool:
    """Whether `content` is a file of `to_json`."""
    return content[:200].startswith(f'{{\n "written_by": "{_COMMAND}"'.encode())


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode(errors="replace")).hexdigest()[:16]


def _explained(one: KeptKey) -> str:
    return f"{_names(one)}: {one.meaning}" if one.meaning else _names(one)


def _names(one: KeptKey) -> str:
    return one.key if one.key == one.to else f"{one.key} -> {one.to}"
