from __future__ import annotations

import io

import pytest
from rich.console import Console

from roll_batching.observe.curves import plot_learning_curve
from roll_batching.observe.progress import ProgressReporter
from roll_batching.observe.summary import show_summary, summarize
from tests.observe.rows import rl_rows


def test_the_curve_is_a_picture_of_a_run(tmp_path):
    from PIL import Image

    plot_learning_curve(rl_rows(60), tmp_path / "curve.png", title="GRPO on the ledger task")
    with Image.open(tmp_path / "curve.png") as image:
        assert image.width >= 1200 and len(image.convert("RGB").getcolors(10**6)) > 100


@pytest.mark.parametrize("rows", [rl_rows(1), [{"phase": "warmup", "step": 1, "loss": 2.0}], []])
def test_the_curve_of_a_run_that_ended_early(tmp_path, rows):
    plot_learning_curve(rows, tmp_path / "curve.png", title="short")
    assert (tmp_path / "curve.png").stat().st_size > 5000


def test_the_figures_are_sums_over_the_rl_rows():
    rows = [{"phase": "warmup", "step": 1, "tokens": 10**9}, *rl_rows(40)]
    figures = summarize(rows)
    assert figures["tokens"] == sum(r["tokens"] for r in rows[1:])
    assert figures["tokens_per_second"] == pytest.approx(figures["tokens"] / 20.0)
    assert figures["reward_before"] == rows[1]["eval_reward"]
    assert figures["reward_after"] == rows[40]["eval_reward"]


def test_the_table_names_before_after_and_every_mode():
    out = io.StringIO()
    show_summary(summarize(rl_rows(40)), Console(file=out, width=110), used="packed", title="demo")
    text = out.getvalue()
    for words in ("before RL", "share of answers: shows work", "padded to the longest of the mini-batch"):
        assert words in text
    assert "sequence packing (this run)" in text and "tokens per second" in text


def test_in_a_log_progress_is_a_few_lines():
    out = io.StringIO()
    progress = ProgressReporter(console=Console(file=out, width=60))
    progress.start("rl", 500)
    for step in range(1, 501):
        progress.advance(step, {"reward": step / 500, "held-out": None})
    progress.close()
    lines = out.getvalue().splitlines()
    assert len(lines) == 2, "the first and the last step; nothing in between within ten seconds"
    assert "500/500" in lines[-1] and "reward 1" in lines[-1] and "held-out" not in lines[-1]


def test_on_a_terminal_progress_is_a_bar():
    out = io.StringIO()
    progress = ProgressReporter(console=Console(file=out, width=120, force_terminal=True))
    progress.start("rl", 5)
    progress.advance(5, {"reward": 0.25})
    progress.note("a line above the bar")
    progress.close()
    assert "5/5" in out.getvalue() and "reward 0.25" in out.getvalue() and "a line above" in out.getvalue()
