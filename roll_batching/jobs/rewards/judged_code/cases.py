"""Reads tests of the model's code from a line of the data file, in the formats of ROLL.

A test that ends without having reached an assertion passes any code: `x = 1`, or a loop over an empty result. So a call
is inserted wherever a test can fail, which tells whether an assertion was reached.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

_LINE = re.compile(rb"[^\r\n]*(?:\r\n|\r|\n|$)")
_EXITS = ("sys.exit", "os._exit", "os.abort", "exit", "quit")
_FAILED = "Failed"
"""Exception of `pytest.fail` and `pytest.raises`."""
_NOT_EXCEPTIONS = (_FAILED, "SystemExit", "KeyboardInterrupt")
"""Exceptions that `except Exception` does not catch."""


def failing_parts(tree: ast.Module) -> list[ast.expr]:
    """Returns the expressions that are evaluated where `tree` decides whether to fail.

    These are conditions of `assert`, calls of `assert...` (unittest, numpy.testing), contexts of `raises`, and what
    stands before a statement that always fails (`raise`, `assert False`, `self.fail`, `sys.exit`): the condition of its
    `if`, the first expression of its `try`. Conditions that hold by their form do not count, nor what stands under
    `if False`, nor failures that a handler or `contextlib.suppress` around them catches without failing itself.
    """
    return list(dict.fromkeys(_parts(tree.body, None, ())))


def with_calls(text: str, parts: list[ast.expr], name: str) -> str:
    """Inserts a call of the function `name` before each of `parts`: `(name() or (part))`, as `name` returns None."""
    lines = _LINE.findall(text.encode("utf-8", "surrogatepass"))
    places = [(part.lineno - 1, part.col_offset, b"(%s() or (" % name.encode()) for part in parts]
    places += [((part.end_lineno or 1) - 1, part.end_col_offset or 0, b"))") for part in parts]
    for line, column, inserted in sorted(places, reverse=True):  # from the end, so that earlier columns stay valid
        lines[line] = lines[line][:column] + inserted + lines[line][column:]
    return b"".join(lines).decode("utf-8", "surrogatepass")


def _parts(block: list[ast.stmt], parent: ast.stmt | None, enclosing: tuple[ast.stmt, ...]) -> Iterator[ast.expr]:
    """Yields the deciding expressions of `block`, a body of `parent`.

    `enclosing`: the `try` and `with` statements around it, innermost first, which may catch a failure.
    """
    for statement in block:
        failure = _failure(statement)
        if failure:
            before = _first_expression(parent)
            if before is not None and _escapes(failure, enclosing):
                yield before
        elif isinstance(statement, ast.Assert):
            if not _always_holds(statement.test) and _escapes("AssertionError", enclosing):
                yield statement.test
        elif isinstance(statement, ast.Expr):
            if _is_assertion(statement.value) and _escapes("AssertionError", enclosing):
                yield statement.value
        elif isinstance(statement, ast.With) and _escapes(_FAILED, enclosing):
            yield from (item.context_expr for item in statement.items if _is_assertion(item.context_expr))
        yield from _inner_parts(statement, enclosing)


def _inner_parts(statement: ast.stmt, enclosing: tuple[ast.stmt, ...]) -> Iterator[ast.expr]:
    """Yields the deciding expressions of the blocks inside `statement`."""
    skips_body = isinstance(statement, ast.If | ast.While) and _is_false(statement.test)
    parent: ast.stmt | None = statement
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        parent, enclosing = None, ()  # it runs where it is called
    for field, value in ast.iter_fields(statement):
        if not isinstance(value, list) or (field == "body" and skips_body):
            continue
        is_caught = field == "body" and isinstance(statement, ast.Try | ast.With)
        around = (statement, *enclosing) if is_caught else enclosing
        yield from _parts([node for node in value if isinstance(node, ast.stmt)], parent, around)
        for node in value:
            if isinstance(node, ast.ExceptHandler | ast.match_case):
                yield from _parts(node.body, statement, enclosing)


def _failure(statement: ast.AST) -> str:
    """The name of the exception that `statement` raises whenever it runs; empty if it may pass."""
    if isinstance(statement, ast.Raise):
        raised = statement.exc.func if isinstance(statement.exc, ast.Call) else statement.exc
        return _last_name(raised) or "Exception"
    if isinstance(statement, ast.Assert) and _is_false(statement.test):
        return "AssertionError"
    function = (
        statement.value.func if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call) else None
    )
    if function is None:
        return ""
    if ast.unparse(function) in _EXITS:
        return "SystemExit"
    if _last_name(function) != "fail":
        return ""
    return _FAILED if ast.unparse(function) in ("pytest.fail", "fail") else "AssertionError"


def _escapes(failure: str, enclosing: tuple[ast.stmt, ...]) -> bool:
    """Whether the exception named `failure` leaves all of `enclosing`, or a handler fails in its place."""
    for statement in enclosing:
        if isinstance(statement, ast.With):
            managers = [item.context_expr for item in statement.items if isinstance(item.context_expr, ast.Call)]
            kinds = [kind for call in managers if _last_name(call.func) == "suppress" for kind in call.args]
            if any(_catches(kind, failure) for kind in kinds):
                return False
        if isinstance(statement, ast.Try):
            handler = next((handler for handler in statement.handlers if _catches(handler.type, failure)), None)
            nodes = [node for inner in handler.body for node in ast.walk(inner)] if handler else []
            if handler and not any(isinstance(node, ast.Assert) or _failure(node) for node in nodes):
                return False
    return True


def _catches(kind: ast.expr | None, failure: str) -> bool:
    if isinstance(kind, ast.Tuple):
        return any(_catches(one, failure) for one in kind.elts)
    caught = "BaseException" if kind is None else _last_name(kind)
    return caught in ("BaseException", failure) or (caught == "Exception" and failure not in _NOT_EXCEPTIONS)


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
    if not isinstance(value, ast.Call):
        return False
    name = _last_name(value.func)
    if name == "assertTrue" and value.args and _is_true(value.args[0]):
        return False
    return name.lower().startswith("assert") or name == "raises"


def _last_name(value: ast.expr | None) -> str:
    return value.attr if isinstance(value, ast.Attribute) else getattr(value, "id", "")


def _always_holds(condition: ast.expr) -> bool:
    """Whether `condition` cannot depend on the code: it is true by its form, or names nothing."""
    return _is_true(condition) or not any(isinstance(node, ast.Name) for node in ast.walk(condition))


def _is_true(value: ast.expr) -> bool:
    match value:
        case ast.Constant():
            return bool(value.value)
        case ast.Tuple() | ast.List() | ast.Set():
            return not all(isinstance(one, ast.Starred) for one in value.elts)
        case ast.Dict():
            return any(key is not None for key in value.keys)
        case ast.BoolOp():
            return (any if isinstance(value.op, ast.Or) else all)(map(_is_true, value.values))
        case ast.ListComp(elt=ast.Compare()):  # `all` was forgotten
            return True
    return isinstance(value, ast.GeneratorExp | ast.Lambda | ast.JoinedStr)


def _is_false(value: ast.expr) -> bool:
    return isinstance(value, ast.Constant) and not value.value


# ---- cases


_STAR_IMPORTS = (
    "string", "re", "datetime", "collections", "heapq", "bisect", "copy", "math", "random", "statistics", "itertools",
    "functools", "operator", "io", "sys", "json", "builtins", "typing",
)  # fmt: skip
PRELUDE = (
    "".join(f"from {name} import *\nimport {name}\n" for name in _STAR_IMPORTS) + "sys.setrecursionlimit(600_000)\n"
)
"""Imports that code may use without writing them, as in ROLL (roll/utils/local_code/execute_utils.py, 8eb27cc)."""
_ASSERTIONS = ("pytest", "assert")
_REFUSED = ("text", "check_based")
_BLOCKS = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.If
_UNITTEST = (
    "for unittest write `assert unittest.TextTestRunner().run(unittest.defaultTestLoader.loadTestsFromTestCase(CLASS))"
    ".wasSuccessful()`"
)


@dataclass(frozen=True, kw_only=True)
class AssertionCase:
    """Assertions to run after the code, in its namespace."""

    text: str
    functions: tuple[str, ...]
    """Functions `test_*` of the text, called in this order."""
    parts: tuple[ast.expr, ...]
    """Expressions at which the text decides whether to fail (`failing_parts`)."""

    def counted(self, name: str) -> str:
        """The text with a call of the function `name` wherever the text decides whether to fail."""
        return with_calls(self.text, list(self.parts), name)


@dataclass(frozen=True, kw_only=True)
class OutputCase:
    """Standard input, and the expected standard output."""

    stdin: str
    expected: str


def read_cases(record: Mapping[str, Any], key: str) -> list[AssertionCase | OutputCase]:
    """Reads the tests in `record[key]`, a list or its JSON text.

    Raises ValueError for other values, for tests that cannot fail, and for an unsupported `case_type` of ROLL.
    """
    kind = record.get("case_type")
    if kind in _REFUSED:
        raise ValueError(f"the prompt's case_type is {kind!r}, which is not supported: write assertions (pytest)")
    value = record.get(key)
    try:
        cases = json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the prompt's {key!r} is no JSON of a list of tests: {str(value)[:60]!r} ({error})") from None
    if not isinstance(cases, list) or not cases:
        raise ValueError(f"the prompt's {key!r} holds no list of tests: give a list or its JSON")
    function = str(record.get("test_case_function") or "").strip()
    if kind not in _ASSERTIONS and function not in ("", "None"):
        raise ValueError(f"the prompt's test_case_function is {function[:60]!r}: calls are not supported, only stdin")
    read = [_case(case) for case in cases]
    if all(isinstance(case, OutputCase) and not case.expected.strip() for case in read):
        raise ValueError(f"every test of the prompt's {key!r} expects a blank output, which an empty program has")
    return read


def _case(case: Any) -> AssertionCase | OutputCase:
    if isinstance(case, dict) and "assert_code" in case:
        case = case["assert_code"]
    if isinstance(case, str):
        return _assertions(case)
    if isinstance(case, dict):
        for stdin, expected in (("stdin", "expected_stdout"), ("input", "output")):
            if expected in case:
                return OutputCase(stdin=str(case.get(stdin, "")), expected=str(case[expected]))
    raise ValueError(f"a test is {str(case)[:60]!r}: an assertion, or a pair of stdin and expected_stdout")


def _assertions(text: str) -> AssertionCase:
    """Reads assertions. Raises ValueError for a text that is no Python, or that could not fail."""
    text = text.removeprefix("\ufeff")
    try:
        tree = ast.parse(text)
        parts = failing_parts(tree)
        ast.parse(with_calls(text, parts, "reached"))
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ValueError(f"a test is no Python: {text[:60]!r} ({error})") from None
    body = tree.body
    tests = [node for node in body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")]
    for test in tests:
        arguments = test.args
        if len(arguments.posonlyargs) + len(arguments.args) > len(arguments.defaults):
            raise ValueError(
                f"the test {test.name} takes arguments: fixtures and parameters of pytest are not supported"
            )
    if not tests and all(map(_runs_nothing, body)) and any(isinstance(node, _BLOCKS) for node in body):
        call = "call its function, as in check(NAME) after HumanEval's check(candidate)"
        cure = f"`if __name__` does not run: {_UNITTEST}" if "unittest" in text else call
        raise ValueError(
            f"a test calls nothing: {text[:60]!r}; write assertions, or functions test_* without arguments; {cure}"
        )
    calls = [ast.unparse(node) for node in body if isinstance(node, ast.Expr)]
    if any("unittest.main(" in call or "TextTestRunner(" in call for call in calls):
        raise ValueError(f"a test ignores the result of unittest, or exits with it: {text[:60]!r}; {_UNITTEST}")
    if not parts:
        raise ValueError(f"a test asserts nothing, so that any code passes it: {text[:60]!r}; write assertions")
    return AssertionCase(text=text, functions=tuple(dict.fromkeys(test.name for test in tests)), parts=tuple(parts))


def _runs_nothing(statement: ast.stmt) -> bool:
    """Whether `statement` only defines names, or is the block of a script."""
    if isinstance(statement, ast.If):
        return ast.unparse(statement.test) == "__name__ == '__main__'"
    if isinstance(statement, ast.Assign | ast.AnnAssign | ast.Expr):
        return not any(isinstance(node, ast.Call) for node in ast.walk(statement))
    return isinstance(statement, ast.Import | ast.ImportFrom | ast.Pass | _BLOCKS)
