"""Settings for all tests, and the lines that they report at the end.

A test that measures or tries something asks for the fixture `report` and hands it a line; the lines appear,
sorted by section, after the run: `./scripts/test.sh -m equality` shows the worst differences, for example.
"""

from __future__ import annotations

import os
import signal

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported; two ranks share two cores
os.environ.setdefault("MPLBACKEND", "Agg")

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import TypeVar

import hypothesis
import pytest

hypothesis.settings.register_profile("repeatable", deadline=None, derandomize=True)
hypothesis.settings.load_profile("repeatable")

T = TypeVar("T")


def pytest_configure(config: pytest.Config) -> None:
    """A shell starts background jobs with SIGINT ignored, which the commands under test would inherit."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--deep", action="store_true", help="planning: 100,000 random plans instead of 2,000")
    parser.addoption("--part", default="1/1", help="2/3: of the selected tests, the second of three parts")


LONGEST = ("test_layouts.py", "test_failures.py", "test_equality.py", "test_rubbish.py", "test_local.py", "test_ray.py")
"""Files that are run first: where files run side by side, one that is begun last would run alone."""


@pytest.hookimpl(trylast=True)  # after `-m` and `-k`
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Longest files first, else as collected; of these every n-th, where a part is asked for."""
    items.sort(key=lambda item: LONGEST.index(item.path.name) if item.path.name in LONGEST else len(LONGEST))
    part = part_of(items, config.getoption("--part"))
    kept = set(part)
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = part


def part_of(items: Sequence[T], text: str) -> list[T]:
    """Every n-th of `items`: `2/3` says the second of three parts. Raises pytest.UsageError."""
    part, _, parts = text.partition("/")
    if not (part.isdigit() and parts.isdigit() and 1 <= int(part) <= int(parts)):
        raise pytest.UsageError(f"--part has no part {text!r}: 2/3 is the second of three")
    return list(items[int(part) - 1 :: int(parts)])


SECTIONS = ("equality", "bad_input", "config", "layouts", "loss", "models", "planning", "streams")
_LINE = "reported line"
_lines: dict[str, list[str]] = defaultdict(list)


@pytest.fixture
def report(request: pytest.FixtureRequest) -> Callable[[str], None]:
    """Hand it one line; it is printed after the run, under the first marker in SECTIONS that the test has."""
    section = next((name for name in SECTIONS if request.node.get_closest_marker(name)), "notes")
    # Properties of a test travel to the process that reports, wherever the test ran.
    return lambda line: request.node.user_properties.append((_LINE, (section, line)))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "teardown":
        for name, value in report.user_properties:
            if name == _LINE:
                section, line = value
                _lines[section].append(line)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for section, lines in sorted(_lines.items()):
        terminalreporter.section(section)
        for line in lines:
            terminalreporter.write_line(line)
