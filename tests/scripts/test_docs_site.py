"""The documentation site: every page has its place, its links hold, and its errors are those of the code."""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from scripts.site_pages import CODE, LINK, rewrite, write_pages
from tests.scripts.test_pages import ROOT

DOCS, PACKAGE = ROOT / "docs", ROOT / "roll_batching"
GENERATED = {"index.md", "changelog.md", "contributing.md"}
"""Pages that scripts/site_pages.py makes of files outside docs/."""
FETCHED = (
    r"<(?:script|img|iframe)[^>]* src=\"?https?:|<link[^>]* rel=\"?(?:stylesheet|preconnect|icon)[^>]* href=\"?https?:"
)
"""What a browser would load from another server while it shows a page."""
FEWEST_ERRORS = 25
LONGEST_PART = 12


def pages_of_nav() -> list[str]:
    """The pages that mkdocs.yml lists. Its tags for Python objects hinder a YAML loader, so lines are read."""
    text = (ROOT / "mkdocs.yml").read_text()
    lines = text.partition("\nnav:\n")[2].splitlines()
    return [match[1] for line in lines if (match := re.search(r"(?:^|\s)([\w-]+\.md)\s*$", line))]


def test_every_page_has_one_line_in_the_navigation():
    pages = pages_of_nav()
    assert sorted(pages) == sorted({*GENERATED, *(file.name for file in DOCS.glob("*.md"))})


def errors_of_the_page() -> list[str]:
    """The messages that headings of docs/troubleshooting.md quote; `...` stands for values."""
    return re.findall(r"^### `(.+)`$", (DOCS / "troubleshooting.md").read_text(), re.MULTILINE)


@cache
def literals() -> dict[Path, str]:
    """The string literals of each file, without docstrings; a zero byte stands for a value and between literals."""
    texts = {}
    for file in PACKAGE.rglob("*.py"):
        tree = ast.parse(file.read_text())
        statements = (node.value for node in ast.walk(tree) if isinstance(node, ast.Expr))
        documentation = {id(value) for value in statements if isinstance(value, ast.Constant)}
        found = []
        for node in ast.walk(tree):
            if isinstance(node, ast.JoinedStr):
                found.append("".join(part.value if isinstance(part, ast.Constant) else "\0" for part in node.values))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in documentation:
                found.append(node.value)
        texts[file] = "\0".join(found)
    return texts


def occurs(message: str) -> bool:
    """Whether one file of the package has all fixed parts of a message, in strings that are no documentation."""
    pieces = [piece.strip() for piece in message.split("...") if len(piece.strip()) > 2]
    assert max(map(len, pieces)) >= LONGEST_PART, f"{message} has no part that tells it from others"
    return any(all(piece in text for piece in pieces) for text in literals().values())


@pytest.mark.parametrize("message", errors_of_the_page())
def test_an_error_of_the_troubleshooting_page_is_in_the_code(message):
    assert occurs(message)


def test_the_page_has_many_errors_with_cause_and_cure():
    text = (DOCS / "troubleshooting.md").read_text()
    sections = re.split(r"^### `.+`$", text, flags=re.MULTILINE)[1:]
    assert len(sections) >= FEWEST_ERRORS
    assert len(set(errors_of_the_page())) == len(sections)
    assert all("Cause: " in section and "Cure: " in " ".join(section.split()) for section in sections)


def test_an_error_that_is_gone_is_found():
    assert not occurs("no such sentence has ever been written in ... this package")


def test_links_of_the_repository_become_links_of_the_site(tmp_path):
    write_pages(tmp_path / "pages")
    pages = {file: file.read_text() for file in (tmp_path / "pages").rglob("*.md")}
    assert "](installing.md)" in pages[tmp_path / "pages" / "index.md"]
    assert "```python" in pages[tmp_path / "pages" / "repository" / "examples" / "your_megatron_loop.py.md"]
    for file, text in pages.items():
        links = [match[2] for part in CODE.split(text)[::2] for match in LINK.finditer(part)]
        names = {link.partition("#")[0] for link in links if not re.match(r"[a-z]+:", link)}
        assert [name for name in names if not (file.parent / name).exists()] == [], file


def test_a_link_to_no_file_is_an_error():
    with pytest.raises(FileNotFoundError, match="docs/grpo.md links to img/nothing.png"):
        rewrite("docs/grpo.md", "![A picture](img/nothing.png)")


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("zensical") is None, reason="needs the extra docs")
def test_the_site_builds_without_warnings_and_asks_no_other_server(tmp_path):
    script = ROOT / "scripts" / "docs_site.sh"
    environment = {**os.environ, "PYTHON": sys.executable, "REPOSITORY_URL": "https://git.example.org/a/b"}
    command = [script, "--no-install", "--site-dir", tmp_path / "site"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "No issues found" in done.stdout + done.stderr
    assert "doc-function" in (tmp_path / "site" / "api" / "index.html").read_text()
    assert (tmp_path / "site" / "job.schema.json").read_bytes() == (DOCS / "job.schema.json").read_bytes()
    for page, file in (("index.html", "README.md"), ("grpo/index.html", "docs/grpo.md")):
        link = f'<a href="https://git.example.org/a/b/edit/main/{file}"'
        assert link in (tmp_path / "site" / page).read_text()
    for page in (tmp_path / "site").rglob("*.html"):
        assert re.findall(FETCHED, page.read_text()) == [], page
