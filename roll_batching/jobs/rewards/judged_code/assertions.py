"""Finds what can fail in a test, and inserts calls that tell whether it was reached.

A test that ends without having reached an assertion passes any code: `x = 1`, or a loop over an empty result.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

_LINE = re.compile(rb"[^\r\n]*(?:\r\n|\r|\n|$)")


def failing_parts(tree: ast.Module) -> list[ast.expr]:
    """The expressions that are evaluated where `tree` decides whether to fail.

    These are conditions of `assert`, calls of `assert...` (unittest, numpy.testing), contexts of `raises`, and what
    stands before a `raise` or an `assert False`: the condition of its `if`, the first expression of its `try`.
    Conditions that are constant do not count, nor what stands under `if False`.
    """
    return list(dict.fromkeys(_parts(tree.body, None)))


def with_calls(text: str, parts: list[ast.expr], name: str) -> str:
    """`text` with a call of the function `name`, which returns None, before each of `parts` is evaluated."""
    lines = _LINE.findall(text.encode("utf-8", "surrogatepass"))
    places = [(part.lineno - 1, part.col_offset, b"(%s() or (" % name.encode()) for part in parts]
    places += [((part.end_lineno or 1) - 1, part.end_col_offset or 0, b"))") for part in parts]
    for line, column, inserted in sorted(places, reverse=True):
        lines[line] = lines[line][:column] + inserted + lines[line][column:]
    return b"".join(lines).decode("utf-8", "surrogatepass")


def _parts(block: list[ast.stmt], parent: ast.stmt | None) -> Iterator[ast.expr]:
    for statement in block:
        if isinstance(statement, ast.Assert) and not isinstance(statement.test, ast.Constant):
            yield statement.test
        elif isinstance(statement, ast.Raise) or (isinstance(statement, ast.Assert) and _is_false(statement.test)):
            before = _first_expression(parent)
            if before is not None:
                yield before
        elif isinstance(statement, ast.Expr) and _is_assertion(statement.value):
            yield statement.value
        elif isinstance(statement, ast.With):
            yield from (item.context_expr for item in statement.items if _is_assertion(item.context_expr))
        yield from _inner_parts(statement)


def _inner_parts(statement: ast.stmt) -> Iterator[ast.expr]:
    skips_body = isinstance(statement, ast.If | ast.While) and _is_false(statement.test)
    parent = None if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) else statement
    for field, value in ast.iter_fields(statement):
        if not isinstance(value, list) or (field == "body" and skips_body):
            continue
        yield from _parts([one for one in value if isinstance(one, ast.stmt)], parent)
        for one in value:
            if isinstance(one, ast.ExceptHandler | ast.match_case):
                yield from _parts(one.body, statement)


def _first_expression(statement: ast.stmt | None) -> ast.expr | None:
    """The expression that is evaluated when `statement` begins."""
    if isinstance(statement, ast.Try):
        return _first_expression(statement.body[0])
    if isinstance(statement, ast.With):
        return statement.items[0].context_expr
    for field in ("test", "iter", "subject", "value"):
        if isinstance(value := getattr(statement, field, None), ast.expr):
            return value
    return None


def _is_assertion(value: ast.expr) -> bool:
    function = value.func if isinstance(value, ast.Call) else None
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    return name.lower().startswith("assert") or name == "raises"


def _is_false(value: ast.expr) -> bool:
    return isinstance(value, ast.Constant) and not value.value
