"""A platform for verl on machines without a GPU; verl imports it by VERL_USE_EXTERNAL_MODULES."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import torch
from verl.plugin.platform.platform_base import PlatformBase
from verl.plugin.platform.platform_manager import PlatformRegistry

_MEMORY = ("max_memory_allocated", "max_memory_reserved", "memory_allocated", "memory_reserved")
_ANSWERS: dict[str, Any] = {
    "current_device": "cpu",  # verl takes it for a torch.device
    "device_count": 1,
    "is_available": True,
    "get_device_capability": (None, None),
    "communication_backend_name": "gloo",
    "visible_devices_envvar": "CPU_VISIBLE_DEVICES",
    "ray_resource_name": "CPU",
    "ray_noset_envvars": [],
    "is_ipc_supported": False,
}
"""Methods with one answer; those of PlatformBase that are not here do nothing."""


def _answer(name: str) -> Any:
    return lambda *_: _ANSWERS.get(name)


_module = SimpleNamespace(**{name: getattr(torch.cpu, name) for name in dir(torch.cpu) if name[0] != "_"})
for _name in _MEMORY:
    setattr(_module, _name, lambda *_: 0)
_module.mem_get_info = lambda *_: (0, 0)
_module.get_device_name = lambda *_: "CPU"
_module.set_device = _module.empty_cache = lambda *_: None

_members: dict[str, Any] = {name: _answer(name) for name in PlatformBase.__abstractmethods__}
_members |= {
    "device_name": "cpu",
    "vendor_name": "cpu",
    "device_module": _module,
    "manual_seed": lambda self, seed: torch.manual_seed(seed),
    "manual_seed_all": lambda self, seed: torch.manual_seed(seed),
    "nvtx_range": lambda self, message: contextlib.nullcontext(),
}
PlatformCPU = PlatformRegistry.register("cpu")(type("PlatformCPU", (PlatformBase,), _members))
