"""The kill campaign: its draws, its failures, and single kills."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace

import pytest

from tests.campaigns.kills import campaign
from tests.support.ranks import ROOT

pytestmark = pytest.mark.cluster


def test_every_kind_is_drawn_and_a_seed_draws_the_same():
    kinds = list(campaign.SCENES)
    drawn = campaign.drawn(20, kinds, 3)
    assert len(drawn) == 20 and set(drawn) == set(kinds)
    assert campaign.drawn(20, kinds, 3) == drawn != campaign.drawn(20, kinds, 4)
    assert campaign.drawn(3, ["engine"], 0) == ["engine"] * 3


def test_what_does_not_hold():
    good = campaign.Outcome("rank", "1.0 s after step 3", "ended", 2.0, 0, True, True)
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
