"""Sweep of planners: measures of plans, time limit of a peer, cache of results."""

from __future__ import annotations

import json
import subprocess
import sys
import time

import numpy as np
import pytest

from benchmarks import bench_planner as bench
from benchmarks.planner import sweep, sweep_report
from benchmarks.planner.sweep import Case, judge
from roll_batching.planning import token_cost

pytestmark = pytest.mark.planning

PEER = """
class DpBalancedScheduler:
    def __init__(self, cap, cp_size, dp_size, group):
        self.dp_size = dp_size

    def get_groups_and_subsamples(self, ids_and_lengths):
        {}
        return [[[i + rank] for rank in range(self.dp_size)] for i in range(0, len(ids_and_lengths), self.dp_size)]
"""


def test_a_plan_is_judged_by_what_its_ranks_compute():
    lengths = np.array([4, 1, 3, 2])
    apart = judge([[[0], [1]], [[3], [2]]], lengths, 4, token_cost(), sort=False)
    assert apart == {"rank": 1.0, "lockstep": 7 / 5, "K": 2, "over": 0, "missing": 0}
    assert judge([[[0], [1]], [[3], [2]]], lengths, 4, token_cost(), sort=True)["lockstep"] == 6 / 5
    lost = judge([[[0, 1]], [[3]]], lengths, 4, token_cost(), sort=True)
    assert (lost["K"], lost["over"], lost["missing"], lost["rank"]) == (1, 1, 1, 1.0)


def row(theirs: dict, **case: object) -> dict:
    plan = {"rank": 1.01, "lockstep": 1.02, "K": 3, "over": 0, "missing": 0, "seconds": 0.1, "bound": 1.01}
    where = {"source": "lognormal", "seed": 0, "n": 64, "ranks": 2, "cap": 8192, "cost": "L"} | case
    return {"case": where, "ours": {"auto": plan, "ep": plan}, "peers": {"peer": {**plan, **theirs}}}


def test_a_peer_is_ahead_only_within_the_cap_and_at_our_count():
    def failing(rows):
        return [figure["figure"].partition(":")[0] for figure in sweep_report.figures(rows) if not figure["holds"]]

    level = [row({}, seed=seed) for seed in range(300)]
    ahead = {"rank": 1.0, "lockstep": 1.02}
    assert failing([*level, row({})]) == []
    assert failing([*level, row(ahead)]) == ["rank"]
    assert failing([*level, row({"lockstep": 1.0})]) == ["lockstep"]
    assert failing([*level, row({"rank": 1.0095})]) == []
    assert failing([*level[:100], row({"rank": 1.0095})]) == ["rank"]
    for apart in ({"K": 4}, {"over": 1}, {"missing": 2}):
        assert failing([*level, row(ahead | apart)]) == []
    assert failing([*level, row(ahead, ranks=1)]) == []
    assert failing([*level, row(ahead | {"K": 2})]) == ["rank"]


def test_the_time_limit_counts_processor_time():
    with sweep.time_limit(0.05):
        time.sleep(0.2)
    with pytest.raises(sweep.OverTheLimit), sweep.time_limit(0.05):
        while True:
            pass


def test_a_case_is_told_from_its_key_and_harder_ones_from_their_sizes():
    case = Case("a/folder/file.csv", 1, 256, 8, 16384, "L^2")
    assert Case.of(case.key) == case
    assert Case("a/folder/file.csv", 0, 1024, 8, 8192, "L").at_least_as_hard_as(case)
    for other in ((64, 8, 8192), (1024, 4, 8192), (1024, 8, 32768)):
        assert not Case("a/folder/file.csv", 1, *other, "L^2").at_least_as_hard_as(case)
    assert not Case("lognormal", 1, 256, 8, 16384, "L^2").at_least_as_hard_as(case)


def test_a_peer_is_asked_once_per_commit_and_case(tmp_path, monkeypatch, capsys):
    file = tmp_path / "peer/megatron/core/datasets/data_schedule.py"
    file.parent.mkdir(parents=True)
    git = ["git", "-C", str(tmp_path / "peer"), "-c", "user.name=t", "-c", "user.email=t@localhost"]
    subprocess.run([*git, "init", "-q"], check=True)
    tables = []
    for body in ("pass", "raise AssertionError('asked again')"):
        file.write_text(PEER.format(body))
        if not tables:
            subprocess.run([*git, "add", "."], check=True)
            subprocess.run([*git, "commit", "-q", "-m", "one"], check=True)
        arguments = ["--sweep", "--sweep-seeds", "1", "--sweep-every", "40", "--megatron", str(tmp_path / "peer")]
        arguments += ["--cache", str(tmp_path / "cache"), "--json", str(tmp_path / "out.json")]
        monkeypatch.setattr(sys, "argv", ["bench_planner.py", *arguments])
        assert bench.main() == 0
        tables.append(json.loads((tmp_path / "out.json").read_text()))
    first, second = ([case["peers"] for case in table["cases"]] for table in tables)
    assert len(first) > 3
    assert first == second
    assert all(peer["Megatron-LM"]["missing"] == 0 for peer in first)
    assert "| Megatron-LM |" in capsys.readouterr().out


def test_the_check_wants_every_peer(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["bench_planner.py", "--sweep", "--check"])
    with pytest.raises(SystemExit) as stopped:
        bench.main()
    assert stopped.value.code == 2
    assert "verl, slime, prime_rl, nemo_rl, trl, megatron" in capsys.readouterr().err
