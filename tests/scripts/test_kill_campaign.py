"""The campaign of kills: what it draws, what it takes for a failure, and one kill of its own."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.cluster


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    return importlib.import_module("kill_campaign")


def test_every_kind_is_drawn_and_a_seed_draws_the_same(script):
    kinds = list(script.SCENES)
    drawn = script.drawn(20, kinds, 3)
    assert len(drawn) == 20 and set(drawn) == set(kinds)
    assert script.drawn(20, kinds, 3) == drawn != script.drawn(20, kinds, 4)
    assert script.drawn(3, ["engine"], 0) == ["engine"] * 3


def test_what_does_not_hold(script):
    good = script.Outcome("rank", "1.0 s after step 3", "ended", 2.0, 0, True, True)
    assert good.holds
    for wrong in ({"left": 1}, {"rows": False}, {"samples": False}, {"fault": "nothing happened within 30 s"}):
        assert not replace(good, **wrong).holds


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["launcher", "reward worker"])
def test_a_kill(kind, tmp_path):
    found = tmp_path / "kills.json"
    options = ["--check", "--kills", "1", "--only", kind, "--slack", "4", "--json", str(found)]
    done = subprocess.run(
        [sys.executable, "scripts/kill_campaign.py", *options], cwd=ROOT, capture_output=True, text=True, timeout=1500
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (outcome,) = json.loads(found.read_text())
    assert outcome["kind"] == kind and outcome["became"] in ("ended", "went on")
