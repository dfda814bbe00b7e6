"""Packages that hosts import on the way to their training code and do not call there: empty modules in their place."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import os
import socket
import sys
import types
from typing import Any

UNUSED = {
    *("imageio", "transfer_queue", "gem", "latex2sympy2", "debugpy", "mcp", "langdetect", "gymnasium"),  # ROLL
    *("megatron.bridge", "megatron.core.transformer.moe.moe_logging", "torchao", "mlflow"),  # NeMo-RL
    *("prometheus_client", "decord", "plotly", "swanlab"),
    *("uvicorn", "fastapi"),  # verl
}
"""Imported at the top of modules, for other jobs than those tested."""


class _Module(types.ModuleType):
    __path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        is_unused = any(name == unused or name.startswith(f"{unused}.") for unused in UNUSED)
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if is_unused else None

    def create_module(self, spec: Any) -> types.ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def install() -> None:
    """Puts them behind everything that is installed; and a rank's port where ROLL would choose one."""
    sys.meta_path.append(_Finder())
    if port := os.environ.get("FIXED_PORT"):
        from roll.distributed.executor.worker import Worker

        Worker.get_free_port = staticmethod(lambda: int(port))


def free_port() -> int:
    """A port of this machine that nobody listens on."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])
