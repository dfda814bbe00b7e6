"""Rewards by rules: values of ROLL's functions, cheating responses, invalid lines, and long texts."""

from __future__ import annotations

import importlib.util
import json
import time
from pathlib import Path
from typing import Any

import pytest

from roll_batching.errors import ConfigError, DataError
from roll_batching.jobs.rewards import Completion
from roll_batching.jobs.rewards.choices import multiple_choice
from roll_batching.jobs.rewards.contract import load_reward, repeated_share
from roll_batching.jobs.rewards.instructions import CONSTRAINTS, ifeval
from roll_batching.jobs.rewards.pool import RewardDomain, RewardPool

OF_ROLL = json.loads((Path(__file__).parent / "data" / "roll_rule_rewards.json").read_text())
GRADINGS = ("boxed", "loose", "soft", "strict")
IFEVAL = "roll_batching.jobs.rewards.instructions:ifeval"
CHOICE = "roll_batching.jobs.rewards.choices:multiple_choice"
OTHERWISE: dict[tuple[str, str], float] = {
    ("verify_keyword_frequency", "a cat, a Cat!"): 1,  # ROLL counts all words
    ("verify_keyword_frequency", "cat cat cats"): 1,
    ("verify_keyword_frequency", "one two"): 0,
    ("validate_placeholders", "[]  []"): 0,  # blank parts
    ("validate_placeholders", "[ ] [x]"): 0,
    ("validate_title", "<<>>"): 0,
    ("validate_sections", "SECTIONSECTION"): 0,
    ("validate_two_responses", "a******"): 0,
    ("validate_choice", "maybe"): 0,  # part of an option
    ("validate_choice", "y"): 0,
    ("validate_highlighted_sections", "**bold**"): 0,  # bold counts once
    ("validate_highlighted_sections", "** **"): 0,
    ("validate_end", "The end.\n"): 1,  # surrounding white space is ignored
    ("validate_quotation", '"'): 0,
    ("validate_no_commas", ""): 0,  # blank responses
}
"""Values that differ from ROLL's, by constraint and response."""
OTHER_CHOICES: dict[str, list[float]] = {
    "\\boxed{} B": [0, -1, -1, -1],
    "\\boxed{B": [0, -1, -1, -1],
    "Because it is so.": [0, -1, -1, -1],
    "The answer is not B": [0, -1, -1, -1],
    "\\boxed{Because}": [0, -1, -0.5, -1],
    "\\boxed{B or C}": [0, -1, -0.5, -1],
    "\\boxed{B, C}": [0, -1, -0.5, -1],
}


def completion(response: str, answer: Any) -> Completion:
    answer = answer if isinstance(answer, str) else json.dumps(answer)
    return Completion(prompt="p", response=response, finished=True, tokens=1, answer=answer, record={"answer": answer})


def follows(response: str, name: str, **arguments: Any) -> float:
    return ifeval(completion(response, {"func_name": name, **arguments})).reward


def graded(response: str, answer: str = "B") -> list[float]:
    return [multiple_choice(completion(response, answer), grading).reward for grading in GRADINGS]


@pytest.mark.parametrize("name", CONSTRAINTS)
def test_constraints_have_the_values_of_roll_except_where_listed(name):
    cases = [case for case in OF_ROLL["ifeval"] if case[0]["func_name"] == name]
    assert cases or name == "validate_response_language"
    for constraint, response, value in cases:
        expected = OTHERWISE.get((name, response), value)
        assert ifeval(completion(response, constraint)).reward == expected, (constraint, response)
    if len(cases) > 2:
        assert {OTHERWISE.get((name, one[1]), one[2]) for one in cases} == {0, 1}


def test_choices_have_the_values_of_roll_except_where_listed():
    for response, answer, values in OF_ROLL["choices"]:
        assert graded(response, answer) == OTHER_CHOICES.get(response, values), response


def test_repetition_has_the_values_of_roll():
    for response, value in OF_ROLL["repeats"]:
        assert repeated_share(response) * -0.5 == pytest.approx(value)
    assert (
        ifeval(completion("a b c a b c", {"func_name": "validate_no_commas"}), repetition_penalty=0.5).reward == 0.875
    )
    assert multiple_choice(completion("B b c b b c", "B"), "loose", repetition_penalty=2).reward == -1 - 2 * 0.25


@pytest.mark.parametrize(
    ("response", "reward"),
    [
        ("", 0),
        ("\\boxed{B}\\boxed{}", 1),
        ("\\boxed{A}\\boxed{B", 0),
        ("\\boxed{\\boxed{B}}", 1),
        ("\\boxed {B}", 1),
        ("\\boxed{\\{B\\}}", 1),
        ("\\boxed{\\mathrm{B}. Because A}", 1),
        ("\\boxed{A/B/C/D}", 0),
        ("\\boxed{A}</think>", 0),
        ("\\boxed{Β}", 0),  # a Greek letter
        ("\\boxed{B1}", 0),
        ("\\boxed{The answer is (B)}", 1),
        ("İİ the answer is B \\boxed{C}", 0),
        ("}}}}{{{{\\boxed{B}", 1),
    ],
)
def test_boxes(response, reward):
    assert graded(response)[0] == reward


@pytest.mark.parametrize(
    "response", ["İ" * 50 + " the answer is B", "Answer is: **B**.", "answer is\n\nB", "(B)", "B."]
)
def test_choices_without_a_box(response):
    assert graded(response) == [0, 1, 0.5, -1]
    assert multiple_choice(completion(response, "B"), "loose").marks == {"boxed": False, "right": True}


@pytest.mark.parametrize("name", CONSTRAINTS)
def test_blank_responses_keep_no_constraint(name):
    arguments = next(one for one in ARGUMENTS if one["func_name"] == name)
    for response in ("", " \n\t", "<think>all</think>", "thoughts</think>\n"):
        assert ifeval(completion(response, arguments)).reward == 0


ARGUMENTS = [case[0] for case in OF_ROLL["ifeval"]]
ARGUMENTS.append({"func_name": "validate_response_language", "language": "en"})
LONG = [unit * (1_000_000 // len(unit)) for unit in ("[", "<", "* ", "\\boxed{", "{", "A_", ". ", '[{"a":')]


@pytest.mark.parametrize("text", LONG, ids=lambda text: ascii(text[:6]))
def test_a_million_characters_take_little_time(text):
    begin = time.process_time()
    for name, arguments in {one["func_name"]: one for one in ARGUMENTS}.items():
        if name != "validate_response_language":
            ifeval(completion(text, arguments))
    ifeval(completion(text, ARGUMENTS[0]), repetition_penalty=0.5)
    for tail in ("", "\\boxed{B}", "}" * 100_000, " answer is B"):
        multiple_choice(completion(text + tail, "B"))
    assert time.process_time() - begin < 30, "linear time: under 1 s"


@pytest.mark.skipif(importlib.util.find_spec("py3langid") is None, reason="needs the extra ifeval")
def test_languages():
    english = "The quick brown fox jumps over the lazy dog, and the cat watches it."
    chinese = "今天天气很好，我们一起去公园散步吧。"
    for text, language in ((english, "en"), (chinese, "zh-cn"), ("मैं आज बाज़ार जा रहा हूँ और सब्ज़ियाँ खरीदूँगा।", "hi")):
        assert follows(text, "validate_response_language", language=language) == 1
        assert follows(text, "validate_response_language", language="de") == 0
    assert follows("12 34 !", "validate_response_language", language="en") == 0


@pytest.mark.bad_input
def test_without_the_library_of_languages_the_line_is_an_error(monkeypatch):
    monkeypatch.setattr("roll_batching.jobs.rewards.instructions.can_detect_languages", lambda: False)
    monkeypatch.setattr("roll_batching.jobs.rewards.instructions.can_detect_languages", lambda: False)
    with pytest.raises(ValueError, match=r"Install roll-batching\[ifeval\]"):
        follows("The text", "validate_response_language", language="en")
    assert "validate_response_language fail" in load_reward(IFEVAL).notice


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ("{", "no JSON of a constraint"),
        ("[" * 100_000, "no JSON of a constraint"),
        ("[]", "has no func_name of a constraint"),
        ("{}", "There are: verify_keywords"),
        ('{"func_name": ["verify_keywords"]}', "has no func_name"),
        ('{"func_name": "__class__"}', "has no func_name"),
        ({"func_name": "verify_keywords", "keyword_list": None}, "keyword_list None: it is a list of texts"),
        ({"func_name": "verify_keywords", "keyword_list": "abc"}, "a list of texts"),
        ({"func_name": "verify_keywords", "keyword_list": []}, "a list of texts"),
        ({"func_name": "verify_keywords", "keyword_list": [1]}, "a list of texts"),
        ({"func_name": "validate_placeholders", "N": "3"}, "N '3': it is a whole number"),
        ({"func_name": "validate_placeholders", "N": True}, "N True"),
        ({"func_name": "validate_placeholders", "N": -1}, "N -1"),
        ({"func_name": "validate_placeholders"}, "N None"),
        ('{"func_name": "validate_placeholders", "N": NaN}', "N nan"),
        ({"func_name": "validate_end", "end_phrase": " "}, "not blank"),
        ({"func_name": "verify_letter_frequency", "letter": "ab", "N": 1}, "it is one character"),
        ({"func_name": "validate_word_constraint", "N": 1, "quantifier": "exactly"}, "write 'at least', 'around'"),
        ({"func_name": "validate_paragraphs", "N": 2, "first_word": "a", "i": 3}, "paragraph 3 of 2"),
        ({"func_name": "validate_paragraphs", "N": 2, "first_word": "a", "i": 0}, "paragraph 0 of 2"),
    ],
)
def test_invalid_constraints_are_errors(answer, message):
    with pytest.raises(ValueError) as caught:
        ifeval(completion("some text", answer))
    assert message in str(caught.value) and len(str(caught.value)) < 1000


@pytest.mark.bad_input
@pytest.mark.parametrize("answer", ["", "b", "12", "Because", "A or B", "ABCD", "x" * 100_000])
def test_a_right_answer_that_is_no_letter_is_an_error(answer):
    with pytest.raises(ValueError, match="is not one capital letter A-Z|that is not blank is needed"):
        graded("\\boxed{B}", answer)


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("path", "arguments", "message"),
    [
        (CHOICE, {"grading": "hard"}, "there are boxed, loose, soft, strict"),
        (CHOICE, {"grading": ["soft"]}, "grading is"),
        (CHOICE, {"grade": "soft"}, "cannot be called with"),
        (IFEVAL, {"repetition_penalty": -0.5}, "at least 0"),
        (IFEVAL, {"repetition_penalty": True}, "at least 0"),
        (IFEVAL, {"repetition_penalty": "0.5"}, "at least 0"),
        (CHOICE, {"repetition_penalty": float("nan")}, "at least 0"),
    ],
)
def test_invalid_arguments_are_errors_before_the_job(path, arguments, message):
    with pytest.raises(ConfigError, match=message):
        load_reward(path, arguments)


def test_they_score_in_a_pool_by_domain_and_an_invalid_line_names_its_sample():
    follow = RewardDomain(name="follow", path=IFEVAL, arguments={}, tags=("ifeval",))
    choice = RewardDomain(name="choice", path=CHOICE, arguments={"grading": "soft"}, tags=("qa",))

    def line(tag: str, response: str, answer: str) -> Completion:
        record = {"answer": answer, "tag": tag}
        return Completion(prompt="p", response=response, finished=True, tokens=1, answer=answer, record=record)

    commas = '{"func_name": "validate_no_commas"}'
    lines = [line("qa", "the answer is C", "C"), line("ifeval", "a, b", commas), line("ifeval", "a b", commas)]
    with RewardPool(follow, choice, tag="tag") as pool:
        assert pool.score(lines, [0, 1, 2], seed=0).rewards.tolist() == [0.5, 0, 1]
        with pytest.raises(DataError, match=r"sample 7 .*no JSON of a constraint"):
            pool.score([line("ifeval", "a", "not json")], [7], seed=0)
