"""Extract fields and defaults of another framework's configuration classes from its source, without importing it.

    python scripts/peer_defaults.py CHECKOUT COMMIT FILE:CLASS [FILE:CLASS ...] [--reads FOLDER ...] > defaults.json

Per class: fields with a default, and optional fields of TypedDicts. `--reads` adds the fallbacks of optional fields in
the code below these folders: the second argument of `.get("FIELD", ...)`. Tests of the converters read the output, so
that a new default of the framework that the converter does not know fails a test.
"""

from __future__ import annotations

import argparse
import ast
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def fields_of(node: ast.ClassDef) -> tuple[dict[str, Any], list[str]]:
    """(defaults by field, fields that may be absent) of a class of annotated fields."""
    defaults: dict[str, Any] = {}
    optional: list[str] = []
    total = not any(one.arg == "total" and ast.unparse(one.value) == "False" for one in node.keywords)
    typed = any("TypedDict" in ast.unparse(base) for base in node.bases)
    for one in node.body:
        if not isinstance(one, ast.AnnAssign) or not isinstance(one.target, ast.Name):
            continue
        if one.value is not None:
            found = _default(one.value)
            if found is not _REQUIRED:
                defaults[one.target.id] = found
        elif "NotRequired" in ast.unparse(one.annotation) or (typed and not total):
            optional.append(one.target.id)
    return defaults, optional


_REQUIRED = object()


def _default(value: ast.expr) -> Any:
    """Value of a default; for a factory its name in angle brackets, for other code its source."""
    if isinstance(value, ast.Call) and ast.unparse(value.func) in ("Field", "field", "dataclasses.field"):
        given = {one.arg: one.value for one in value.keywords}
        if "default" in given:
            return _default(given["default"])
        if "default_factory" in given:
            return _made(given["default_factory"])
        return _default(value.args[0]) if value.args else _REQUIRED
    if isinstance(value, ast.Constant) and value.value is ...:
        return _REQUIRED
    try:
        return ast.literal_eval(value)
    except ValueError:
        return f"<{ast.unparse(value)}>"


def _made(factory: ast.expr) -> Any:
    if isinstance(factory, ast.Lambda):
        return _default(factory.body)
    name = ast.unparse(factory)
    return {"dict": {}, "list": []}.get(name, f"<{name}>")


def reads_of(root: Path, folders: list[str], fields: set[str]) -> dict[str, list[Any]]:
    """By field: the defaults other than None of `.get(FIELD, DEFAULT)` below these folders."""
    found: dict[str, list[Any]] = {}
    for folder in folders:
        for path in sorted((root / folder).rglob("*.py")):
            for name, default in _gets(ast.parse(path.read_text(encoding="utf-8"))):
                if name in fields and default is not None and default not in found.setdefault(name, []):
                    found[name].append(default)
    return {name: sorted(values, key=str) for name, values in sorted(found.items()) if values}


def _gets(tree: ast.AST) -> Iterator[tuple[str, Any]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "get":
            if len(node.args) == 2 and isinstance(node.args[0], ast.Constant):
                yield str(node.args[0].value), _default(node.args[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path)
    parser.add_argument("commit")
    parser.add_argument("classes", nargs="+", metavar="FILE:CLASS")
    parser.add_argument("--reads", nargs="*", default=[], metavar="FOLDER")
    args = parser.parse_args()
    classes: dict[str, Any] = {}
    for one in args.classes:
        file, _, name = one.partition(":")
        tree = ast.parse((args.checkout / file).read_text(encoding="utf-8"))
        node = next((part for part in tree.body if isinstance(part, ast.ClassDef) and part.name == name), None)
        if node is None:
            parser.error(f"{file} has no class {name}")
        defaults, optional = fields_of(node)
        classes[one] = {"defaults": defaults} | ({"optional": optional} if optional else {})
    fields = {name for one in classes.values() for name in one.get("optional", [])}
    reads = reads_of(args.checkout, args.reads, fields)
    print(json.dumps({"commit": args.commit, "classes": classes} | ({"reads": reads} if reads else {}), indent=1))


if __name__ == "__main__":
    main()
