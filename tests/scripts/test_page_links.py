"""Links, anchors, paths and functions that README.md, CONTRIBUTING.md and the docs pages name exist."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from tests.scripts.test_pages import PAGES, ROOT

PACKAGE = ROOT / "roll_batching"
CHECKED = sorted({*PAGES, ROOT / "CONTRIBUTING.md"} - {ROOT / "docs" / "results.md"})
ELSEWHERE = {
    "nemo_rl/data/packing/algorithms.py",
    "python/sglang/srt/model_executor/model_runner.py",
    "tests/unit/data/packing/test_algorithms.py",
    "vllm/distributed/weight_transfer/nccl_engine.py",
}
"""Paths in other projects."""


@cache
def anchors(page: Path) -> frozenset[str]:
    """The anchors that GitHub makes of a page's headings."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return frozenset(re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings)


def missing_links(page: Path) -> list[str]:
    """Links of a page to a file or an anchor that does not exist."""
    missing = []
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        name, _, anchor = target.partition("#")
        file = (page.parent / name).resolve() if name else page
        if name.startswith(("http:", "https:")):
            continue
        if not file.exists() or (anchor and anchor not in anchors(file)):
            missing.append(target)
    return missing


@cache
def defined_names(file: Path) -> frozenset[str]:
    """Functions, classes and methods of a module; a method also as `Class.method`."""
    names = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ClassDef):
            names |= {f"{node.name}.{part.name}" for part in node.body if isinstance(part, ast.FunctionDef)}
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
    return frozenset(names)


def missing_paths(text: str) -> list[str]:
    """Paths in code spans that do not exist, and `file: name` where the file does not define the name."""
    missing = []
    for span in re.findall(r"`([^`\n]+)`", text):
        path, _, name = span.partition(": ")
        if command := re.match(r"(?:python |\./)?((?:scripts|benchmarks|examples)/\S+\.(?:py|sh))(?= |$)", span):
            path, name = command[1], ""
        if not re.fullmatch(r"[\w.-]+(/[\w.-]+)*/?[\w-]+\.(py|sh|md|json|yaml)", path) or "/" not in path:
            continue
        files = [folder / path for folder in (ROOT, PACKAGE, PACKAGE / "jobs") if (folder / path).is_file()]
        if not files and path not in ELSEWHERE:
            missing.append(span)
        if files and name and name not in defined_names(files[0]):
            missing.append(span)
    return missing


@pytest.mark.parametrize("page", CHECKED, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_of_a_page_lead_somewhere(page):
    assert missing_links(page) == []


@pytest.mark.parametrize("page", CHECKED, ids=lambda page: str(page.relative_to(ROOT)))
def test_paths_and_functions_of_a_page_exist(page):
    assert missing_paths(page.read_text()) == []


def test_the_map_has_every_room_once():
    page = (ROOT / "docs" / "architecture.md").read_text()
    rows = re.findall(r"^\| ((?:`[\w/]+`(?:, )?)+) \|", page.split("\n## The path of a step")[0], re.MULTILINE)
    folders = [folder for glob in ("*", "jobs/*", "tools/*") for folder in PACKAGE.glob(glob)]
    rooms = [folder.relative_to(PACKAGE).as_posix() for folder in folders if (folder / "__init__.py").is_file()]
    named = [name for row in rows for name in re.findall(r"`([\w/]+)`", row)]
    assert sorted(named) == sorted(set(rooms) - {"jobs", "tools", "commands"})


def test_pages_that_code_and_configurations_name_exist():
    """Error messages, help texts and comments send readers to pages, as docs/NAME.md."""
    files = [file for folder in ("roll_batching", "configs", "examples") for file in (ROOT / folder).rglob("*.*")]
    files += [*(ROOT / "scripts").iterdir(), *(ROOT / "benchmarks").rglob("*.py")]
    texts = {file: file.read_text() for file in files if file.suffix in (".py", ".yaml", ".sh")}
    named = {(file, name) for file, text in texts.items() for name in re.findall(r"\bdocs/([\w-]+\.md)", text)}
    assert named and {(file, name) for file, name in named if not (ROOT / "docs" / name).is_file()} == set()


@pytest.mark.parametrize(
    "span",
    [
        "strategy/nowhere.py",
        "strategy/schedule.py: nothing",
        "tests/no/test_it.py",
        "python scripts/nothing.py --check",
    ],
)
def test_a_span_that_names_nothing_is_found(span):
    assert missing_paths(f"see `{span}` here") == [span]
