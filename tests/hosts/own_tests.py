"""Pytest plugin for a host's own tests: plain, or with our planner behind and a count of its calls.

    python -m pytest -p tests.hosts.own_tests TESTS                                                        plain
    BEHIND=roll_batching.integrations.slime python -m pytest -p tests.hosts.own_tests TESTS                with ours

Packages that the host imports and does not call there have stand-ins. With `BEHIND`, tests without a call of the
planner in this process end with exit status 1. `PACKER=roll_batching` gives NeMo-RL's two first-fit names that packer.
"""

from __future__ import annotations

import functools
import importlib
import os
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from roll_batching.integrations import host_plans
from tests.hosts import stand_ins

FIRST_FIT = ("first_fit_decreasing", "modified_first_fit_decreasing")
PLANNER = ("plan_step", "karmarkar_karp", "cut_rectangles")
calls: Counter[str] = Counter()


def counted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*arguments: Any, **options: Any) -> Any:
        calls[name] += 1
        return function(*arguments, **options)

    return call


def rename_packer(packer: str) -> None:
    """Makes `get_packer` of NeMo-RL give our packer for its first-fit algorithms."""
    from nemo_rl.data.packing import algorithms
    from nemo_rl.distributed import batched_data_dict

    get_packer = algorithms.get_packer

    def get(algorithm: Any, *arguments: Any, **options: Any) -> Any:
        name = str(getattr(algorithm, "name", algorithm)).lower()
        return get_packer(packer if name in FIRST_FIT else algorithm, *arguments, **options)

    algorithms.get_packer = batched_data_dict.get_packer = get


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    if behind and not calls and not exitstatus:
        session.exitstatus = 1


def pytest_terminal_summary(terminalreporter: Any) -> None:
    if behind:
        found = ", ".join(f"{name} {calls[name]} times" for name in sorted(calls)) or "nothing of ours"
        terminalreporter.write_line(f"{behind}: called {found}")


stand_ins.install()
behind = os.environ.get("BEHIND", "")
if behind:
    for _name in PLANNER:  # before the integration imports them
        setattr(host_plans, _name, counted(_name, getattr(host_plans, _name)))
    importlib.import_module(behind)
if _packer := os.environ.get("PACKER"):
    rename_packer(_packer)
