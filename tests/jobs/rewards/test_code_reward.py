"""The code reward: ROLL's records, code that cheats, and code that tries to end or outlive the job."""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from roll_batching.errors import DataError
from roll_batching.jobs.rewards import Completion
from roll_batching.jobs.rewards.code import check_run, code_tests
from roll_batching.jobs.rewards.judged_code import process, sandbox
from roll_batching.jobs.rewards.judged_code.sandbox import Sandbox
from roll_batching.jobs.rewards.pool import RewardDomain, RewardPool
from roll_batching.jobs.rewards.process import RewardLimits
from tests.jobs.launch.commands import wait_for

CODE_TESTS = "roll_batching.jobs.rewards.code:code_tests"
# docs_roll/docs/User Guides/Pipeline/rlvr_pipeline_start.md has records of this shape.
OF_ROLL = {
    "case_type": "pytest",
    "test_case_function": " ",
    "test_cases": json.dumps(
        [
            {
                "assert_code": "\n\n\ndef test_one():\n    assert permute([1]) == [[1]]\n\ndef test_two():\n"
                "    result = permute([1, 2])\n    assert sorted(result) == [[1, 2], [2, 1]]"
            }
        ]
    ),
}
RIGHT = "def permute(nums: List[int]):\n    return [list(one) for one in permutations(nums)]"


def answer(code: str, *tests: Any, **record: Any) -> Completion:
    record = {"test_cases": list(tests), **record}
    text = f"```python\nassert False\n```</think>It is\n```python\n{code}\n```"
    return Completion(prompt="p", response=text, finished=True, tokens=3, record=record)


def judged(code: str, *tests: Any, seconds: float = 20.0, **record: Any) -> float:
    return code_tests(answer(code, *tests, **record), run="subprocess", seconds=seconds).reward


@pytest.fixture(params=["sandboxed", pytest.param("kept", marks=pytest.mark.slow)])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The sandbox of this machine, and none, as where neither tool works."""
    if request.param == "kept":
        monkeypatch.setattr(
            "roll_batching.jobs.rewards.judged_code.process.best_sandbox", lambda: Sandbox(tool="", user=None)
        )
    elif not sandbox.best_sandbox().tool:
        pytest.skip("no sandbox works on this machine")
    return str(request.param)


# ---- ROLL's records


@pytest.mark.parametrize(
    ("code", "reward"),
    [(RIGHT, 1), ("def permute(nums): return None", 0), ("pass", 0), ("def permute(n): return [n]", 0)],
)
def test_functions_of_rolls_records_are_called(code: str, reward: float) -> None:
    """ROLL 8eb27cc, run_assert_tests: code may leave out imports, and is right when every function ends."""
    assert judged(code, **OF_ROLL) == reward


def test_tests_of_one_text_count_as_one_and_the_share_is_said_otherwise() -> None:
    texts = ["def test_a():\n    assert f() == 1", "def test_b():\n    assert f() == 2", "assert f() == 1"]
    assert judged("def f(): return 1", *texts) == pytest.approx(2 / 3)
    completion = answer("def f(): return 1", *texts)
    assert code_tests(completion, run="subprocess", all_or_nothing=True).reward == 0


def test_the_main_block_of_an_answer_runs_as_a_script_alone() -> None:
    code = "def f(): return 1\nif __name__ == '__main__':\n    print(int(input()) + 1)"
    assert judged(code, "assert f() == 1", {"stdin": "4\n", "expected_stdout": "5"}) == 1


UNITTEST = """import unittest
class T(unittest.TestCase):
    def test_a(self): self.assertEqual(f(), 1)
"""


def test_unittest_and_humaneval_count_in_the_form_that_errors_name() -> None:
    suite = "unittest.defaultTestLoader.loadTestsFromTestCase(T)"
    for test in (
        f"{UNITTEST}assert unittest.TextTestRunner().run({suite}).wasSuccessful()",
        "METADATA = {}\ndef check(candidate):\n    assert candidate() == 1\ncheck(f)",
    ):
        assert judged("def f(): return 1", test) == 1
        assert judged("def f(): return 2", test) == 0


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("record", "words"),
    [
        ({"test_cases": ["def check(f):\n    assert f() == 1"]}, "a test calls nothing"),
        ({"test_cases": ["class TestIt:\n    def test_a(self):\n        assert False"]}, "a test calls nothing"),
        ({"test_cases": ["METADATA = {}\ndef check(f):\n    assert f() == 1"]}, r"calls nothing.*check\(NAME\)"),
        (
            {"test_cases": [UNITTEST + "if __name__ == '__main__':\n    unittest.main()"]},
            "does not run: for unittest write",
        ),
        ({"test_cases": [UNITTEST + "unittest.main(exit=False)"]}, "ignores the result of unittest"),
        ({"test_cases": ["async def test_a():\n    assert False"]}, "a test calls nothing"),
        ({"test_cases": ["def test_a(x):\n    assert False"]}, "takes arguments: fixtures"),
        ({"test_cases": ["def test_a("]}, "a test is no Python"),
        ({"test_cases": ["assert 1"], "case_type": "text"}, "case_type is 'text', which is not supported"),
        ({"test_cases": ["assert 1"], "case_type": "check_based"}, "is 'check_based', which is not supported"),
        ({"test_cases": [{"stdin": "1", "expected_stdout": "1"}], "test_case_function": "solve"}, "is 'solve': calls"),
        ({"test_cases": [7]}, "a test is '7'"),
    ],
)
def test_tests_that_would_pass_or_fail_whatever_the_code_does_are_refused(record: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        judged("def f(): return 1", **record)


ASSERTS_NOTHING = {
    "no assertion": "x = 1",
    "a call": "f()",
    "under if False": "if False:\n    assert f() == 1",
    "in a loop that never runs": "while 0:\n    assert f() == 1",
    "a constant": "assert True",
    "a text": "assert 'f() == 1'",
    "in a function": "def test_a():\n    f()",
    "a tuple": "assert (f() == 1, 'wrong')",
    "a list": "assert [f() == 1]\nassert [f() == x for x in range(3)]",
    "a dict": "assert {'wrong': f()}",
    "a generator": "assert (f() == x for x in range(3))",
    "a lambda": "assert lambda: f() == 1",
    "an f-string": "assert f'{f()} == 1'",
    "no name": "assert 1 == 1",
    "or True": "assert f() == 1 or True",
    "a tuple for unittest": "from unittest import TestCase\nTestCase().assertTrue((f() == 1, 'wrong'))",
    "caught": "try:\n    assert f() == 1\nexcept AssertionError:\n    print('wrong')",
    "caught with others": "try:\n    if f() != 1: raise ValueError\nexcept (KeyError, Exception) as e:\n    pass",
    "caught by all": "import sys\ntry:\n    if f() != 1: sys.exit(1)\nexcept:\n    pass",
    "suppressed": "import contextlib\nwith contextlib.suppress(AssertionError):\n    assert f() == 1",
}


@pytest.mark.bad_input
@pytest.mark.parametrize("name", ASSERTS_NOTHING)
def test_a_test_that_asserts_nothing_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="a test asserts nothing, so that any code passes it"):
        judged("def f(): return 1", "assert f() == 1", ASSERTS_NOTHING[name])
    with pytest.raises(ValueError, match="expects a blank output, which an empty program has"):
        judged("", {"stdin": "1", "expected_stdout": " \n"})


REACHED = {
    "in a loop": "for x in f():\n    assert x",
    "after a return": "def test_a():\n    if not f(): return\n    assert f() == [1]",
    "in a function that f calls": "def check(x):\n    assert x\nfor x in f(): check(x)",
    "numpy's": "import numpy as np\nfor x in f():\n    np.testing.assert_equal(x, 1)",
    "unittest's": "from unittest import TestCase\nfor x in f(): TestCase().assertEqual(x, 1)",
}
NEVER_REACHED_WHEN_RIGHT = {
    "raise under if": "if f() != [1]: raise ValueError('é')\nelif not f():\n    raise ValueError",
    "assert False after what must raise": "try:\n    f()[7]\n    assert False\nexcept IndexError:\n    pass",
    "raise in else": "try:\n    f()[7]\nexcept IndexError:\n    pass\nelse:\n    raise ValueError",
    "a case": "match f():\n    case [1]: pass\n    case _: raise ValueError",
    "pytest.fail": "import pytest\ndef test_a():\n    if f() != [1]: pytest.fail('wrong')",
    "pytest.fail under Exception": "import pytest\ntry:\n    f()[7]\n    pytest.fail('')\nexcept Exception: pass",
    "unittest's fail": "from unittest import TestCase\nif f() != [1]:\n    TestCase().fail('wrong')",
    "sys.exit": "import sys\nif f() != [1]:\n    sys.exit(1)",
    "os._exit": "import os\nif f() != [1]:\n    os._exit(1)",
    "SystemExit": "if f() != [1]: raise SystemExit",
    "caught and raised again": "try:\n    assert f() == [1]\nexcept AssertionError:\n    raise\nexcept Exception: pass",
    "another error is caught": "try:\n    assert f() == [1]\nexcept KeyError:\n    pass",
    "two on one line, after é": "é = f(); assert é == [1], 'é'; assert (x := len(é)) == 1\r\nassert x",
    "over lines": "assert (f() ==\n        [  # one\n 1])",
}


@pytest.mark.parametrize("name", REACHED)
def test_a_test_that_ends_before_an_assertion_is_not_passed(name: str) -> None:
    right, empty = (code_tests(answer(f"def f(): return {value}", REACHED[name]), run="subprocess")
                    for value in ("[1]", "[]"))  # fmt: skip
    assert (right.reward, right.marks["asserts_nothing"]) == (1, False)
    assert (empty.reward, empty.marks["asserts_nothing"]) == (0, True)


@pytest.mark.parametrize("name", NEVER_REACHED_WHEN_RIGHT)
def test_what_fails_otherwise_than_by_an_assertion_counts(name: str) -> None:
    test = NEVER_REACHED_WHEN_RIGHT[name]
    assert judged("def f(): return [1]", test) == 1
    assert judged("def f(): return {7: 1}", test) == 0 == judged("def f(): return [2] * 9", test)


# ---- code that cheats: each is an answer to tests that it does not pass

CHEATS = {
    "leaves with 0": "import os; os._exit(0)",
    "exits": "import sys; sys.exit(0)",
    "at exit": "import atexit, os; atexit.register(os._exit, 0); raise SystemExit",
    "prints the secret of its program": """
import os, re, sys
text = open(sys.argv[0]).read() if os.path.exists(sys.argv[0]) else str(sys.orig_argv)
for secret in re.findall('[0-9a-f]{32}', text):
    print(secret, flush=True)
    for fd in range(3, 21):
        try: os.write(fd, b'loaded' + secret.encode())
        except OSError: pass
os._exit(0)""",
    "looks into itself": """
import glob, os
for path in ['/proc/self/cmdline', '/proc/self/environ', *glob.glob('*'), *glob.glob('.*')]:
    try: data = open(path, 'rb').read()
    except OSError: continue
    for fd in range(1, 21):
        try: os.write(fd, data)
        except OSError: pass
os._exit(0)""",
    "writes everywhere": """
import os
for fd in range(0, 21):
    try: os.write(fd, b'loaded' * 100)
    except OSError: pass
""",
    "says that it has been loaded": """
import os
for fd in range(3, 21):
    try: os.write(fd, b'loaded')
    except OSError: pass
os._exit(0)""",
    "patches builtins and asserts": """
import builtins, unittest
builtins.AssertionError = type('Never', (Exception,), {})
builtins.sorted = lambda *_: type('Any', (), {'__eq__': lambda *_: True})()
unittest.TestCase.assertEqual = lambda *_: None
def f(): return [3]
""",
    "traces": """
import sys
def skip(frame, event, _):
    if frame.f_code.co_filename == 'tests' and event == 'line': frame.f_lineno += 1
    return skip
sys.settrace(skip)
def f(): return [3]
""",
    "replaces what runs the tests": """
import builtins, os, json
os.read = lambda *_: b''
os._exit = lambda *_: None
builtins.exec = builtins.compile = lambda *_: None
json.loads = lambda *_: ('', '', [])
def f(): return [3]
""",
    "kills its parent": "import os, signal; os.kill(os.getppid(), signal.SIGKILL); os._exit(0)",
    "hides in a copy": "import os\nif os.fork(): os._exit(0)\ndef f(): return [3]",
    "nests beyond any stack": "x = " + "(" * 5000 + ")" * 5000,
    "closes its streams": "import os; os.closerange(0, 100); os._exit(0)",
    "traces its parent": """
import ctypes, os
libc = ctypes.CDLL(None)
print(libc.ptrace(16, os.getppid(), 0, 0), open(f'/proc/{os.getppid()}/mem', 'rb').read(1))
""",
    "takes all memory": "x = bytearray(1 << 40)",
    "waits": "import time; time.sleep(100)",
}


@pytest.mark.bad_input
@pytest.mark.parametrize("name", CHEATS)
def test_code_that_cheats_gets_nothing(name: str, way: str) -> None:
    assert judged(CHEATS[name], "assert sorted(f()) == [2]", seconds=4) == 0


@pytest.mark.bad_input
def test_nothing_of_the_tests_is_there_while_the_code_is_loaded(way: str) -> None:
    """Neither the expected values nor the secret stand in what it can read."""
    code = """
import glob, os, gc, sys
seen = []
for path in [*glob.glob('/proc/self/*'), *glob.glob('**', recursive=True), *glob.glob('.*')]:
    try: seen.append(open(path, 'rb').read(1 << 20))
    except OSError: pass
frame = sys._getframe()
while frame:
    seen.append(repr(frame.f_locals).encode('utf-8', 'replace'))
    frame = frame.f_back
FOUND = any(('98765' + '4321').encode() in text for text in seen)
"""
    assert judged(code, "assert FOUND is False and 987654321") == 1


# ---- secrets, processes, folders


@pytest.mark.bad_input
def test_keys_of_the_job_are_out_of_its_reach(way: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """In its own environment, and in that of the processes that it can see."""
    monkeypatch.setenv("HF_TOKEN", "hf_secret_value")
    code = """
import glob, os
seen = [str(dict(os.environ)).encode()]
here = os.getppid()
while here:
    try:
        words = open(f'/proc/{here}/cmdline', 'rb').read()
        if not any(own in words for own in (b'rewards.worker', b'subreaper', b'unshare')): break
        seen.append(open(f'/proc/{here}/environ', 'rb').read())
        here = int(open(f'/proc/{here}/stat').read().rpartition(')')[2].split()[1])
    except OSError: break
LEAKED = any(b'hf_secret' + b'_value' in text for text in seen)
"""
    domain = RewardDomain(path=CODE_TESTS, arguments={"run": "subprocess"})
    with RewardPool(domain) as pool:
        assert pool.score([answer(code, "assert LEAKED is False")], [0], seed=0).rewards.tolist() == [1]
        child = pool._workers[0][0]._process
        assert child is not None and b"hf_secret_value" not in Path(f"/proc/{child.pid}/environ").read_bytes()
    if way == "sandboxed":
        everywhere = code.split("here =")[0] + (
            "\nfor path in glob.glob('/proc/[0-9]*/environ'):\n    try: seen.append(open(path, 'rb').read())\n"
            "    except OSError: pass\nLEAKED = any(b'hf_secret' + b'_value' in text for text in seen)"
        )
        assert judged(everywhere, "assert LEAKED is False") == 1


@pytest.mark.bad_input
def test_what_it_starts_ends_with_it(way: str) -> None:
    """In a session of its own, with its parent gone, however the test ends."""
    started = {
        "right": "def f(): return 1",
        "wrong": "def f(): return 2",
        "leaves": "os._exit(0)",
        "late": "time.sleep(60)",
    }
    for number, (name, rest) in enumerate(started.items()):
        mark = f"{os.getpid()}7654{number}"
        code = f"""
import os, subprocess, time
if os.fork() == 0:
    os.setsid()
    subprocess.Popen(['sleep', '{mark}'], start_new_session=True)
    os._exit(0)
time.sleep(0.5)
{rest}"""
        assert judged(code, "assert f() == 1", seconds=3) == (name == "right")
        wait_for(lambda m=mark: not [p for p in psutil.process_iter(["cmdline"]) if m in (p.info["cmdline"] or ())], 5)


@pytest.mark.bad_input
@pytest.mark.skipif(os.geteuid() == 0, reason="root has no limit of processes")
def test_processes_without_end(way: str) -> None:
    code = "import os\nwhile True: os.fork()"
    assert judged(code, "assert f() == 1", seconds=3) == 0
    wait_for(lambda: len(psutil.pids()) < 5000, 10)


@pytest.mark.bad_input
def test_many_processes_end_at_once(way: str) -> None:
    """As root too, where no limit counts them: they end with the test, and this machine goes on."""
    mark = f"{os.getpid()}8888"
    code = f"import subprocess, time\nfor _ in range(100): subprocess.Popen(['sleep', '{mark}'])\ntime.sleep(60)"
    assert judged(code, "assert f() == 1", seconds=3) == 0
    assert not [p for p in psutil.process_iter(["cmdline"]) if mark in (p.info["cmdline"] or ())]


DEEP = "import os\nfor _ in range(1500):\n    os.mkdir('d'); os.chdir('d')\ndef f(): return 1"
WRITING = """
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        while True: open(f'x{time.time_ns()}', 'w')
    os._exit(0)
def f(): return 1"""
LOCKED = "import os\nos.makedirs('a/b'); open('a/b/c', 'w'); os.chmod('a/b', 0); os.chmod('a', 0)\ndef f(): return 1"


def folders() -> list[Path]:
    """Folders of judged code of this process; tests beside this one have theirs."""
    return list(process._process_folder().iterdir())


@pytest.mark.bad_input
@pytest.mark.parametrize("code", [DEEP, WRITING, LOCKED], ids=["deep", "writing", "locked"])
def test_its_folder_goes_whatever_is_in_it(code: str, way: str) -> None:
    before = folders()
    assert judged(code, "assert f() == 1") == 1
    assert set(folders()) <= set(before)


@pytest.mark.bad_input
@pytest.mark.parametrize("ended", ["late", "killed"])
def test_its_folder_goes_with_the_process_that_judges(
    ended: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    code = DEEP + "\nimport time; time.sleep(60)"
    domain = RewardDomain(path=CODE_TESTS, arguments={"run": "subprocess", "seconds": 300})
    with RewardPool(domain, limits=RewardLimits(seconds=6)) as pool:
        if ended == "late":
            with pytest.raises(DataError, match="did not return within 6 s"):
                pool.score([answer(code, "assert f() == 1")], [0], seed=0)
        else:
            (process,) = pool._workers[0]
            process.call(answer(code, "assert f() == 1"), 0, 0)
            wait_for(lambda: list(tmp_path.glob("roll-batching-code-*/*")), 20)
            time.sleep(1)
            assert process._process is not None
            process._process.kill()
    wait_for(lambda: not list(tmp_path.glob("roll-batching-code-*")), 30)


# ---- what is said


def test_what_confines_it_is_said(capfd: pytest.CaptureFixture[str]) -> None:
    domain = RewardDomain(path=CODE_TESTS, arguments={"run": "subprocess"})
    with RewardPool(domain) as pool:
        (notice,) = pool.start()
    assert notice == f"{CODE_TESTS}: {check_run('subprocess')}"
    tool = sandbox.best_sandbox().tool
    assert (f"in namespaces of {tool}" if tool else "without a sandbox") in notice
    assert "Install bubblewrap" in Sandbox(tool="", user=None).describe()
    assert "as the user nobody" in Sandbox(tool="", user=65534).describe()
    with RewardPool(RewardDomain(path=CODE_TESTS, arguments={"run": ["podman", "run"]})) as pool:
        assert pool.start() == []


@pytest.mark.skipif(os.geteuid() != 0 or not os.access("/usr/bin/python3", os.X_OK), reason="needs root")
def test_root_judges_as_nobody_where_nobody_can_run_python(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/usr/bin/python3")
    monkeypatch.setattr(shutil, "which", lambda name: None)
    sandbox.best_sandbox.cache_clear()
    try:
        found = sandbox.best_sandbox()
        assert found == Sandbox(tool="", user=65534)
        monkeypatch.setattr("roll_batching.jobs.rewards.judged_code.process.best_sandbox", lambda: found)
        code = "import os\ntry: os.kill(os.getppid(), 0)\nexcept PermissionError: pass\nopen('here', 'w').write('x')"
        assert judged(code, "assert os.getuid() == 65534", {"stdin": "", "expected_stdout": ""}) == 1
        bomb = "import os, time\nn = 0\ntry:\n    while n < 2000:\n        if os.fork() == 0: time.sleep(60)\n"
        assert judged(bomb + "        n += 1\nexcept OSError: pass", "assert 0 < n < 300") == 1
    finally:
        sandbox.best_sandbox.cache_clear()
