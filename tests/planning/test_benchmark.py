"""The planner's bench runs, and notices a figure that is missed."""

from __future__ import annotations

import json
import re
import sys

import pytest

from benchmarks import bench_planner as bench
from benchmarks.planner import checks

pytestmark = pytest.mark.planning


def test_the_table_names_every_workload_and_planner(tmp_path, monkeypatch, capsys):
    lengths = tmp_path / "mine.csv"
    lengths.write_text("".join(f"{100 + 37 * i % 900}\n" for i in range(300)))
    table = tmp_path / "table.json"
    arguments = ["--seeds", "1", "--lengths", str(lengths), "--batch", "100", "--json", str(table)]
    monkeypatch.setattr(sys, "argv", ["bench_planner.py", *arguments])
    assert bench.main() == 0
    rows = json.loads(table.read_text())["table"]
    workloads = {row["workload"] for row in rows}
    assert {"W1 n=256", "one giant n=1024", "mine n=100 dp=8 cap=16384"} <= workloads
    assert {row["planner"] for row in rows} == {"roll-batching", "FFD + cost-sorted groups"}
    assert not any(row["over"] or row["missing"] for row in rows)
    assert "| W1 n=256 | roll-batching | 1.0" in capsys.readouterr().out


def test_a_figure_that_is_missed_fails_the_check(monkeypatch, capsys):
    one = checks.Checks()
    one.at_most("small", 1.0, 1.0)
    one.at_least("large", 1.0, 1.0)
    one.yards("quick", [lambda: None], 0.01)
    assert all(row["holds"] for row in one.rows)
    one.at_most("too large", 1.1, 1.0)
    one.at_least("too small", 0.9, 1.0)
    one.yards("too slow", [lambda: sum(range(1_000_000))], 0.01)
    assert [row["holds"] for row in one.rows[3:]] == [False] * 3
    monkeypatch.setattr(bench, "WORKLOADS", {})
    for rows, code in ((one.rows[:3], 0), (one.rows, 1)):
        monkeypatch.setattr(bench, "run_checks", lambda rows=rows: rows)
        monkeypatch.setattr(sys, "argv", ["bench_planner.py", "--check"])
        assert bench.main() == code
    assert re.search(r"\| too slow, time / yardstick \| [\d.]+ \| <= 0.01 \| NO \|", capsys.readouterr().out)
