"""`scripts/slow_suite.sh` and `--part`: every slow test has a turn, and `.ci/run` takes one after the default tests."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import part_of

ROOT = Path(__file__).parents[2]
SUITES = ("layouts", "models", "streams", "rehearse", "cluster")
"""Those whose slow tests have turns; `pages` is run by its name alone."""
SLOW = """
@pytest.mark.slow
@pytest.mark.{suite}
@pytest.mark.parametrize("number", range(5))
def test_{suite}(number): ...
"""
OTHERS = """
@pytest.mark.slow
def test_of_no_suite(): ...

@pytest.mark.models
def test_quick(): ...

@pytest.mark.streams
@pytest.mark.slow
def test_endless(): time.sleep(1000)
"""


@pytest.fixture
def file(tmp_path):
    """Tests of every suite, with the settings of this repository's."""
    file = tmp_path / "test_few.py"
    file.write_text("import time\n\nimport pytest\n" + "".join(SLOW.format(suite=name) for name in SUITES) + OTHERS)
    return file


def run(*arguments, **variables):
    command = [str(ROOT / "scripts" / "slow_suite.sh"), "--no-install", *map(str, arguments)]
    environment = {**os.environ, "PYTHON": sys.executable, "PYTHONPATH": str(ROOT), **variables}
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=environment)


def collected(file, *arguments):
    """The tests of `file` that a call selects."""
    done = run(*arguments, "--collect-only", "-q", "-p", "tests.conftest", f"--rootdir={ROOT}", file)
    assert done.returncode in (0, 5), done.stdout + done.stderr  # 5: a part that has no test
    return [line.partition("::")[2] for line in done.stdout.splitlines() if "::" in line]


def test_every_slow_test_has_one_turn(file):
    turns = dict.fromkeys(run("--turns").stdout.splitlines())
    parts = {
        suite: [turn.split()[1] for turn in turns if turn.split()[0] == suite]
        for suite in (*SUITES, "benchmarks", "rest")
    }
    releases = [turn.removeprefix("versions ") for turn in turns if turn.startswith("versions ")]
    assert releases == ["0.17.1", "0.18.2", "0.19.2"]  # the environment itself has 0.16.1
    of_others = len(releases) + sum(turn.startswith(("te ", "engines ")) for turn in turns)
    assert len(turns) - of_others == sum(map(len, parts.values()))
    for texts in parts.values():
        found = [test for text in texts for test in part_of(range(7), text)]
        assert sorted(found) == list(range(7)), texts
    assert collected(file, "rest") == ["test_of_no_suite"]
    last = list(turns).index("layouts 2/6") + len(turns)
    assert collected(file, "--turn", last) == ["test_layouts[1]"]


@pytest.mark.slow
def test_a_suite_by_name_is_whole(file):
    for suite in SUITES[:4]:
        assert collected(file, suite)[:5] == [f"test_{suite}[{number}]" for number in range(5)]


@pytest.mark.slow
def test_a_turn_has_a_limit_and_the_last_lines_are_pytests(file):
    turn = run("--turns").stdout.splitlines().index("streams 1/2")
    options = ["--turn", turn, "-k", "endless", "-p", "tests.conftest", f"--rootdir={ROOT}", file]
    done = run(*options, SLOW_SUITE_MINUTES="0.5")
    assert done.returncode == 124 and "KeyboardInterrupt" in done.stdout, done.stdout + done.stderr
    assert "27 deselected" in done.stdout.splitlines()[-1]


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("arguments", "words"),
    [(["clusters"], "There is no suite 'clusters'"), (["--turn", "x"], "--turn needs a number, not 'x'")],
)
def test_what_there_is_not(arguments, words):
    done = run(*arguments)
    assert done.returncode == 2 and words in done.stderr
    for text in ("3/2", "0/2", "two", "1/2/3"):
        with pytest.raises(pytest.UsageError, match=f"--part has no part '{text}'"):
            part_of([], text)


def test_ci_takes_one_after_the_default_tests():
    last = (ROOT / ".ci" / "run").read_text().splitlines()[-2:]
    assert last == ["./scripts/test.sh", "exec ./scripts/slow_suite.sh"]
