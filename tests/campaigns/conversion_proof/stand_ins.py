"""Empty modules in place of imports that a host's functions do not call, in the process that runs them."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import os
import sys
import types
from collections.abc import Iterable
from typing import Any


class _Empty(types.ModuleType):
    """A module whose every name is a class that does nothing, and that pydantic takes for any value."""

    __path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        members = {
            "__init__": lambda self, *_, **__: None,
            "__class_getitem__": classmethod(lambda cls, _: cls),
            "__get_pydantic_core_schema__": classmethod(_any_value),
        }
        return type(name, (), members)


def _any_value(cls: Any, source: Any, handler: Any) -> Any:
    from pydantic_core import core_schema

    return core_schema.any_schema()


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, names: Iterable[str]) -> None:
        self.names, self.used = tuple(names), set[str]()

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        owner = next((one for one in self.names if name == one or name.startswith(f"{one}.")), None)
        if owner is None:
            return None
        self.used.add(owner)
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: Any) -> types.ModuleType:
        return _Empty(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """Nothing to run."""


class StandIns:
    """Empty modules for `packages` that are not installed, and for `modules` of the host itself."""

    def __init__(self, packages: Iterable[str], modules: Iterable[str] = ()) -> None:
        self._last, self._first = _Finder(packages), _Finder(modules)
        sys.meta_path.insert(0, self._first)
        sys.meta_path.append(self._last)

    @property
    def used(self) -> list[str]:
        """Those that an import asked for, and the GPU's absence."""
        return sorted(self._last.used | self._first.used)


def join_alone() -> None:
    """A process group of this process alone, and Megatron's groups in it, as a rank of the host has them."""
    import torch
    from megatron.core import parallel_state

    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()


def optimizer(rate: float = 1.0) -> Any:
    """An optimizer of one parameter, whose learning rate a schedule sets."""
    import torch

    made = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=rate)
    made.param_groups[0] |= {"is_decoupled_lr": False, "wd_mult": 1.0, "lr_mult": 1.0}
    return made
