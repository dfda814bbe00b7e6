from __future__ import annotations

import io

import pytest
from rich.console import Console

from roll_batching.jobs.observe.closing import show_summary
from roll_batching.jobs.observe.progress import _short, fixed


@pytest.mark.parametrize(
    ("value", "digits", "text"),
    [(0.5, 2, "0.50"), (-1234.5, 1, "-1,234.5"), (1e300, 3, "1e+300"), (-1.23456e15, 2, "-1.23e+15"), (7, 0, "7")],
)
def test_numbers_stay_short(value: float, digits: int, text: str) -> None:
    assert fixed(value, digits) == text
    assert fixed(abs(value), digits, sign=True) == f"+{text.lstrip('-')}"


def test_a_huge_reward_is_one_word_on_the_terminal() -> None:
    console = Console(file=io.StringIO(), width=200)
    show_summary({"reward_before": 0.0, "reward_after": 1e300}, console, used="packed", title="t")
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "1e+300" in text and "0000" not in text and _short(1e300) == "1e+300"
