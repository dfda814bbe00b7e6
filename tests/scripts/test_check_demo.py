"""The verdict of `check_demo.py`: it holds exactly when every condition does."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def check(tmp_path, monkeypatch):
    """The script as a module that looks for runs and data in a folder of its own; `write(...)` fills it."""
    spec = importlib.util.spec_from_file_location("check_demo", ROOT / "scripts" / "check_demo.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "ROOT", tmp_path)
    monkeypatch.setattr(sys, "argv", ["check_demo.py", "--judge-only"])
    return module


def write(root, **changes):
    """Three seeds and a control that pass; `seed2__after=0.5` changes one figure of one run."""
    runs = {f"seed{seed}": dict(before=0.4, after=0.72, seconds=200.0, tail=3.2, answers=512) for seed in (1, 2, 3)}
    runs["seed1-shuffled"] = dict(before=0.4, after=0.45, seconds=200.0, tail=4.0, answers=512)
    extra = set()
    for path, value in changes.items():
        if path == "leaked":
            extra = {value}
        else:
            name, figure = path.split("__")
            runs[name.replace("_", "-")][figure] = value
    for name, run in runs.items():
        folder = root / "runs" / f"check-{name}"
        folder.mkdir(parents=True)
        rows = [{"phase": "warmup", "step": 1}]
        for step, reward, updates in ((1, run["before"], 0), (2, run["after"], 2)):
            row = {"phase": "rl", "step": step, "eval_reward": reward, "eval_updates": updates}
            rows.append(row | {"eval_samples": run["answers"], "length_max_over_mean": run["tail"]})
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        (folder / "seconds.json").write_text(json.dumps(run["seconds"]))
    held = [f"a+{i}=" for i in range(512)]
    for seed in (1, 2, 3):
        folder = root / "data" / "ledger" / f"seed{seed}"
        folder.mkdir(parents=True)
        for file, prompts in (("heldout", held), ("corpus", ["b+1=", *extra]), ("prompts", ["c+1="])):
            (folder / f"{file}.jsonl").write_text("".join(json.dumps({"prompt": p}) + "\n" for p in prompts))


def verdict(module):
    with pytest.raises(SystemExit) as ended:
        module.main()
    return ended.value.code


def test_all_conditions_hold(check, tmp_path, capsys):
    write(tmp_path)
    assert verdict(check) == 0
    assert capsys.readouterr().out.count("OK") == 5


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"seed2__after": 0.64}, "rises by at least 0.25"),
        ({"seed1__after": 0.66, "seed2__after": 0.66, "seed3__after": 0.66}, "below 0.3"),
        ({"seed3__before": 0.51, "seed3__after": 0.9}, "starts below 0.5"),
        ({"seed1_shuffled__after": 0.52}, "the control rises by at most 0.1"),
        ({"seed1__seconds": 481.0}, "at most 8 minutes"),
        ({"seed1__tail": 2.9}, "longest / mean"),
        ({"seed2__answers": 511}, "512 answers"),
        ({"leaked": "a+7="}, "held-out problems unseen"),
    ],
)
def test_each_condition_counts(check, tmp_path, capsys, change, words):
    write(tmp_path, **change)
    assert verdict(check) == 1
    assert words in capsys.readouterr().out


@pytest.mark.parametrize(("arguments", "code", "words"), [(["--help"], 0, "--control shuffled"), (["what"], 2, "what")])
def test_the_demo_script_explains_itself(arguments, code, words):
    done = subprocess.run(["bash", str(ROOT / "scripts" / "demo.sh"), *arguments], capture_output=True, text=True)
    assert done.returncode == code and words in done.stdout + done.stderr
