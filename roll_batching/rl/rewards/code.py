"""Code that the model wrote, run against tests. Limits keep accidents small; they are no wall against malice.

What runs may read this user's files, use the network and start processes. Where that matters, `run` names a command of
yours that reads a Python program from standard input and runs it in a container or virtual machine.
"""

from __future__ import annotations

import json
import os
import re
import resource
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from roll_batching.lifetime import die_with_parent
from roll_batching.rl.rewards.container import Contained, names_container
from roll_batching.rl.rewards.contract import Completion, Score

_BLOCK = re.compile(r"```(?:python3?|py)?[ \t]*\n(.*?)```", re.DOTALL)
_MOST_OUTPUT = 1 << 20
_FILE_SIZE = 16 << 20


def code_tests(
    completion: Completion,
    run: str | Sequence[str] | None = None,
    tests: str = "test_cases",
    *,
    seconds: float = 10.0,
    memory: int = 1024,
    all_or_nothing: bool = False,
) -> Score:
    """The share of its tests that the response's code passes; marks `has_code` and `passes_all`.

    The code is the last fenced block of the response, for Python. `record[tests]` is a list, or its JSON text, of
    assertions to run after it (a text, or `{"assert_code": ...}`), and of `{"stdin": ..., "expected_stdout": ...}`
    (or `input`, `output`), whose output is compared without blanks at line ends. `seconds` and `memory` (MiB) bound
    each test. With `all_or_nothing` the reward is 1 when all tests pass, else 0.

    `run` is `subprocess`, or a command that takes a Python program as its last argument, and standard input, such as
    `[docker, run, --rm, -i, --network=none, --memory=1g, "python:3.12", python, -c]`.

    Raises ValueError for tests that are none.
    """
    assert run is not None  # check_arguments
    cases = [_case(case) for case in _tests(completion.record, tests)]
    blocks = _BLOCK.findall(completion.response)
    if not blocks:
        return Score(reward=0.0, marks={"has_code": False, "passes_all": False})
    passed = sum(_passes(blocks[-1], *case, run, seconds, memory << 20) for case in cases)
    whole = passed == len(cases)
    reward = float(whole) if all_or_nothing else passed / len(cases)
    return Score(reward=reward, marks={"has_code": True, "passes_all": whole})


def check_run(run: str | Sequence[str] | None = None, **others: Any) -> None:
    """Raises ValueError unless `run` says how code may be run."""
    if run is None:
        raise ValueError(
            "it runs what the model wrote, and nothing says that it may: set reward_args.run to subprocess (limits on "
            "time and memory, no security boundary) or to a command that runs it in a container"
        )
    if run == "subprocess":
        return
    if not isinstance(run, list) or not run or not all(isinstance(word, str) for word in run):
        raise ValueError(f"reward_args.run is {run!r}: write subprocess, or a command as a list of words")
    if names_container(run):
        raise ValueError("reward_args.run names its container: leave --name out, every test's container gets its own")


code_tests.check_arguments = check_run  # type: ignore[attr-defined]


def _tests(record: Mapping[str, Any], key: str) -> list[Any]:
    given = record.get(key)
    found = json.loads(given) if isinstance(given, str) else given
    if not isinstance(found, list) or not found:
        raise ValueError(f"the prompt's {key!r} holds no list of tests")
    return found


def _case(case: Any) -> tuple[str, str, str | None]:
    """What follows the code, its standard input, and what it must print (None: it must end well)."""
    if isinstance(case, str):
        return case, "", None
    if isinstance(case, dict) and "assert_code" in case:
        return str(case["assert_code"]), "", None
    if isinstance(case, dict):
        for given, expected in (("stdin", "expected_stdout"), ("input", "output")):
            if expected in case:
                return "", str(case.get(given, "")), str(case[expected])
    raise ValueError(f"a test is {str(case)[:60]!r}: an assertion, or a pair of stdin and expected_stdout")


def _passes(
    code: str, test: str, given: str, expected: str | None, run: str | Sequence[str], seconds: float, memory: int
) -> bool:
    """Whether one test passes: the program ends with 0 within its limits and, where asked, prints what it should."""
    reached = secrets.token_hex(16)  # code that leaves early has passed nothing
    program = f"{code}\n{test}\n" + (f"print('\\n{reached}')\n" if expected is None else "")
    if "\0" in program:  # no Python program, and no word of a command
        return False
    local = run == "subprocess"
    with tempfile.TemporaryDirectory() as folder, open(os.path.join(folder, ".said"), "w+b") as said:
        container = Contained([] if local else run)
        words = [*container.words, program]
        if local:  # from a file, which may be longer than a word of a command
            file = Path(folder, ".program")
            file.write_text(program, encoding="utf-8", errors="replace")
            words = [sys.executable, "-I", str(file)]
        process = subprocess.Popen(
            words,
            stdin=subprocess.PIPE,
            stdout=said,
            stderr=subprocess.DEVNULL,
            cwd=folder,
            env={"PATH": os.environ.get("PATH", ""), "HOME": folder, "TMPDIR": folder} if local else None,
            process_group=0,
            preexec_fn=_bound(_limits(seconds, memory) if local else {}),
        )
        ended = False
        try:
            ended = _finished(process, given.encode("utf-8", "replace"), seconds)
        finally:
            _end(process)
            container.close(ended=ended and process.returncode >= 0)
        if not ended or process.returncode != 0:
            return False
        said.seek(0 if expected is not None else max(0, said.seek(0, os.SEEK_END) - 2 * len(reached)))
        lines = _lines(said.read(_MOST_OUTPUT).decode("utf-8", "replace"))
        return lines == _lines(expected) if expected is not None else lines[-1:] == [reached]


def _limits(seconds: float, memory: int) -> dict[int, int]:
    return {
        resource.RLIMIT_AS: memory,
        resource.RLIMIT_CPU: max(1, round(seconds)),
        resource.RLIMIT_FSIZE: _FILE_SIZE,
        resource.RLIMIT_CORE: 0,
    }


def _bound(limits: Mapping[int, int]) -> Callable[[], None]:
    """What a process does before it runs code: it ends with this one, and takes on `limits`."""
    parent = os.getpid()

    def bind() -> None:
        die_with_parent(parent)
        for what, limit in limits.items():
            most = resource.getrlimit(what)[1]
            wanted = limit if most < 0 else min(limit, most)
            resource.setrlimit(what, (wanted, wanted))

    return bind


def _finished(process: subprocess.Popen[bytes], given: bytes, seconds: float) -> bool:
    until = time.monotonic() + seconds
    try:
        process.communicate(given, timeout=seconds)
        process.wait(max(0.0, until - time.monotonic()))
    except subprocess.TimeoutExpired:
        return False
    return True


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends it and what it started, except what has left its process group."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.strip().splitlines()]
