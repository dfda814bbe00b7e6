"""Stand-ins for packages that a host imports on the way to its batching and does not call there."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Sequence
from typing import Any


class _Name:
    """Any name of a stand-in: a class that may be subclassed, called, used as a decorator and subscripted."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        pass

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        is_decorated = len(arguments) == 1 and callable(arguments[0]) and not keywords
        return arguments[0] if is_decorated else _Name()

    def __getattr__(self, name: str) -> Any:
        return _missing(name)

    def __class_getitem__(cls, item: Any) -> type:
        return cls


def _missing(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return type(name, (_Name,), {})


class _Module(types.ModuleType):
    __path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return _missing(name)


class StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports of `packages` that are not installed give a stand-in; last in `sys.meta_path`."""

    def __init__(self, packages: Sequence[str]) -> None:
        self.packages = frozenset(packages)
        self.used: set[str] = set()

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        package = name.partition(".")[0]
        if package not in self.packages:
            return None
        self.used.add(package)
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: Any) -> types.ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def install(packages: Sequence[str]) -> StandIns:
    """Makes imports of the missing among `packages` succeed from now on; says which were used."""
    finder = StandIns([name for name in packages if importlib.util.find_spec(name) is None])
    sys.meta_path.append(finder)
    return finder
