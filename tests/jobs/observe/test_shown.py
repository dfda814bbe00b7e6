from __future__ import annotations

import io
from types import SimpleNamespace

import pytest
from matplotlib.figure import Figure
from rich.console import Console

from roll_batching.jobs.observe.closing import (
    _marks_panel,
    _padding_panel,
    _reward_panel,
    plot_learning_curve,
    show_summary,
    summarize,
)
from roll_batching.jobs.observe.progress import ProgressReporter, _clock, _short
from tests.jobs.observe.rows import rl_rows


def test_the_curve_is_a_picture_of_a_run(tmp_path):
    from PIL import Image

    plot_learning_curve(rl_rows(60), tmp_path / "curve.png", title="GRPO on the ledger task")
    with Image.open(tmp_path / "curve.png") as image:
        assert image.width >= 1200 and len(image.convert("RGB").getcolors(10**6)) > 100


@pytest.mark.parametrize("rows", [rl_rows(1), [{"phase": "warmup", "step": 1, "loss": 2.0}], []])
def test_the_curve_of_a_run_that_ended_early(tmp_path, rows):
    plot_learning_curve(rows, tmp_path / "curve.png", title="short")
    assert (tmp_path / "curve.png").stat().st_size > 5000


def test_the_curve_shows_the_mean_of_five_steps_and_the_share_of_padding():
    rows = [{"step": i, "reward": i * i / 49, "tokens": 30, "tokens_packed": 40} for i in range(1, 8)]
    reward, padding = Figure().subplots(1, 2)
    _reward_panel(reward, rows)
    _padding_panel(padding, rows)
    each, smooth = (line.get_xydata() for line in reward.lines)
    assert each[:, 1].tolist() == [row["reward"] for row in rows]
    assert smooth.tolist() == [[5, pytest.approx(11 / 49)], [6, pytest.approx(18 / 49)], [7, pytest.approx(27 / 49)]]
    assert padding.lines[0].get_xydata().tolist() == [[i, 0.25] for i in range(1, 8)]
    assert padding.yaxis.get_major_formatter()(0.25) == "25%"
    assert (reward.get_ylim(), padding.get_ylim()) == ((0, 1.02), (-0.02, 1.02))


@pytest.mark.parametrize("shares", [(0.0, 0.004), (0.001, 0.012), (0.1, 0.6)])
def test_ticks_of_small_shares_differ(shares):
    axes = Figure().subplots()
    _marks_panel(axes, [{"step": step, "clip_fraction": share} for step, share in enumerate(shares, 1)])
    axes.figure.draw_without_rendering()
    ticks = [label.get_text() for label in axes.get_yticklabels()]
    assert len(set(ticks)) == len(ticks) > 2 and all(tick.endswith("%") for tick in ticks)


def test_the_curve_shows_rewards_below_0():
    rows = [{"step": i, "reward": reward, "eval_updates": i, "eval_reward": -0.75} for i, reward in ((1, -1), (2, 1))]
    axes = Figure().subplots()
    _reward_panel(axes, rows)
    low, high = axes.get_ylim()
    assert low < -1 and high > 1


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
    for words in ("before", "after", "share of answers: shows work", "padded to the longest of the mini-batch"):
        assert words in text
    assert "sequence packing (this run)" in text and "tokens per second" in text


def test_the_table_holds_the_figures():
    out = io.StringIO()
    figures = {"reward_before": 0.25, "reward_after": 0.75, "response_length_before": 20.0}
    figures |= {"response_length_after": 12.5, "eval_seconds_after": 3.0}
    figures |= {"tokens": 60, "tokens_padded": 240, "tokens_packed": 80, "tokens_per_second": 1234.5}
    show_summary(figures, Console(file=out, width=110), used="packed", title="demo")
    cells = [[cell.strip() for cell in line.split("│")[1:-1]] for line in out.getvalue().splitlines() if "│" in line]
    assert cells == [
        ["reward", "0.250", "0.750", "+0.500"],
        ["response length", "20.0", "12.5", "-7.5"],
        ["padded to the longest of the mini-batch", "240", "75.0%", "1.00 x"],
        ["sequence packing (this run)", "80", "25.0%", "0.33 x"],
    ]
    assert "60 real tokens trained on, 1,234 tokens per second" in out.getvalue()


def test_the_table_names_domains_and_metrics_of_any_name():
    out = io.StringIO()
    rows = [{"phase": "rl", "eval_updates": step, "eval_reward": 0.5, "eval_reward/math_2": step} for step in (0, 1)]
    rows = [row | {"eval_mark/a/b": 0.5, "eval_margin/of pairs": 0.25} for row in rows]
    show_summary(summarize(rows), Console(file=out, width=110), used="packed", title="demo")
    cells = [[cell.strip() for cell in line.split("│")[1:-1]] for line in out.getvalue().splitlines() if "│" in line]
    assert cells == [
        ["reward", "0.500", "0.500", "+0.000"],
        ["reward: math_2", "0.000", "1.000", "+1.000"],
        ["share of answers: a/b", "0.500", "0.500", "+0.000"],
        ["margin/of pairs", "0.250", "0.250", "+0.000"],
    ]


def test_a_resumed_phase_tells_the_time_that_its_own_steps_take(monkeypatch):
    now = 100.0
    monkeypatch.setattr("roll_batching.jobs.observe.progress.time", SimpleNamespace(monotonic=lambda: now))
    out = io.StringIO()
    progress = ProgressReporter(console=Console(file=out, width=100))
    progress.start_phase("rl", 12, completed_steps=4)
    for now, step in ((130.0, 5), (139.0, 6), (140.0, 7), (141.6, 12)):  # noqa: B007 (the clock reads it)
        progress.advance(step, {"tokens": 1000.0, "rate": 0.00125, "loss": 0.0})
    assert [" ".join(line.split()) for line in out.getvalue().splitlines()] == [
        "rl 5/12 30 s/step tokens 1,000 rate 0.00125 loss 0",
        "rl 7/12 5 s/step, 25 s left tokens 1,000 rate 0.00125 loss 0",
        "rl 12/12 1.66 s/step, 0 s left tokens 1,000 rate 0.00125 loss 0",
    ]


def test_numbers_have_three_digits_and_times_two_units():
    numbers = {0.12345: "0.123", 3: "3", 3.14159: "3.14", 999.7: "1,000", 4321.0: "4,321", 37061.4: "37.1k"}
    numbers |= {9999: "9,999", 999_960.0: "1M", 2_500_000: "2.5M", 123_456_789.0: "123M", -0.00012345: "-0.000123"}
    assert {number: _short(number) for number in numbers} == numbers
    times = {0.4: "0 s", 59.6: "1 min 0 s", 200: "3 min 20 s", 10712: "2 h 58 min"}
    assert {seconds: _clock(seconds) for seconds in times} == times


def test_in_a_log_progress_is_a_few_lines():
    out = io.StringIO()
    progress = ProgressReporter(console=Console(file=out, width=60))
    progress.start_phase("rl", 500)
    for step in range(1, 501):
        progress.advance(step, {"reward": step / 500, "held-out": None})
    progress.close()
    lines = out.getvalue().splitlines()
    assert len(lines) == 2, "the first and the last step; nothing in between within ten seconds"
    assert "500/500" in lines[-1] and "reward 1" in lines[-1] and "held-out" not in lines[-1]


def test_on_a_terminal_progress_is_a_bar():
    out = io.StringIO()
    progress = ProgressReporter(console=Console(file=out, width=120, force_terminal=True))
    progress.start_phase("rl", 5)
    progress.advance(5, {"reward": 0.25})
    progress.note("a line above the bar")
    progress.close()
    assert "5/5" in out.getvalue() and "reward 0.25" in out.getvalue() and "a line above" in out.getvalue()
