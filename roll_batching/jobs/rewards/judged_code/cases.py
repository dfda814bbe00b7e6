"""Tests of the model's code, from a line of the data file in the formats of ROLL."""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from roll_batching.jobs.rewards.judged_code.assertions import failing_parts, with_calls

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
    """Where it decides whether to fail."""

    def counted(self, name: str) -> str:
        """The text with calls of the function `name` where it decides whether to fail."""
        return with_calls(self.text, list(self.parts), name)


@dataclass(frozen=True, kw_only=True)
class OutputCase:
    """Standard input, and the expected standard output."""

    stdin: str
    expected: str


def read_cases(record: Mapping[str, Any], key: str) -> list[AssertionCase | OutputCase]:
    """The tests in `record[key]`: a list, or its JSON text.

    Raises ValueError for other values, for tests that cannot fail, and for an unsupported `case_type` of ROLL.
    """
    kind = record.get("case_type")
    if kind in _REFUSED:
        raise ValueError(f"the prompt's case_type is {kind!r}, which is not supported: write assertions (pytest)")
    given = record.get(key)
    try:
        cases = json.loads(given) if isinstance(given, str) else given
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the prompt's {key!r} is no JSON of a list of tests: {str(given)[:60]!r} ({error})") from None
    if not isinstance(cases, list) or not cases:
        raise ValueError(f"the prompt's {key!r} holds no list of tests")
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
        for given, expected in (("stdin", "expected_stdout"), ("input", "output")):
            if expected in case:
                return OutputCase(stdin=str(case.get(given, "")), expected=str(case[expected]))
    raise ValueError(f"a test is {str(case)[:60]!r}: an assertion, or a pair of stdin and expected_stdout")


def _assertions(text: str) -> AssertionCase:
    text = text.removeprefix("\ufeff")
    try:
        tree = ast.parse(text)
        parts = failing_parts(tree)
        ast.parse(with_calls(text, parts, "reached"))
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ValueError(f"a test is no Python: {text[:60]!r} ({error})") from None
    body = tree.body
    tests = [one for one in body if isinstance(one, ast.FunctionDef) and one.name.startswith("test_")]
    for test in tests:
        arguments = test.args
        if len(arguments.posonlyargs) + len(arguments.args) > len(arguments.defaults):
            raise ValueError(
                f"the test {test.name} takes arguments: fixtures and parameters of pytest are not supported"
            )
    if not tests and all(map(_runs_nothing, body)) and any(isinstance(one, _BLOCKS) for one in body):
        call = "call its function, as in check(NAME) after HumanEval's check(candidate)"
        cure = f"`if __name__` does not run: {_UNITTEST}" if "unittest" in text else call
        raise ValueError(
            f"a test calls nothing: {text[:60]!r}; write assertions, or functions test_* without arguments; {cure}"
        )
    calls = [ast.unparse(one) for one in body if isinstance(one, ast.Expr)]
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
