"""Errors of a user's loss, reward or rollout function name the user's file and line, wherever they were raised."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from roll_batching.errors import ConfigError
from roll_batching.registry import describe_error, load_dotted, user_place
from tests.jobs.rl import user_code
from tests.jobs.rl.jobs import settings, write_data
from tests.support.ranks import run_ranks

REFUSAL, HERE = "tests.jobs.rl.jobs:refusal", "tests.jobs.rl.user_code:"
SOURCE = Path(user_code.__file__).read_text().splitlines()


def place_of(mark: str) -> str:
    """`user_code.py:N` of the line that ends with the comment `mark`."""
    (number,) = [number for number, line in enumerate(SOURCE, 1) if line.endswith(f"# {mark}")]
    return f"user_code.py:{number}"


@pytest.mark.parametrize("function", [user_code.in_json, user_code.in_numpy, user_code.in_own_line])
def test_the_innermost_line_that_is_no_librarys(function: Any) -> None:
    with pytest.raises(Exception) as caught:  # noqa: PT011 (of any type)
        function()
    caught.value.__traceback__ = caught.value.__traceback__.tb_next  # without this test's own frame
    assert user_place(caught.value).endswith(place_of(function.__name__))


def test_an_error_that_passed_no_users_code_names_none() -> None:
    from roll_batching.planning.lengths_io import read_lengths

    with pytest.raises(Exception) as caught:  # noqa: PT011
        read_lengths("nowhere.csv")
    caught.value.__traceback__ = caught.value.__traceback__.tb_next
    assert user_place(caught.value) == ""


@pytest.mark.parametrize("function", [user_code.in_import, user_code.in_syntax])
def test_an_import_that_fails_inside_a_function_names_its_line(function: Any) -> None:
    with pytest.raises((ImportError, SyntaxError)) as caught:
        function()
    assert describe_error(caught.value).endswith(place_of(function.__name__))


def test_a_module_that_is_not_there_has_no_line_and_one_whose_import_fails_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "module_of_user.py").write_text("\nimport nowhere_to_be_found\n")
    for path, words in (
        ("nowhere_to_be_found:f", r"No module named 'nowhere_to_be_found'\); the module must"),
        ("module_of_user:f", r"No module named 'nowhere_to_be_found' at .*module_of_user.py:2\)"),
    ):
        with pytest.raises(ConfigError, match=words):
            load_dotted("reward", path)


CASES = {
    "a reward in json": ({"reward_function": "in_json"}, "in_json", "JSONDecodeError"),
    "a reward in numpy": ({"reward_function": "in_numpy"}, "in_numpy", "LinAlgError"),
    "a loss in torch": ({"loss_function": "InTorch"}, "InTorch", "einsum"),
    "a loss in its view": ({"loss_function": "InView"}, "InView", "other_mask"),
    "a rollout function in json": ({"rollout_function": "rollout_in_json"}, "in_json", "JSONDecodeError"),
}


@pytest.mark.bad_input
@pytest.mark.parametrize("case", [pytest.param(case, marks=[pytest.mark.slow] * ("in json" in case)) for case in CASES])
def test_a_job_names_the_users_line_on_all_ranks(case: str, tmp_path: Path, report: Any) -> None:
    write_data(tmp_path)
    changes, mark, words = CASES[case]
    given = {"reward_function": "tests.jobs.rl.jobs:length", **{key: HERE + name for key, name in changes.items()}}
    if "rollout_function" in given:
        given["reward_function"] = None
    one, other = run_ranks(2, REFUSAL, settings(tmp_path, warmup=None, eval_samples=0, max_steps=1, **given))
    assert one == other and words in one, one
    assert place_of(mark) in one, one
    report(f"{case}: {one}")
