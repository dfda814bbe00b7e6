"""Reward by tests of the response's code, run in a sandbox or by a command of yours."""

from __future__ import annotations

import inspect
import json
import re
import secrets
import tempfile
from collections.abc import Sequence
from typing import Any, Literal

from roll_batching.jobs.rewards.contract import Completion, PromptLine, Score
from roll_batching.jobs.rewards.judged_code import assertion_runner
from roll_batching.jobs.rewards.judged_code.cases import PRELUDE, AssertionCase, OutputCase, read_cases
from roll_batching.jobs.rewards.judged_code.process import SUBPROCESS, JudgedProcess, names_container
from roll_batching.jobs.rewards.judged_code.sandbox import best_sandbox

_BLOCK = re.compile(r"```(?:python3?|py)?[ \t]*\n(.*?)```", re.DOTALL)
_MOST_OUTPUT = 1 << 20
_Result = Literal["passed", "failed", "asserted nothing"]


def code_tests(
    completion: Completion,
    run: str | Sequence[str] | None = None,
    tests: str = "test_cases",
    *,
    seconds: float = 10.0,
    memory: int = 1024,
    all_or_nothing: bool = False,
) -> Score:
    """Returns the share of tests that the response's code passes; marks `has_code`, `passes_all`, `asserts_nothing`.

    The code is the last fenced block for Python after the last `</think>`. `record[tests]` is a list, or its JSON text,
    of assertions to run after it (a text, or `{"assert_code": ...}`), whose functions `test_*` are called, and of
    `{"stdin": ..., "expected_stdout": ...}` (or `input`, `output`), whose output is compared without blanks at line
    ends. A test that ends without reaching an assert, as in a loop over an empty result, fails and sets the mark
    `asserts_nothing`. The code may use the modules that ROLL imports. `seconds` and `memory` (MiB) bound each test.
    With `all_or_nothing`, as in ROLL, the reward is 1 when all tests pass, else 0.

    `run` is `subprocess`, or a command to which the Python program is appended and which passes stdin on, such as
    `[docker, run, --rm, -i, --network=none, --memory=1g, "python:3.12", python, -c]`.

    Raises ValueError for invalid tests.
    """
    assert run is not None  # check_run has refused None
    cases = read_cases(completion.record, tests)
    blocks = _BLOCK.findall(completion.response.rpartition("</think>")[2])
    if not blocks:
        return Score(reward=0.0, marks={"has_code": False, "passes_all": False, "asserts_nothing": False})
    code = PRELUDE + blocks[-1]
    results = [_run(code, case, run, seconds, memory << 20) for case in cases]
    passed = results.count("passed")
    passes_all = passed == len(cases)
    reward = float(passes_all) if all_or_nothing else passed / len(cases)
    marks = {"has_code": True, "passes_all": passes_all, "asserts_nothing": "asserted nothing" in results}
    return Score(reward=reward, marks=marks)


def check_run(run: str | Sequence[str] | None = None, **others: Any) -> str:
    """Checks `run`; returns a notice about the sandbox, or "". Raises ValueError for another value."""
    if run is None:
        raise ValueError(
            "it runs what the model wrote, and nothing says that it may: set reward_args.run to subprocess (in a "
            "sandbox where one works) or to a command that runs it in a container"
        )
    if run == SUBPROCESS:
        return best_sandbox().describe()
    if not isinstance(run, list) or not run or not all(isinstance(word, str) for word in run):
        raise ValueError(f"reward_args.run is {run!r}: write subprocess, or a command as a list of words")
    if names_container(run):
        raise ValueError("reward_args.run names its container: leave --name out, every test's container gets its own")
    return ""


def check_tests(line: PromptLine, *, tests: str = "test_cases", **_: Any) -> None:
    """Raises ValueError for tests that cannot be read, or cannot fail."""
    read_cases(line.record, tests)


code_tests.check_arguments = check_run  # type: ignore[attr-defined]
code_tests.check_record = check_tests  # type: ignore[attr-defined]


def _run(code: str, case: AssertionCase | OutputCase, run: str | Sequence[str], seconds: float, memory: int) -> _Result:
    """Runs one test within its limits, and returns its result."""
    if "\0" in code:  # neither a Python program nor an argument can hold it
        return "failed"
    if isinstance(case, AssertionCase):
        # The runner prints the secret if the test passes, and the secret reversed if no assert was reached. It is sent
        # after the code has been loaded: code that exits early cannot print it.
        secret = secrets.token_hex(16)
        reached = f"reached_{secrets.token_hex(16)}"
        test = json.dumps([secret, reached, case.counted(reached), case.functions]).encode()
        loaded = assertion_runner.LOADED
        with JudgedProcess(inspect.getsource(assertion_runner), run, seconds, memory) as process:
            if not process.send(_framed(code.encode("utf-8", "replace"))) or process.receive(len(loaded)) != loaded:
                return "failed"
            reply = process.receive(len(secret)) if process.send(_framed(test)) else b""
            if not process.finish():
                return "failed"
        results: dict[bytes, _Result] = {secret.encode(): "passed", secret[::-1].encode(): "asserted nothing"}
        return results.get(reply, "failed")
    with tempfile.TemporaryFile() as output:
        with JudgedProcess(code, run, seconds, memory, output=output) as process:
            process.send(case.stdin.encode("utf-8", "replace"))
            if not process.finish():
                return "failed"
        output.seek(0)
        is_right = _lines(output.read(_MOST_OUTPUT).decode("utf-8", "replace")) == _lines(case.expected)
        return "passed" if is_right else "failed"


def _framed(data: bytes) -> bytes:
    """`data` after its length, as the runner reads it."""
    return len(data).to_bytes(4, "big") + data


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.strip().splitlines()]
