"""Draws the tree in docs/architecture.md anew from the modules' docstrings: `python scripts/draw_house.py`."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "architecture.md"
BEGIN, END = "<!-- tree -->\n", "<!-- /tree -->\n"


def first_line(path: Path) -> str:
    return (ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").split("\n")[0]


def tree(folder: Path, depth: int = 0) -> list[str]:
    """The folder's line, those of its modules, those of the folders in it."""
    indent = "    " * depth
    lines = [f"{indent}{folder.name + '/':<{34 - len(indent)}}{first_line(folder / '__init__.py')}".rstrip()]
    for path in sorted(folder.glob("*.py")):
        if path.name != "__init__.py":
            lines.append(f"{indent}    {path.name:<{30 - len(indent)}}{first_line(path)}".rstrip())
    for inside in sorted(path for path in folder.iterdir() if (path / "__init__.py").is_file()):
        lines += tree(inside, depth + 1)
    return lines


def page() -> str:
    """The page with today's tree."""
    text = PAGE.read_text(encoding="utf-8")
    before, rest = text.split(BEGIN)
    after = rest.split(END)[1]
    drawn = "\n".join(["```text", *tree(ROOT / "roll_batching"), "```"])
    return f"{before}{BEGIN}{drawn}\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
