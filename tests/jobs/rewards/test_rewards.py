"""Reward functions in worker processes: valid results, and an error for every kind of failure."""

from __future__ import annotations

import copy
import os
import pickle
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from roll_batching.errors import ConfigError, DataError
from roll_batching.jobs.rewards import Completion, final_answer
from roll_batching.jobs.rewards.pool import RewardDomain, RewardPool
from roll_batching.jobs.rewards.process import RewardLimits
from tests.jobs.launch.commands import wait_for

HERE = "tests.jobs.rewards.reward_functions:"


def one_reward(path, arguments=None, *, limit=300.0, notice_after=10.0, memory=None, **options):
    limits = RewardLimits(seconds=limit, notice_after=notice_after, memory=memory)
    return RewardPool(RewardDomain(path=path, arguments=arguments or {}), limits=limits, **options)


def completion(response="#12", finished=True, answer="12", prompt="a+9="):
    record = {"prompt": prompt, "answer": answer}
    return Completion(
        prompt=prompt, response=response, finished=finished, tokens=len(response), answer=answer, record=record
    )


@pytest.fixture(scope="module")
def failing():
    """One process for all that a function may do without ending it."""
    rewards = {}

    def named(name, **arguments):
        key = (name, *arguments.items())
        if key not in rewards:
            rewards[key] = one_reward(HERE + name, arguments, limit=60)
        return rewards[key]

    yield named
    for reward in rewards.values():
        reward.close()


def scored(reward, *completions, ids=None, seed=0):
    return reward.score(completions, ids or list(range(len(completions))), seed=seed)


@pytest.mark.parametrize(
    ("response", "finished", "reward", "shows_work"),
    [
        ("#12", True, 1, False),
        ("a00+9=09;#12", True, 1, True),
        ("#12", False, 0, False),  # ran out of room
        ("#1", True, 0, False),
        ("#12;", True, 0, False),
        ("12", True, 0, False),
        ("#7#12", True, 1, True),
        ("", True, 0, False),
    ],
)
def test_final_answer(response, finished, reward, shows_work):
    result = final_answer(completion(response, finished))
    assert (result.reward, result.marks["shows_work"]) == (reward, shows_work)


def test_a_function_of_the_users_own_is_found_in_the_working_directory(tmp_path, monkeypatch):
    (tmp_path / "my_task.py").write_text("def brevity(completion, scale=1):\n    return scale / completion.tokens\n")
    monkeypatch.chdir(tmp_path)
    with one_reward("my_task:brevity", {"scale": 2}) as reward:
        assert scored(reward, completion("#123"), completion("#1234567")).rewards.tolist() == [0.5, 0.25]


def test_neither_torch_nor_megatron_is_imported_for_it():
    code = "import sys, roll_batching.jobs.rewards.worker; print({'torch', 'megatron', 'pydantic'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "set()\n"


@pytest.mark.parametrize(
    ("what", "value"),
    [("int", 3), ("bool", 1), ("numpy", 0.5), ("array of none", 2), ("tensor", 1.5), ("marks", 1)],
)
def test_numbers_of_every_kind_are_taken(what, value):
    with one_reward(HERE + "takes", {"what": what}) as reward:
        result = scored(reward, completion())
    assert result.rewards.tolist() == [value]
    assert {name: mark.tolist() for name, mark in result.marks.items()} == (
        {"right": [True], "wrong": [False]} if what == "marks" else {}
    )


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("nocolon", "write it as package.module:name"),
        ("no_such_module:f", "cannot import 'no_such_module'"),
        ("math:no_such", "has no 'no_such'"),
        ("math:pi", "not a function"),
        ("broken:f", "cannot import 'broken' (SyntaxError: invalid syntax (broken.py, line 2))"),
        ("leaving:f", "cannot import 'leaving' (SystemExit: 0 at "),
        ("vanishing:f", "failed on the import of its module: its process ended with exit code 0"),
        (
            "tests.jobs.rewards.reward_functions:slow",
            "a completion alone (no reward_args): missing a required argument: 'seconds'",
        ),
    ],
)
def test_a_path_that_leads_nowhere(path, words, tmp_path, monkeypatch, report):
    for name, text in {"broken": "x = 1\ndef", "leaving": "exit(0)", "vanishing": "import os; os._exit(0)"}.items():
        (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    with one_reward(path) as reward, pytest.raises(ConfigError) as caught:
        reward.start()
    assert words in str(caught.value)
    report(f"reward function {path!r}: {caught.value}")


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("nan", "the reward is nan"),
        ("infinity", "the reward is inf"),
        ("none", "returned a NoneType, None, not a number"),
        ("text", "returned a str, '1.0', not a number"),
        ("huge", "which no float can hold"),
        ("overflowing", "the reward is -1e+39, above 1e+15"),
        ("list", "returned a list, [1.0], not a number"),
        ("array", "returned an array of shape (1,), not a number"),
        ("coroutine", "returned a coroutine"),
        ("missing key", "KeyError: 'missing' at "),
        ("unshowable", "Unshowable: its message cannot be shown at "),
        ("deep", "RecursionError"),
        ("marks of none", "Score.marks is a NoneType, None, not a dict"),
        ("marks of text", "Score.marks['right'] is a str, 'yes', not True or False"),
        ("marks of nothing", "Score.marks has the name a str, ''"),
        ("marks without end", "Score.marks has 100,000 names; 100 at most"),
        ("score of text", "returned a str, '1', not a number"),
        ("sys.exit", "SystemExit: 0 at "),
        ("os._exit", "its process ended with exit code 0; its output is above, or in the log of"),
        ("killed", "its process ended by signal 9 (SIGKILL)"),
        ("crash", "its process ended by signal 11 (SIGSEGV)"),
        ("scribbles", "it has closed or misused the connection of its process"),
        ("closes everything", "its process ended with exit code 1"),
        ("escapes", r"RuntimeError: \x1b[31mred\x07 | line | "),
        ("an escape as a mark", "not a text of 1 to 100 printable characters"),
    ],
)
def test_a_failure_names_its_sample_and_function(how, words, failing, report, capfd):
    reward = failing("fails", how=how)
    with pytest.raises(DataError) as caught:
        scored(reward, completion(), completion("#99"), ids=[40, 41])
    said = str(caught.value)
    assert words in said
    assert said.startswith(f"reward function {HERE}fails failed on sample 41 (prompt 'a+9=', response '#99'): ")
    assert said.isprintable() and len(said) < 2000, "one line, whatever the function raises"
    if how == "os._exit":
        assert "last words" in capfd.readouterr().out
    report(f"bad reward: {said}")
    assert scored(reward, completion()).rewards.tolist() == [1], "the next call finds a process again"


@pytest.mark.bad_input
def test_the_names_of_a_steps_marks_are_bounded(tmp_path, monkeypatch):
    lines = (
        "from roll_batching.jobs.rewards import Score",
        "def f(c):",
        " return Score(reward=1, marks={c.response: 1})",
    )
    (tmp_path / "naming.py").write_text("\n".join(lines))
    monkeypatch.syspath_prepend(str(tmp_path))
    with one_reward("naming:f") as reward, pytest.raises(DataError, match="has used 101 names of marks"):
        scored(reward, *[completion(str(i)) for i in range(101)])


@pytest.mark.parametrize("name", ["forks", "forks_and_waits", "closes_output", "prints_junk"])
def test_what_does_no_harm(name):
    with one_reward(HERE + name, limit=30) as reward:
        for _ in range(3):
            assert scored(reward, completion(), completion()).rewards.tolist() == [1, 1]


def test_standard_input_is_empty():
    with one_reward(HERE + "reads_input", limit=30) as reward:
        assert scored(reward, completion()).rewards.tolist() == [0]


@pytest.mark.bad_input
def test_a_call_that_takes_too_long_is_an_error_and_is_told_of_before(capfd, monkeypatch, report):
    monkeypatch.setenv("RANK", "3")
    reward = one_reward(HERE + "never", limit=1, notice_after=0.3)
    reward.start()
    started = time.monotonic()
    with pytest.raises(DataError) as caught:
        scored(reward, completion(), ids=[7])
    assert time.monotonic() - started < 30
    said = str(caught.value)
    assert f"reward function {HERE}never did not return within 1 s on sample 7 (prompt 'a+9='" in said
    assert "raise reward_timeout" in said
    notice = [line for line in capfd.readouterr().err.splitlines() if "on sample" in line][0]
    assert f"notice: rank 3 waits for reward function {HERE}never on sample 7 (prompt 'a+9='" in notice
    assert "reward_timeout ends the wait after 1 s" in notice
    report(str(caught.value))
    report(notice)


@pytest.mark.bad_input
def test_a_process_that_reads_nothing_holds_nobody(tmp_path):
    """A record that no socket takes at once, and a process that was stopped."""
    reward = one_reward(HERE + "stops_later", limit=2)
    assert scored(reward, completion()).rewards.tolist() == [1]
    time.sleep(1)
    long = Completion(prompt="p", response="r", finished=True, tokens=1, record={"text": "x" * 3_000_000})
    started = time.monotonic()
    with pytest.raises(DataError, match="did not return within 2 s"):
        scored(reward, long)
    assert time.monotonic() - started < 30
    reward.close()


@pytest.mark.bad_input
def test_the_beginning_of_a_message_holds_nobody():
    reward, started = one_reward(HERE + "begins_a_message", limit=2), time.monotonic()
    with pytest.raises(DataError, match="did not return within 2 s"):
        scored(reward, completion())
    assert time.monotonic() - started < 30


def test_what_a_late_function_has_started_ends_with_it():
    reward = one_reward(HERE + "leaves_a_command", limit=2)
    with pytest.raises(DataError, match="did not return"):
        scored(reward, completion())
    wait_for(lambda: not [p for p in psutil.process_iter(["cmdline"]) if "1234567" in (p.info["cmdline"] or ())], 5)


def test_it_ends_with_the_process_that_it_works_for(tmp_path):
    code = (
        "import os, signal; from tests.jobs.rewards.test_rewards import one_reward; "
        f"r = one_reward('{HERE}never'); r.start(); open('pid', 'w').write(str(r._workers[0][0]._process.pid)); "
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    root = Path(__file__).parents[3]
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(root)})
    pid = int((tmp_path / "pid").read_text())
    wait_for(lambda: not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE, 5)


def test_random_numbers_follow_step_and_sample_alone():
    with one_reward(HERE + "draws") as reward:
        first = scored(reward, completion(), completion(), ids=[4, 5], seed=1).rewards.tolist()
        assert scored(reward, completion(), completion(), ids=[5, 4], seed=1).rewards.tolist() == first[::-1]
        other = scored(reward, completion(), ids=[4], seed=2).rewards.tolist()
        assert len({*first, *other}) == 3
    with one_reward(HERE + "draws") as reward:
        assert scored(reward, completion(), ids=[5], seed=1).rewards.tolist() == first[1:]


def test_a_wrong_name_says_what_a_completion_has() -> None:
    one = Completion(prompt="p", response="r", finished=True, tokens=1, record={})
    with pytest.raises(AttributeError, match=r"no 'text', but prompt, record, answer, response, finished, tokens"):
        one.text  # noqa: B018
    assert pickle.loads(pickle.dumps(one)) == one == copy.copy(one)
