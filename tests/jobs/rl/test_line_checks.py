"""Rewards are asked about every line before a model is built; records are lines of the file; answers are optional."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from roll_batching.errors import DataError
from roll_batching.jobs.config.rewards import REWARDS
from roll_batching.jobs.rewards import Completion, PromptLine, exact_match, final_answer
from roll_batching.jobs.rewards.pool import RewardDomain, RewardPool
from roll_batching.jobs.rewards.process import RewardLimits
from roll_batching.jobs.texts.texts import Prompt
from tests.jobs.rl.jobs import settings, write_data
from tests.support.ranks import run_ranks

REFUSAL, RUN = "tests.jobs.rl.jobs:refusal", "tests.jobs.rl.jobs:run"
HERE = "tests.jobs.rl.test_line_checks:"
GOOD = {
    "final_answer": {"answer": "12"},
    "exact_match": {"answer": "12"},
    "math_verify": {"answer": r"\frac{1}{2}"},
    "multiple_choice": {"answer": "(B)"},
    "ifeval": {"answer": json.dumps({"func_name": "validate_word_constraint", "N": 5, "quantifier": "around"})},
    "code_tests": {"test_cases": ["assert f() == 1"]},
    "llm_judge": {"answer": "12", "question": "7+5?"},
}
ARGUMENTS: dict[str, dict[str, Any]] = {
    "code_tests": {"run": "subprocess"},
    "exact_match": {"after": "="},
    "llm_judge": {"url": "http://127.0.0.1:9/v1", "model": "m", "question_field": "question"},
}
BAD = {
    "final_answer": [({"answer": "1#2"}, "holds a '#'"), ({"answer": " "}, "not blank"), ({"answer": 12}, "a int, 12")],
    "exact_match": [({}, "the line has no answer"), ({"answer": "x=2"}, "holds '='"), ({"answer": ["2"]}, "a list")],
    "math_verify": [({"answer": "\\boxed{"}, "cannot be parsed"), ({"answer": None}, "has no answer")],
    "multiple_choice": [({"answer": "12"}, "one capital letter"), ({"answer": "A or B"}, "one capital letter")],
    "ifeval": [
        ({"answer": "no JSON"}, "no JSON of a constraint"),
        ({"answer": '{"func_name": "validate_word_constraint", "N": 5, "quantifier": "about"}'}, "quantifier 'about'"),
        ({"answer": '{"func_name": "verify_letter_frequency", "N": 5, "letter": "ab"}'}, "it is one character"),
    ],
    "code_tests": [
        ({"test_cases": ["x = 1"]}, "asserts nothing"),
        ({"test_cases": "[1"}, "is no JSON of a list of tests"),
        ({}, "holds no list of tests"),
    ],
    "llm_judge": [({"question": "7+5?"}, "has no answer"), ({"answer": "12"}, "no text under reward_args.question_f")],
}  # fmt: skip


def pool(name: str, **options: Any) -> RewardPool:
    entry = REWARDS.get(name)
    domain = RewardDomain(path=name if entry is None else entry.target, arguments=ARGUMENTS.get(name, {}))
    return RewardPool(domain, **options)


def prompts(lines: Sequence[dict[str, Any]]) -> list[Prompt]:
    return [Prompt("p", line.get("answer"), line, f"data.jsonl:{number}") for number, line in enumerate(lines, 1)]


@pytest.mark.bad_input
@pytest.mark.parametrize("name", BAD)
def test_every_registered_reward_tells_lines_that_it_cannot_score(name: str, report: Any) -> None:
    lines = [GOOD[name], *(line for line, _ in BAD[name])] * 40  # several calls
    with pool(name, workers=2) as reward:
        faults = reward.check(prompts(lines))
    for fault, words in zip(faults, ["", *(words for _, words in BAD[name])] * 40, strict=True):
        assert (not fault) if not words else any(word in fault for word in words.split("|")), (fault, words)
    report(f"{name}: {[fault for fault in faults[:4] if fault]}")


def own(completion: Completion) -> float:
    return float(completion.record["level"])


def own_check(line: PromptLine) -> None:
    if line.record.get("level") == 13:
        raise ValueError("level 13 has no levels below it")
    if line.record.get("level") == 66:
        os._exit(3)
    _ = 1 / line.record["level"]


own.check_record = own_check  # type: ignore[attr-defined]


def record_of(completion: Completion) -> float:
    """Whether the record is the line of the file, and the answer what `data_args.response` names."""
    assert completion.record["reward_model"]["ground_truth"] == completion.answer == completion.record["level"]
    assert set(completion.record) == {"question", "level", "reward_model", "extra_info"}, completion.record
    assert completion.record["question"] == completion.prompt and completion.record["extra_info"] == {"index": [1]}
    return completion.tokens / 10


@pytest.mark.bad_input
def test_your_own_check_is_asked_and_its_errors_name_its_line() -> None:
    with pool(HERE + "own") as reward:
        first, second, third = reward.check(prompts([{"level": 1}, {"level": 13}, {"level": 0}]))
        assert (first, second) == ("", "level 13 has no levels below it")
        assert third.startswith("ZeroDivisionError") and "test_line_checks.py:" in third
        with pytest.raises(DataError, match=r"failed on the lines data.jsonl:1 to data.jsonl:2: its process ended"):
            reward.check(prompts([{"level": 1}, {"level": 66}]))


def own_without_check(completion: Completion) -> float:
    return 1.0


def test_a_reward_without_a_check_needs_nothing() -> None:
    with pool(HERE + "own_without_check") as reward:
        assert reward.check(prompts([{}] * 3)) == [""] * 3
    with RewardPool(limits=RewardLimits()) as reward:
        assert reward.check(prompts([{}])) == [""]


def write(file: Path, lines: Sequence[dict[str, Any]]) -> None:
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.mark.bad_input
def test_a_job_lists_such_lines_on_all_ranks_before_it_builds_a_model(tmp_path: Path, report: Any) -> None:
    write_data(tmp_path)
    lines = [{"prompt": f"a+{n % 9}b+7=", "answer": f"{n}#" if n % 200 == 0 else str(n)} for n in range(600)]
    write(tmp_path / "prompts.jsonl", lines)
    write(tmp_path / "heldout.jsonl", [{"prompt": "1+1=", "answer": "2"}, {"prompt": "1+2="}])
    # A model that cannot be built: its error would come first, were the lines not asked before.
    payload = settings(tmp_path, actor_train__strategy_args__strategy_config__attention_backend="nowhere:backend")
    one, other = run_ranks(2, REFUSAL, payload)
    assert one == other and one.startswith("DataError: the data files have 4 faults:"), one
    for words in (
        "prompts.jsonl:1: ",
        "prompts.jsonl:201: ",
        "prompts.jsonl:401: ",
        "heldout.jsonl:2: the line has no",
    ):
        assert words in one, (words, one)
    assert "holds a '#'" in one and "Correct the line, or remove it." in one
    report(one)


def test_domains_are_asked_about_their_own_lines_and_code_needs_no_answer(tmp_path: Path) -> None:
    write_data(tmp_path)
    good = [
        {"prompt": "a+1b=", "answer": "12", "tag": "math"},
        {"prompt": "a+2b=", "test_cases": ["assert f() == 1"], "tag": "code"},
    ]
    rewards = {
        "math": {"reward_function": "final_answer", "tag_included": ["math"]},
        "code": {"reward_function": "code_tests", "tag_included": ["code"], "reward_args": {"run": "subprocess"}},
    }
    payload = settings(tmp_path, reward_function=None, rewards=rewards, max_steps=1, eval_samples=0)
    write(tmp_path / "prompts.jsonl", good * 2)
    run_ranks(1, RUN, payload)
    write(tmp_path / "prompts.jsonl", [*good, {**good[0], "answer": None}, {**good[1], "test_cases": ["x = 1"]}])
    (text,) = run_ranks(1, REFUSAL, payload)
    assert "prompts.jsonl:3: the line has no answer" in text and "prompts.jsonl:4: a test asserts nothing" in text
    assert "2 faults" in text


def test_under_another_policy_the_lines_are_said_and_the_job_goes_on(tmp_path: Path) -> None:
    write_data(tmp_path)
    write(tmp_path / "prompts.jsonl", [{"prompt": f"a+{n}b=", "answer": "#" if n == 3 else "12"} for n in range(8)])
    payload = settings(tmp_path, reward_failure="zero", max_steps=1, eval_samples=0)
    outcomes = run_ranks(2, RUN, payload, check=False)
    assert [outcome.returncode for outcome in outcomes] == [0, 0]
    said = [outcome.output.count("reward_failure: zero holds for all responses to these lines") for outcome in outcomes]
    assert said == [1, 0] and "prompts.jsonl:4: the answer" in outcomes[0].output


def test_the_record_is_the_line_and_the_answer_may_be_under_a_path(tmp_path: Path) -> None:
    write_data(tmp_path)
    lines = [
        {"question": f"a+{n}b=", "level": n, "reward_model": {"ground_truth": n}, "extra_info": {"index": [1]}}
        for n in range(1, 9)
    ]
    write(tmp_path / "prompts.jsonl", lines)
    keys = {"prompt": "question", "response": "reward_model.ground_truth"}
    payload = settings(tmp_path, reward_function=HERE + "record_of", max_steps=1, eval_samples=0)
    payload["actor_train"]["data_args"] |= keys
    run_ranks(1, RUN, payload)
    payload["actor_train"]["data_args"]["response"] = "reward_model.truth"
    (text,) = run_ranks(1, REFUSAL, payload)
    assert "no line of the prompts has the key 'reward_model.truth'" in text and "'question', 'level'" in text


def test_rewards_read_the_answer_of_the_completion() -> None:
    answered = Completion(prompt="p", response="#7", finished=True, tokens=2, answer="7", record={"truth": "7"})
    assert final_answer(answered).reward == 1 and exact_match(answered, after="#").reward == 1
