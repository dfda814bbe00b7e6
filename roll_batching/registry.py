"""Registries of names in configurations, with dotted paths for a user's own code.

An entry is a name and the dotted path of its implementation, which is imported on first use: loading a configuration
and planning a step need no torch.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import re
import sys
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from roll_batching.errors import ConfigError

_STANDARD = os.path.join(os.path.dirname(os.__file__), "")
_OURS = os.path.join(os.path.dirname(__file__), "")
_INSTALLED = frozenset({"site-packages", "dist-packages", "torch", "megatron"})
"""Folders of packages that a user has not written; torch and Megatron may run from their sources."""
DOTTED = r"[^/:.]+(\.[^/:.]+)*:.+"
"""Pattern of package.module:name."""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One registered name."""

    name: str
    target: str
    """Dotted path of the implementation: `package.module:attribute`."""
    summary: str
    """A sentence for the reference page and `--help`."""


E = TypeVar("E", bound=Entry)


class Registry(Generic[E]):
    """Entries of one kind, by name, in the order in which they are shown."""

    def __init__(self, kind: str, *entries: E) -> None:
        self.kind = kind
        """Kind of the entries, for errors: "loss", "packing algorithm"."""
        self._entries = {entry.name: entry for entry in entries}
        if len(self._entries) != len(entries):
            raise ValueError(f"two entries for one {kind}")

    @property
    def names(self) -> tuple[str, ...]:
        """The registered names."""
        return tuple(self._entries)

    def __iter__(self) -> Iterator[E]:
        return iter(self._entries.values())

    def get(self, name: str) -> E | None:
        """The entry of a registered name; None for a dotted path. Raises `ConfigError` for anything else."""
        if name in self._entries:
            return self._entries[name]
        if is_dotted(name):
            return None
        raise ConfigError(
            f"the {self.kind} {name!r} is unknown; choose one of {', '.join(self.names)}, or write your own as "
            "package.module:name"
        )

    def load(self, name: str) -> Any:
        """The object of a registered name or a dotted path. Raises `ConfigError` if it cannot be loaded."""
        entry = self.get(name)
        return load_dotted(self.kind, name if entry is None else entry.target)


def is_dotted(name: object) -> bool:
    """Whether `name` has the form package.module:name. Paths of files and relative modules have not."""
    return isinstance(name, str) and re.fullmatch(DOTTED, name) is not None


def load_dotted(kind: str, path: str) -> Any:
    """The object at `package.module:name`; the working directory is added to `sys.path`.

    Raises `ConfigError` with `kind` and `path`, for another form, a module that cannot be imported, or a missing name.
    """
    if not is_dotted(path):
        raise ConfigError(f"{kind} {path!r}: write it as package.module:name")
    module_name, _, name = path.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a module may raise anything, and call sys.exit
        raise ConfigError(
            f"{kind} {path!r}: cannot import {module_name!r} ({describe_error(error)}); the module must be importable "
            "on every machine of the job: install it, or start in its folder"
        ) from error
    if not hasattr(module, name):
        raise ConfigError(f"{kind} {path!r}: {module_name!r} has no {name!r}")
    return getattr(module, name)


@functools.cache
def module_with(package: str, name: str) -> Any:
    """The module `name` of this package, or None if the `package` it needs is not installed."""
    return None if importlib.util.find_spec(package) is None else importlib.import_module(name)


def printable(text: str, *, characters: int = 1000, lines: int = 10) -> str:
    """Untrusted `text` as one line for a terminal: truncated, with control characters as escapes."""
    shown = text[:characters].splitlines()[:lines]
    result = " | ".join("".join(c if c.isprintable() else ascii(c)[1:-1] for c in line) for line in shown)
    left = len(text) - sum(map(len, shown)) - len(shown)
    return result if left <= 0 else f"{result} ... ({left:,} more characters)"


def user_place(error: BaseException) -> str:
    """File and line of a user's code that `error` passed last, as `file:line`; empty if it passed none.

    Code of this package, of the standard library and of installed packages is not the user's. Where only such code was
    passed, the first installed package that this one called is taken for the user's.
    """
    installed, users = [], []
    for frame, line in traceback.walk_tb(error.__traceback__):
        file = frame.f_code.co_filename
        if not _INSTALLED.isdisjoint(Path(file).parts):
            installed.append(f"{file}:{line}")
        elif not file.startswith((_OURS, _STANDARD, "<")):
            users.append(f"{file}:{line}")
    return users[-1] if users else installed[0] if installed else ""


def describe_error(error: BaseException) -> str:
    """Type, message and the user's source line of an error in a user's code."""
    try:
        text = str(error)
    except Exception:
        text = "its message cannot be shown"
    place = user_place(error)
    place = f" at {place}" if place else ""
    text = f": {printable(text)}" if text else ""
    return f"{type(error).__name__}{text}{place}"
