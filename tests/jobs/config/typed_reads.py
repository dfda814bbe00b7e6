"""Which attributes the package reads of which class, found by types: a name alone proves nothing.

Types come from annotations (parameters, fields, returns) and follow assignments, loops over containers, and calls.
What cannot be followed is not counted: a variable that holds settings of unclear type needs an annotation.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

Read = tuple[str, str]
"""Class and attribute; or, for a function that is called or handed on, its file and name."""
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Types:
    """The classes that an expression may be of, and those of the items it holds."""

    own: frozenset[str] = frozenset()
    items: frozenset[str] = frozenset()

    def __or__(self, other: Types) -> Types:
        return Types(self.own | other.own, self.items | other.items)


NOTHING = Types()


@dataclass
class Class:
    bases: list[str]
    attributes: dict[str, Types] = field(default_factory=dict)
    methods: dict[str, Function] = field(default_factory=dict)


class Package:
    """Classes, functions and reads of all modules below `root`; `skip` are files (relative to it) left out."""

    def __init__(self, root: Path) -> None:
        self.classes: dict[str, Class] = {}
        self.functions: dict[Read, Function] = {}
        """By file and name."""
        self.imports: dict[Read, Read] = {}
        """File and name, as they are called here, to file and name there."""
        self.places: list[tuple[str, str | None, Function]] = []
        """File, class and definition of every function and method."""
        for path in sorted(root.rglob("*.py")):
            file, tree = str(path.relative_to(root)), ast.parse(path.read_text())
            self._declarations(file, tree)
            self._imports(root, file, tree)
        for _ in range(3):  # attributes assigned from attributes, a few deep
            for file, owner, function in self.places:
                self.reads(file, owner, function)

    def _imports(self, root: Path, file: str, tree: ast.Module) -> None:
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == root.name:
                there = "/".join(node.module.split(".")[1:])
                there = f"{there}/__init__.py" if (root / there).is_dir() else f"{there}.py"
                for name in node.names:
                    self.imports[file, name.asname or name.name] = (there.lstrip("/"), name.name)

    def function(self, file: str, name: str) -> Read | None:
        """Where the function that `file` calls `name` stands."""
        here = (file, name)
        while here not in self.functions and here in self.imports:
            here = self.imports[here]
        return here if here in self.functions else None

    def _declarations(self, name: str, tree: ast.Module) -> None:
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                made = self.classes.setdefault(node.name, Class([ast.unparse(base) for base in node.bases]))
                for item in node.body:
                    if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
                        made.attributes[item.target.id] = annotated(item.annotation)
                    elif isinstance(item, Function):
                        made.methods[item.name] = item
                        self.places.append((name, node.name, item))
        methods = {id(m) for c in self.classes.values() for m in c.methods.values()}
        for node in ast.walk(tree):
            if isinstance(node, Function) and id(node) not in methods:
                self.places.append((name, None, node))
                self.functions[name, node.name] = node

    def lineage(self, name: str) -> Iterator[str]:
        """`name` and its bases in the package."""
        if name in self.classes:
            yield name
            for base in self.classes[name].bases:
                yield from self.lineage(base)

    def attribute(self, owner: str, name: str) -> tuple[Read, Types] | None:
        """The class that declares `owner`'s attribute, and its type (of a method: what it returns)."""
        for holder in self.lineage(owner):
            cls = self.classes[holder]
            if name in cls.methods:
                return (holder, name), annotated(cls.methods[name].returns)
            if name in cls.attributes:
                return (holder, name), cls.attributes[name]
        return None

    def reads(self, file: str, owner: str | None, function: Function) -> set[Read]:
        """What `function` reads, each with the class that declares it."""
        reader = _Reader(self, file, owner, function)
        reader.visit_body()
        return reader.found


def annotated(annotation: ast.expr | None) -> Types:
    """The classes that an annotation names: alone or in a union, and inside of containers."""
    if annotation is None:
        return NOTHING
    if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
        return annotated(ast.parse(annotation.value, mode="eval").body)
    if isinstance(annotation, ast.Name):
        return Types(frozenset({annotation.id}))
    if isinstance(annotation, ast.Attribute):
        return Types(frozenset({annotation.attr}))
    if isinstance(annotation, ast.BinOp):
        return annotated(annotation.left) | annotated(annotation.right)
    if isinstance(annotation, ast.Subscript):
        if ast.unparse(annotation.value) == "Annotated" and isinstance(annotation.slice, ast.Tuple):
            return annotated(annotation.slice.elts[0])
        inside = frozenset(node.id for node in ast.walk(annotation.slice) if isinstance(node, ast.Name))
        return Types(items=inside)
    return NOTHING


class _Reader(ast.NodeVisitor):
    """One function, from its first line to its last, with the types of its variables so far."""

    def __init__(self, package: Package, file: str, owner: str | None, function: Function) -> None:
        self.package, self.file, self.function = package, file, function
        self.found: set[Read] = set()
        self.variables: dict[str, Types] = {}
        arguments = function.args
        for argument in [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]:
            self.variables[argument.arg] = annotated(argument.annotation)
        self.owner = owner
        if owner is not None and arguments.args:
            self.variables[arguments.args[0].arg] = Types(frozenset({owner}))

    def visit_body(self) -> None:
        for statement in self.function.body:
            self.visit(statement)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:  # read as a place of its own
        return

    def visit_Assign(self, node: ast.Assign) -> None:
        self.visit(node.value)
        for target in node.targets:
            self._bind(target, node.value)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)
        self._assign(node.target, annotated(node.annotation))

    def visit_For(self, node: ast.For) -> None:
        self._loop(node.target, node.iter)
        self.generic_visit(node)

    def visit_ListComp(self, node: ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp) -> None:
        for part in node.generators:
            self._loop(part.target, part.iter)
        self.generic_visit(node)

    visit_SetComp = visit_GeneratorExp = visit_DictComp = visit_ListComp

    def visit_Name(self, node: ast.Name) -> None:
        called = self.package.function(self.file, node.id) if node.id not in self.variables else None
        if called is not None:
            self.found.add(called)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        self.generic_visit(node)
        if isinstance(node.ctx, ast.Load):
            for name in self.type_of(node.value).own:
                found = self.package.attribute(name, node.attr)
                if found is not None:
                    self.found.add(found[0])

    def _loop(self, target: ast.expr, over: ast.expr) -> None:
        items = Types(self.type_of(over).items)
        for name in target.elts if isinstance(target, ast.Tuple) else [target]:
            self._assign(name, items)

    def _bind(self, target: ast.expr, value: ast.expr) -> None:
        if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
            for one, its in zip(target.elts, value.elts, strict=False):
                self._bind(one, its)
        else:
            self._assign(target, self.type_of(value))

    def _assign(self, target: ast.expr, types: Types) -> None:
        if isinstance(target, ast.Name):
            self.variables[target.id] = types
        elif isinstance(target, ast.Attribute) and self.owner is not None:
            if self.owner in self.type_of(target.value).own:
                self.package.classes[self.owner].attributes.setdefault(target.attr, NOTHING)
                self.package.classes[self.owner].attributes[target.attr] |= types

    def type_of(self, node: ast.expr) -> Types:
        if isinstance(node, ast.Name):
            return self.variables.get(node.id, NOTHING)
        if isinstance(node, ast.Attribute):
            return self._union(self.package.attribute(name, node.attr) for name in self.type_of(node.value).own)
        if isinstance(node, ast.Call):
            return self._called(node)
        if isinstance(node, ast.Subscript):
            return Types(self.type_of(node.value).items)
        if isinstance(node, ast.BoolOp):
            return self._all(node.values)
        if isinstance(node, ast.IfExp):
            return self._all([node.body, node.orelse])
        return NOTHING

    def _called(self, node: ast.Call) -> Types:
        made = node.func
        if isinstance(made, ast.Name):
            called = self.package.function(self.file, made.id)
            if called is not None:
                return annotated(self.package.functions[called].returns)
            return Types(frozenset({made.id})) if made.id in self.package.classes else NOTHING
        if isinstance(made, ast.Attribute):
            if made.attr in ("model_copy", "items", "values", "copy", "get"):
                held = self.type_of(made.value)
                return Types(held.items, held.items) if made.attr == "get" else held
            if isinstance(made.value, ast.Name) and made.value.id in self.package.classes:
                return Types(frozenset({made.value.id}))  # a constructor such as Settings.model_validate
        return self.type_of(made)

    def _all(self, nodes: list[ast.expr]) -> Types:
        types = NOTHING
        for node in nodes:
            types |= self.type_of(node)
        return types

    @staticmethod
    def _union(found: Iterator[tuple[Read, Types] | None]) -> Types:
        types = NOTHING
        for one in found:
            types |= one[1] if one is not None else NOTHING
        return types
