"""Reward of multiple-choice questions: the letter in the last box of the response."""

from __future__ import annotations

import re
from typing import Any

from roll_batching.jobs.rewards.contract import (
    Completion,
    PromptLine,
    Score,
    answer_text,
    check_penalty,
    repeated_share,
    text_answer,
)

_GRADES = {
    "boxed": (1.0, 0.0, 0.0, 0.0),
    "loose": (1.0, 1.0, -1.0, -1.0),
    "soft": (1.0, 0.5, -0.5, -1.0),
    "strict": (1.0, -1.0, -1.0, -1.0),
}
"""Rewards for: right in a box, right without one, wrong in a box, wrong without one. Source: ROLL's (8eb27cc)
`MultipleChoiceBoxedRuleRewardWorker` (boxed) and `CrossThinkQARuleRewardWorker` (the others)."""
_BOX_PARTS = re.compile(r"\\boxed\s*\{|\\.|[{}]", re.DOTALL)
_COMMAND = re.compile(r"\\[A-Za-z]+")
_WORD = re.compile(r"[^\W_]+")
_WORDS_BESIDE_LETTERS = frozenset({"answer", "choice", "is", "letter", "option", "the", "correct"})
_WORDS_BETWEEN_LETTERS = frozenset({"and", "or"})
_LETTER_AT_START = re.compile(r"[\W_]*[A-Z](?:[\W_]*$|[).:*\]]+\s)")
_PHRASE = re.compile("answer is", re.IGNORECASE)
_MOST_READ = 2000
"""Characters of a box, or after "answer is", that are searched for the letter."""


def multiple_choice(completion: Completion, grading: str = "boxed", *, repetition_penalty: float = 0.0) -> Score:
    r"""Scores the letter in the last `\boxed{}` of the text after the last `</think>`; marks `boxed`, `right`.

    The letter is a capital from A to Z that stands alone, as in `\boxed{\text{(B)}}`; several different letters are no
    answer. Without a box, it is looked for after the last "answer is", else at the beginning of the text. The right
    letter is the first of the answer.

    `grading`: `boxed` is 1 for the right letter in a box, else 0. By right in a box, right without one, wrong in a box
    and wrong without one, `loose` is 1, 1, -1, -1, `soft` 1, 0.5, -0.5, -1 and `strict` 1, -1, -1, -1.
    `repetition_penalty` is subtracted times the share of the whole response's three-word sequences that are repeated.

    Raises ValueError when the answer is not one letter from A to Z.
    """
    wanted = _right_letter(completion)
    text = answer_text(completion.response)
    box = _last_box(text)
    if box is not None:
        letter = _chosen(box[:_MOST_READ])
    else:
        letter = _letter_without_box(text)
    right, boxed = letter == wanted, box is not None
    reward = _GRADES[grading][(not boxed) + 2 * (not right)]  # the columns: right, right unboxed, wrong, wrong unboxed
    penalty = repetition_penalty * repeated_share(completion.response) if repetition_penalty else 0.0
    return Score(reward=reward - penalty, marks={"boxed": boxed, "right": right})


def check_choice_arguments(grading: Any = "boxed", repetition_penalty: Any = 0.0) -> None:
    """Raises ValueError for an unknown `grading` or an invalid `repetition_penalty`."""
    if not isinstance(grading, str) or grading not in _GRADES:
        raise ValueError(f"reward_args.grading is {str(grading)[:60]!r}; there are {', '.join(_GRADES)}")
    check_penalty(repetition_penalty)


def _right_letter(line: PromptLine) -> str:
    answer = text_answer(line)
    letter = _chosen(answer.strip()[:_MOST_READ])
    if letter is None:
        raise ValueError(f"the right answer of its prompt, {answer[:60]!r}, is not one capital letter A-Z, as in 'B'")
    return letter


multiple_choice.check_arguments = check_choice_arguments  # type: ignore[attr-defined]
multiple_choice.check_record = lambda line, **_: _right_letter(line)  # type: ignore[attr-defined]


def _last_box(text: str) -> str | None:
    r"""Content of the last closed `\boxed{}` that is not blank, in one pass over `text`."""
    begins: list[int | None] = []  # open braces: where a box's content begins, None for other braces
    last: tuple[int, int] | None = None
    for part in _BOX_PARTS.finditer(text):
        if part.group().startswith("\\boxed"):
            begins.append(part.end())
        elif part.group() == "{":
            begins.append(None)
        elif part.group() == "}" and begins:
            begin = begins.pop()
            if begin is not None and (last is None or begin > last[0]) and not text[begin : part.start()].isspace():
                last = (begin, part.start()) if begin < part.start() else last
    return None if last is None else text[slice(*last)]


def _chosen(text: str) -> str | None:
    """The letter that `text` names; None if it begins otherwise or lists several letters."""
    words = [word for word in _WORD.findall(_COMMAND.sub(" ", text)) if word.lower() not in _WORDS_BESIDE_LETTERS]
    if not words or not _is_letter(words[0]):
        return None
    letters = [word for word in words if word not in _WORDS_BETWEEN_LETTERS]
    if all(map(_is_letter, letters)) and len(set(letters)) > 1:
        return None
    return words[0]


def _letter_without_box(text: str) -> str | None:
    """The letter after the last "answer is", else one with which the text begins, as in `B) because`."""
    end = max((phrase.end() for phrase in _PHRASE.finditer(text)), default=None)
    if end is not None:
        lines = text[end : end + _MOST_READ].strip(" \n:*").splitlines()
        return _chosen(lines[0]) if lines else None
    begin = text[:_MOST_READ].splitlines()[0] if text else ""
    return _chosen(begin) if _LETTER_AT_START.match(begin) else None


def _is_letter(word: str) -> bool:
    return len(word) == 1 and "A" <= word <= "Z"
