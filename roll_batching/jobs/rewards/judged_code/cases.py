"""Tests of the model's code, from a line of the data file in the formats of ROLL."""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

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


@dataclass(frozen=True, kw_only=True)
class AssertionCase:
    """Assertions to run after the code, in its namespace."""

    text: str
    functions: tuple[str, ...]
    """Functions `test_*` of the text, called in this order."""


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
    cases = json.loads(given) if isinstance(given, str) else given
    if not isinstance(cases, list) or not cases:
        raise ValueError(f"the prompt's {key!r} holds no list of tests")
    function = str(record.get("test_case_function") or "").strip()
    if kind not in _ASSERTIONS and function not in ("", "None"):
        raise ValueError(f"the prompt's test_case_function is {function[:60]!r}: calls are not supported, only stdin")
    return [_case(case) for case in cases]


def _case(case: Any) -> AssertionCase | OutputCase:
    if isinstance(case, dict) and "assert_code" in case:
        case = case["assert_code"]
    if isinstance(case, str):
        return AssertionCase(text=case, functions=_functions(case))
    if isinstance(case, dict):
        for given, expected in (("stdin", "expected_stdout"), ("input", "output")):
            if expected in case:
                return OutputCase(stdin=str(case.get(given, "")), expected=str(case[expected]))
    raise ValueError(f"a test is {str(case)[:60]!r}: an assertion, or a pair of stdin and expected_stdout")


def _functions(text: str) -> tuple[str, ...]:
    try:
        body = ast.parse(text).body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ValueError(f"a test is no Python: {text[:60]!r} ({error})") from None
    tests = [one for one in body if isinstance(one, ast.FunctionDef) and one.name.startswith("test_")]
    for test in tests:
        arguments = test.args
        if len(arguments.posonlyargs) + len(arguments.args) > len(arguments.defaults):
            raise ValueError(
                f"the test {test.name} takes arguments: fixtures and parameters of pytest are not supported"
            )
    defined = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom)
    if not tests and all(isinstance(one, defined) for one in body):
        raise ValueError(
            f"a test calls nothing: {text[:60]!r}; write assertions, or functions test_* without arguments"
        )
    return tuple(dict.fromkeys(test.name for test in tests))
