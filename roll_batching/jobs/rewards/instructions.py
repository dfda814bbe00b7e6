"""Reward of verifiable instructions (IFEval): the 25 constraints that ROLL's data name, in time linear in the text.

Names, arguments and meanings: ROLL (8eb27cc), `rewards/ifeval_rule_reward_worker.py`. Results differ where
ROLL's function counts empty parts or does not check what its instruction says; docs/rewards.md lists the cases. The
texts that the functions get have no surrounding white space, and are not empty.
"""

from __future__ import annotations

import importlib.util
import inspect
import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from roll_batching.jobs.rewards.contract import (
    Completion,
    PromptLine,
    Score,
    answer_text,
    check_penalty,
    repeated_share,
)

_HIGHLIGHT = re.compile(r"(\*{1,2})([^*\n]+)\1")
_CAPITAL_WORD = re.compile(r"\b[A-Z]+\b")
_SENTENCE_END = re.compile(r"[.?](?=\s)")
_STARS = "*" * 6
"""Divides two responses."""
_BREAK = "* * *"
"""Divides paragraphs."""
_LEAST_LETTERS = 3
"""Letters below which a language is not detected."""
_MOST_READ = 20_000
"""Characters from which a language is detected."""
LANGUAGE_NOTICE = (
    "py3langid is not installed: prompts with the constraint validate_response_language fail. Install "
    "roll-batching[ifeval] if there are any"
)


def can_detect_languages() -> bool:
    """Whether py3langid is installed."""
    return importlib.util.find_spec("py3langid") is not None


def _has_keywords(text: str, keyword_list: list[str]) -> bool:
    lower = text.lower()
    return all(word.lower() in lower for word in keyword_list)


def _has_keyword_times(text: str, word: str, N: int) -> bool:
    """Whether `word` stands alone exactly N times, ignoring case."""
    pattern = rf"(?<!\w){re.escape(word.lower())}(?!\w)"
    return sum(1 for _ in re.finditer(pattern, text.lower())) == N


def _lacks_words(text: str, forbidden_words: list[str]) -> bool:
    lower = text.lower()
    return not any(word.lower() in lower for word in forbidden_words)


def _has_letter_times(text: str, letter: str, N: int) -> bool:
    if len(letter) != 1:
        raise ValueError(f"the constraint verify_letter_frequency has the letter {letter[:20]!r}: it is one character")
    return text.count(letter) == N


def _has_language(text: str, language: str) -> bool:
    """Whether py3langid detects `language`, an ISO 639-1 code; `zh-cn` and `zh-tw` are `zh`."""
    if not can_detect_languages():
        raise ValueError(LANGUAGE_NOTICE)
    if sum(map(str.isalpha, text[:_MOST_READ])) < _LEAST_LETTERS:
        return False
    import py3langid

    return bool(py3langid.classify(text[:_MOST_READ])[0] == language.lower().partition("-")[0])


def _has_divided_paragraphs(text: str, N: int) -> bool:
    """Whether N paragraphs, none blank, are divided by `* * *`."""
    return _has_parts("\n".join(line.strip() for line in text.splitlines()).split(_BREAK), N)


def _has_word_count(text: str, N: int, quantifier: str) -> bool:
    """Whether the number of words is N; `around` allows a tenth, and at least one."""
    return _compare(len(text.split()), N, quantifier, max(round(N * 0.1), 1))


def _has_sentence_count(text: str, N: int, quantifier: str) -> bool:
    """Whether the number of sentences, which end with `.` or `?` and white space, is N; `around` allows one."""
    ends = (match.start() for match in _SENTENCE_END.finditer(text))
    return _compare(1 + sum(not _is_abbreviation(text, end) for end in ends), N, quantifier, 1)


def _is_abbreviation(text: str, end: int) -> bool:
    """Whether `text[end]` ends an abbreviation such as `e.g.` or `Dr.`."""
    before = text[max(end - 3, 0) : end]
    dotted = len(before) == 3 and _is_word(before[0]) and before[1] == "." and _is_word(before[2])
    title = text[end] == "." and len(before) >= 2 and "A" <= before[-2] <= "Z" and "a" <= before[-1] <= "z"
    return dotted or title


def _is_word(letter: str) -> bool:
    return letter.isalnum() or letter == "_"


def _has_first_word(text: str, N: int, first_word: str, i: int) -> bool:
    """Whether there are N paragraphs, none blank, and the i-th, from 1, begins with `first_word`."""
    if not 1 <= i <= N:
        raise ValueError(f"the constraint validate_paragraphs names paragraph {i} of {N}: correct it")
    paragraphs = text.split("\n\n")
    return _has_parts(paragraphs, N) and paragraphs[i - 1].strip().startswith(first_word)


def _has_postscript(text: str, postscript_marker: str) -> bool:
    _, marker, rest = text.partition(postscript_marker)
    return bool(marker) and bool(rest.strip())


def _has_placeholders(text: str, N: int) -> bool:
    return sum(1 for _ in _enclosed(text, "[", "]")) >= N


def _has_bullets(text: str, N: int) -> bool:
    return sum(line.strip().startswith(("*", "-")) for line in text.split("\n")) == N


def _has_title(text: str) -> bool:
    return any(True for _ in _enclosed(text, "<<", ">>"))


def _is_choice(text: str, options: list[str]) -> bool:
    return text in [option.strip() for option in options]


def _has_highlights(text: str, N: int) -> bool:
    return sum(not match.group(2).isspace() for match in _HIGHLIGHT.finditer(text)) >= N


def _has_sections(text: str, N: int, section_splitter: str) -> bool:
    """Whether `section_splitter` divides the text into N sections, none blank; text before the first is one."""
    return _has_parts(text.removeprefix(section_splitter).split(section_splitter), N)


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def _repeats_prompt(text: str, original_prompt: str) -> bool:
    return text.startswith(original_prompt.strip())


def _has_two_responses(text: str) -> bool:
    first, stars, second = text.partition(_STARS)
    first, second = first.strip(), second.strip()
    return bool(stars and first and second) and _STARS not in second and first != second


def _is_uppercase(text: str) -> bool:
    return text == text.upper()


def _is_lowercase(text: str) -> bool:
    return text == text.lower()


def _has_capital_words(text: str, N: int, quantifier: str) -> bool:
    return _compare(sum(1 for _ in _CAPITAL_WORD.finditer(text)), N, quantifier, 0)


def _has_end(text: str, end_phrase: str) -> bool:
    return text.endswith(end_phrase.strip())


def _is_quoted(text: str) -> bool:
    return len(text) > 2 and text.startswith('"') and text.endswith('"')


def _lacks_commas(text: str) -> bool:
    return "," not in text


def _has_parts(parts: list[str], count: int) -> bool:
    return len(parts) == count and all(part.strip() for part in parts)


def _enclosed(text: str, opening: str, closing: str) -> Iterator[str]:
    """Yields the texts, unless blank, that stand between `opening` and `closing` on one line."""
    for line in text.split("\n"):
        begin = line.find(opening)
        while begin >= 0:
            begin += len(opening)
            end = line.find(closing, begin)
            if end < 0:
                break
            if not line[begin:end].isspace() and begin < end:
                yield line[begin:end]
            begin = line.find(opening, end + len(closing))


def _compare(count: int, wanted: int, quantifier: str, tolerance: int) -> bool:
    """Whether `count` is at least, at most or around `wanted`. Raises ValueError for another `quantifier`."""
    if quantifier == "at least":
        return count >= wanted
    if quantifier == "at most":
        return count <= wanted
    if quantifier == "around":
        return abs(count - wanted) <= tolerance
    raise ValueError(
        f"quantifier {quantifier[:40]!r} is unknown: write 'at least', 'around' or 'at most' in the prompt's constraint"
    )


CONSTRAINTS: Mapping[str, Callable[..., bool]] = {
    "verify_keywords": _has_keywords,
    "verify_keyword_frequency": _has_keyword_times,
    "validate_forbidden_words": _lacks_words,
    "verify_letter_frequency": _has_letter_times,
    "validate_response_language": _has_language,
    "verify_paragraph_count": _has_divided_paragraphs,
    "validate_word_constraint": _has_word_count,
    "verify_sentence_constraint": _has_sentence_count,
    "validate_paragraphs": _has_first_word,
    "verify_postscript": _has_postscript,
    "validate_placeholders": _has_placeholders,
    "verify_bullet_points": _has_bullets,
    "validate_title": _has_title,
    "validate_choice": _is_choice,
    "validate_highlighted_sections": _has_highlights,
    "validate_sections": _has_sections,
    "validate_json_format": _is_json,
    "validate_repeat_prompt": _repeats_prompt,
    "validate_two_responses": _has_two_responses,
    "validate_uppercase": _is_uppercase,
    "validate_lowercase": _is_lowercase,
    "validate_frequency_capital_words": _has_capital_words,
    "validate_end": _has_end,
    "validate_quotation": _is_quoted,
    "validate_no_commas": _lacks_commas,
}
"""The checks, by ROLL's names. The first argument is the text; the others have the names of the constraint's keys."""


# ---- instructions


_NAME = "func_name"


def ifeval(completion: Completion, *, repetition_penalty: float = 0.0) -> Score:
    """1 when the text after the last `</think>` keeps the constraint, else 0; mark `keeps_constraint`.

    The answer is the constraint as JSON: `func_name`, one of `constraints.CONSTRAINTS`, and its arguments.
    Other keys are ignored: lines for ROLL (8eb27cc) and of the data set RLVR-IFeval have all of them. A blank text
    keeps no constraint. `repetition_penalty` is subtracted times the share of the whole response's three-word sequences
    that are repeated (ROLL: 0.5).

    Raises ValueError for a constraint that is invalid, or whose library is not installed.
    """
    name, arguments = _read_constraint(completion.answer)
    text = answer_text(completion.response)
    is_kept = bool(text) and CONSTRAINTS[name](text, **arguments)
    penalty = repetition_penalty * repeated_share(completion.response) if repetition_penalty else 0.0
    return Score(reward=is_kept - penalty, marks={"keeps_constraint": is_kept})


def check_instruction_arguments(repetition_penalty: Any = 0.0) -> str:
    """A notice if languages cannot be detected. Raises ValueError for an invalid `repetition_penalty`."""
    check_penalty(repetition_penalty)
    return "" if can_detect_languages() else LANGUAGE_NOTICE


def check_constraint(line: PromptLine, **_: Any) -> None:
    """Raises ValueError for a constraint that is invalid, or whose library is not installed."""
    name, arguments = _read_constraint(line.answer)
    CONSTRAINTS[name]("a", **arguments)  # any text: this raises for arguments that contradict each other


ifeval.check_arguments = check_instruction_arguments  # type: ignore[attr-defined]
ifeval.check_record = check_constraint  # type: ignore[attr-defined]


def _read_constraint(answer: Any) -> tuple[str, dict[str, Any]]:
    """Name and arguments of the constraint. Raises ValueError for an invalid one."""
    try:
        constraint = json.loads(answer) if isinstance(answer, str) else answer
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the answer of its prompt is no JSON of a constraint: {_short(answer)} ({error})") from None
    name = constraint.get(_NAME) if isinstance(constraint, dict) else None
    if not isinstance(name, str) or name not in CONSTRAINTS:
        raise ValueError(
            f"the answer of its prompt has no {_NAME} of a constraint: {_short(constraint)}. There are: "
            f"{', '.join(CONSTRAINTS)}"
        )
    arguments: dict[str, Any] = {}
    for key, parameter in list(inspect.signature(CONSTRAINTS[name]).parameters.items())[1:]:
        value = constraint.get(key)
        if problem := _problem(value, str(parameter.annotation)):
            raise ValueError(f"the constraint {name} of its prompt has {key} {_short(value)}: {problem}")
        arguments[key] = value
    return name, arguments


def _problem(value: Any, wanted: str) -> str:
    """What is wrong with an argument of a constraint; empty if it is as annotated."""
    if wanted == "int":
        valid = isinstance(value, int) and not isinstance(value, bool) and value >= 0
        return "" if valid else "it is a whole number of at least 0"
    if wanted == "str":
        return "" if isinstance(value, str) and value.strip() else "it is a text that is not blank"
    valid = isinstance(value, list) and all(isinstance(item, str) and item.strip() for item in value) and bool(value)
    return "" if valid else "it is a list of texts that are not blank"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
