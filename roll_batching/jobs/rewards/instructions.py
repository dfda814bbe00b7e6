"""Reward of verifiable instructions (IFEval): whether a response keeps the constraint in its prompt's line."""

from __future__ import annotations

import inspect
import json
from typing import Any

from roll_batching.jobs.rewards.answers import answer_text, check_penalty, repeated_share
from roll_batching.jobs.rewards.constraints import CONSTRAINTS, LANGUAGE_NOTICE, can_detect_languages
from roll_batching.jobs.rewards.contract import Completion, PromptLine, Score

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
    kept = bool(text) and CONSTRAINTS[name](text, **arguments)
    penalty = repetition_penalty * repeated_share(completion.response) if repetition_penalty else 0.0
    return Score(reward=kept - penalty, marks={"keeps_constraint": kept})


def check_instruction_arguments(repetition_penalty: Any = 0.0) -> str:
    """A notice if languages cannot be detected. Raises ValueError for an invalid `repetition_penalty`."""
    check_penalty(repetition_penalty)
    return "" if can_detect_languages() else LANGUAGE_NOTICE


def check_constraint(line: PromptLine, **_: Any) -> None:
    """Raises ValueError for a constraint that is invalid, or whose library is not installed."""
    name, arguments = _read_constraint(line.answer)
    CONSTRAINTS[name]("a", **arguments)


ifeval.check_arguments = check_instruction_arguments  # type: ignore[attr-defined]
ifeval.check_record = check_constraint  # type: ignore[attr-defined]


def _read_constraint(answer: Any) -> tuple[str, dict[str, Any]]:
    """Name and arguments of the constraint. Raises ValueError for an invalid one."""
    try:
        given = json.loads(answer) if isinstance(answer, str) else answer
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the answer of its prompt is no JSON of a constraint: {_short(answer)} ({error})") from None
    name = given.get(_NAME) if isinstance(given, dict) else None
    if not isinstance(name, str) or name not in CONSTRAINTS:
        raise ValueError(
            f"the answer of its prompt has no {_NAME} of a constraint: {_short(given)}. There are: "
            f"{', '.join(CONSTRAINTS)}"
        )
    arguments: dict[str, Any] = {}
    for key, parameter in list(inspect.signature(CONSTRAINTS[name]).parameters.items())[1:]:
        value = given.get(key)
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
    valid = isinstance(value, list) and all(isinstance(one, str) and one.strip() for one in value) and bool(value)
    return "" if valid else "it is a list of texts that are not blank"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
