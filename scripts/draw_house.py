"""Writes docs/files.md from the modules' docstrings: `python scripts/draw_house.py`."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "files.md"
HEAD = """# Files

Every module with the first line of its docstring; `python scripts/draw_house.py` writes this page.
[architecture.md](architecture.md) is the map.
"""


def first_line(path: Path) -> str:
    return (ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").split("\n")[0]


def tree(folder: Path, depth: int = 0) -> list[str]:
    """Lines of a folder, its modules and its subfolders."""
    indent = "    " * depth
    lines = [f"{indent}{folder.name + '/':<{34 - len(indent)}}{first_line(folder / '__init__.py')}".rstrip()]
    for path in sorted(folder.glob("*.py")):
        if path.name != "__init__.py":
            lines.append(f"{indent}    {path.name:<{30 - len(indent)}}{first_line(path)}".rstrip())
    for inside in sorted(path for path in folder.iterdir() if (path / "__init__.py").is_file()):
        lines += tree(inside, depth + 1)
    return lines


def page() -> str:
    """The page docs/files.md for the current tree."""
    return "\n".join([HEAD, "```text", *tree(ROOT / "roll_batching"), "```", ""])


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
