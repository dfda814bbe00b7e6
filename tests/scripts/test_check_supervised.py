"""The verdict of `check_supervised.py`: it holds exactly when every condition does."""

from __future__ import annotations

import importlib.util
import json
import math
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
GOOD = {
    "check-sft": dict(before=2.5, after=0.02),
    "check-sft-control": dict(before=2.5, after=1.03),
    "check-dpo": dict(before=math.log(2), after=0.07, apart=1.0),
    "check-dpo-control": dict(before=math.log(2), after=0.69, apart=0.5),
}


@pytest.fixture
def check(tmp_path, monkeypatch):
    """The script as a module that looks for runs and data in a folder of its own."""
    spec = importlib.util.spec_from_file_location("check_supervised", ROOT / "scripts" / "check_supervised.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "ROOT", tmp_path)
    monkeypatch.setattr(sys, "argv", ["check_supervised.py", "--judge-only"])
    return module


def write(root, leaked=False, **changes):
    for name, figures in GOOD.items():
        figures = {"seconds": 60.0, **figures, **changes.get(name.replace("-", "_"), {})}
        folder = root / "runs" / name
        folder.mkdir(parents=True)
        rows = [
            {"step": step, "eval_updates": updates, "eval_loss": figures[when]}
            | {"eval_reward_accuracy": figures.get("apart", 0.0)}
            for step, updates, when in ((1, 0, "before"), (9, 9, "after"))
        ]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        (folder / "seconds.json").write_text(json.dumps(figures["seconds"]))
    for data in ("supervised", "supervised-control"):
        folder = root / "data" / data
        folder.mkdir(parents=True)
        for task in ("sft", "dpo"):
            held = [json.dumps({"prompt": f"{i}="}) for i in range(256)]
            (folder / f"{task}_heldout.jsonl").write_text("\n".join(held))
            (folder / f"{task}.jsonl").write_text(held[7] if leaked else '{"prompt": "a="}')


def verdict(check):
    with pytest.raises(SystemExit) as ended:
        check.main()
    return ended.value.code


def test_runs_that_learn_and_controls_that_do_not(check, tmp_path, capsys):
    write(tmp_path)
    assert verdict(check) == 0 and "all holds" in capsys.readouterr().out


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"check_sft": {"after": 0.2}}, "ends below 0.1"),
        ({"check_sft": {"before": 1.0}}, "starts above 2.0"),
        ({"check_sft_control": {"after": 0.3}}, "ends above 0.8"),
        ({"check_dpo": {"apart": 0.9}}, "at least 95% ranked correctly"),
        ({"check_dpo": {"before": 0.8}}, "starts at log 2"),
        ({"check_dpo_control": {"apart": 0.8}}, "at most 65% ranked correctly"),
        ({"check_dpo": {"seconds": 301.0}}, "at most 5 minutes"),
        ({"leaked": True}, "held-out texts unseen"),
    ],
)
def test_each_condition_counts(check, tmp_path, capsys, changes, words):
    write(tmp_path, **changes)
    assert verdict(check) == 1 and f"FAILS: {words}" in capsys.readouterr().out
