"""Sizes of the package: lines, files and functions by room, and what its two main paths and its imports read.

    python scripts/measure_house.py [--json FILE]

A private function that is used once is one whose name, beginning with `_`, stands at one other place of its file.
The main paths are the files that docs/architecture.md names under "The path of ...".
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import re
import subprocess
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "roll_batching"
IMPORTS = ("roll_batching.strategy", "roll_batching.planning", "roll_batching.jobs.config")
LOADED = """
import importlib, json, sys
importlib.import_module(sys.argv[1])
ours = {module.__file__ for name, module in sys.modules.items() if name.split(".")[0] == "roll_batching"}
print(json.dumps(sorted(file for file in ours if file)))
"""


def room_of(path: Path) -> str:
    """`planning`, `jobs/rl`; of a file that stands alone, its name."""
    parts = path.relative_to(PACKAGE).parts
    depth = 2 if parts[0] in ("jobs", "tools") and len(parts) > 2 else 1
    return "/".join(parts[:depth])


def functions_of(tree: ast.AST) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    return [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]


def names_of(tree: ast.AST) -> Iterator[str]:
    """Every name that is read, each time."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.ImportFrom):
            yield from (alias.name for alias in node.names)


def private_used_once(tree: ast.AST) -> int:
    read = Counter(names_of(tree))
    private = {function.name for function in functions_of(tree) if re.match(r"_[a-z]", function.name)}
    return sum(read[name] == 1 for name in private)


def comment_lines(text: str) -> int:
    return sum(token.type == tokenize.COMMENT for token in tokenize.generate_tokens(io.StringIO(text).readline))


def loaded_by(module: str) -> list[Path]:
    """Files of the package that `import module` reads."""
    command = [sys.executable, "-W", "ignore", "-c", LOADED, module]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return [Path(name) for name in json.loads(done.stdout.splitlines()[-1])]


def paths_of_the_page() -> dict[str, list[Path]]:
    """By heading of docs/architecture.md, the files that its text names."""
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    paths = {}
    for section in page.split("\n## ")[1:]:
        heading, text = section.split("\n", 1)
        if heading.startswith("The path of"):
            named = dict.fromkeys(re.findall(r"`([a-z_0-9/]+\.py)", text))
            paths[heading] = [PACKAGE / name for name in named]
    return paths


def size_of(files: list[Path]) -> dict[str, int]:
    return {"files": len(files), "lines": sum(len(path.read_text(encoding="utf-8").splitlines()) for path in files)}


def measure() -> dict[str, Any]:
    """All sizes of the current tree."""
    texts = {path: path.read_text(encoding="utf-8") for path in sorted(PACKAGE.rglob("*.py"))}
    trees = {path: ast.parse(text) for path, text in texts.items()}
    functions = [function for tree in trees.values() for function in functions_of(tree)]
    rooms: dict[str, Counter[str]] = {}
    for path, text in texts.items():
        lines = text.splitlines()
        rooms.setdefault(room_of(path), Counter()).update(
            files=1,
            lines=len(lines),
            files_under_50=len(lines) < 50 and path.name != "__init__.py",
            comments=comment_lines(text),
            functions=len(functions_of(trees[path])),
        )
    total = sum(rooms.values(), Counter())
    return {
        "lines": total["lines"],
        "files": total["files"],
        "files_under_50_lines": total["files_under_50"],
        "functions": len(functions),
        "functions_over_60_lines": sum((function.end_lineno or 0) - function.lineno >= 60 for function in functions),
        "private_functions_used_once": sum(map(private_used_once, trees.values())),
        "classes": sum(isinstance(node, ast.ClassDef) for tree in trees.values() for node in ast.walk(tree)),
        "comments_per_1000_lines": round(1000 * total["comments"] / total["lines"], 1),
        "lines_over_120": sum(len(line) > 120 for text in texts.values() for line in text.splitlines()),
        "paths": {heading: size_of(files) for heading, files in paths_of_the_page().items()},
        "imports": {module: size_of(loaded_by(module)) for module in IMPORTS},
        "rooms": {
            room: {
                "lines": sizes["lines"],
                "files": sizes["files"],
                "functions": sizes["functions"],
                "comments_per_1000_lines": round(1000 * sizes["comments"] / sizes["lines"], 1),
            }
            for room, sizes in sorted(rooms.items())
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="writes the sizes to this file as well")
    arguments = parser.parse_args()
    sizes = measure()
    if arguments.json:
        arguments.json.write_text(json.dumps(sizes, indent=1) + "\n", encoding="utf-8")
    for name, value in sizes.items():
        if isinstance(value, dict):
            for key, inner in value.items():
                print(f"{name:<8}{key:<46}" + "  ".join(f"{what} {number:>6,}" for what, number in inner.items()))
        else:
            print(f"{name:<32}{value:>10,}")


if __name__ == "__main__":
    main()
