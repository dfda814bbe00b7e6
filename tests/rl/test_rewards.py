from __future__ import annotations

import sys
import textwrap

import pytest

from roll_batching.errors import ConfigError, DataError
from roll_batching.rl.rewards import Completion, Score, final_answer, load_reward, score


def completion(response="#12", finished=True, answer="12", prompt="a+9="):
    record = {"prompt": prompt, "answer": answer}
    return Completion(prompt=prompt, response=response, finished=finished, tokens=len(response), record=record)


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


def test_a_reward_function_of_the_users_own_is_found_in_the_working_directory(tmp_path, monkeypatch):
    (tmp_path / "my_task.py").write_text(
        textwrap.dedent("""
        def brevity(completion):
            return 1 / completion.tokens
        """)
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert score(load_reward("my_task:brevity"), [completion("#123")], [0]).rewards.tolist() == [0.25]


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("nocolon", "write it as package.module:function"),
        ("no_such_module:f", "cannot import 'no_such_module'"),
        ("math:no_such", "has no 'no_such'"),
        ("math:pi", "not a function"),
    ],
)
def test_a_reward_path_that_names_nothing(path, words, report):
    with pytest.raises(ConfigError, match=words) as caught:
        load_reward(path)
    report(f"reward function {path!r}: {caught.value}")


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda c: float("nan"), "is nan"),
        (lambda c: Score(reward=float("inf")), "is inf"),
        (lambda c: None, "must return a number"),
        (lambda c: c.record["missing"], "KeyError: 'missing'"),
    ],
)
def test_a_bad_reward_names_its_sample(function, words, report):
    only_second = [lambda c: 1.0, function]
    calls = iter(only_second)
    with pytest.raises(DataError, match=words) as caught:
        score(lambda c: next(calls)(c), [completion(), completion("#99")], [40, 41])
    assert "sample 41" in str(caught.value) and "'#99'" in str(caught.value)
    report(f"bad reward: {caught.value}")
