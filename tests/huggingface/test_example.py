"""`examples/train_hf_model.sh` does what it says: from a model directory to one that transformers loads."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from roll_batching.jobs.config import load_config

ROOT = Path(__file__).resolve().parents[2]
CONFIG = ROOT / "examples" / "hf_model" / "config.yaml"

pytestmark = pytest.mark.models


def test_its_settings_have_no_notices():
    assert load_config(CONFIG).notices == ()


@pytest.mark.slow
def test_the_script_makes_trains_writes_and_loads_a_model(report):
    command = [str(ROOT / "examples" / "train_hf_model.sh"), "--no-install"]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=290, env=os.environ | {"PYTHON": sys.executable}
    )
    assert done.returncode == 0, done.stdout + done.stderr
    shares = re.findall(r"(\d+)% digits", done.stdout)
    assert len(shares) == 2 and all(int(share) > 80 for share in shares)
    report(next(line for line in done.stdout.splitlines() if "digits" in line))
