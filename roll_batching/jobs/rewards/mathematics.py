"""Reward by mathematical equality, with Hugging Face's library math-verify (the extra `math`)."""

from __future__ import annotations

import logging
from typing import Any

from math_verify import parse, verify

from roll_batching.jobs.rewards.contract import Completion, PromptLine, Score, text_answer

logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns about every answer that it cannot parse


def math_verify(completion: Completion, after: str | None = None) -> Score:
    r"""1 when the response has an answer that equals the right one, else 0; marks `has_answer`.

    The right answer may be LaTeX, with or without `$` or `\boxed`, or a plain number. With `after`, only text after
    its last occurrence counts, and a response without it has no answer. Parsing and comparing have the library's limits
    of 5 seconds each, after which the answer counts as wrong.
    """
    gold = _right_answer(completion)
    _, separator, text = completion.response.rpartition(after) if after else ("", "", completion.response)
    answer: list[Any] = parse(text) if separator or not after else []
    return Score(reward=float(bool(answer) and verify(gold, answer)), marks={"has_answer": bool(answer)})


def _right_answer(line: PromptLine) -> list[Any]:
    """The line's answer, as math-verify parses it. Raises ValueError if it cannot."""
    text = text_answer(line)
    # The library reads LaTeX only inside of marks, so a bare answer is tried with `$` first.
    marked = "$" in text or "\\boxed" in text or "\\(" in text or "\\[" in text
    gold: list[Any] = (parse(text) if marked else parse(f"${text}$")) or parse(text)
    if not gold:
        raise ValueError(f"the right answer {text[:60]!r} cannot be parsed by math-verify: write LaTeX")
    return gold


math_verify.check_record = lambda line, **_: _right_answer(line)  # type: ignore[attr-defined]
