"""Planning imports no torch and makes equal plans in all processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.planning

FINGERPRINTS = """
import json, sys
import numpy as np
from roll_batching.planning import LinearQuadraticCost, PlanConstraints, karmarkar_karp, plan_step
found = []
lengths = np.clip(np.random.default_rng(5).lognormal(6, 0.9, 24), 1, 2048).astype(int)
for more in ({}, {"cp_size": 2, "objective": "lockstep"}, {"pp_size": 4, "vpp_size": 2},
             {"pp_size": 2}, {"algorithm": "first_fit_shuffle", "seed": 3},
             {"algorithm": "modified_first_fit_decreasing"}, {"mode": "dynamic", "algorithm": "prefer_closest"}):
    found.append(plan_step(lengths, PlanConstraints(dp_size=2, max_tokens=2048, **more)).fingerprint)
found.append(plan_step(lengths, PlanConstraints(dp_size=2, max_tokens=2048),
                       home_rank=np.arange(24) % 2).fingerprint)
found.append(karmarkar_karp(lengths, 5))
print(json.dumps(found))
"""


def run(code: str, **environment: str) -> str:
    result = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_importing_planning_imports_no_torch():
    heavy = run(
        "import sys, roll_batching.planning\n"
        "print([m for m in ('torch', 'megatron', 'ray', 'pandas', 'matplotlib') if m in sys.modules])"
    )
    assert heavy.strip() == "[]"


@pytest.mark.slow
def test_same_plans_under_other_hash_seeds_and_without_compiled_code():
    compiled = json.loads(run(FINGERPRINTS, PYTHONHASHSEED="0"))
    assert json.loads(run(FINGERPRINTS, PYTHONHASHSEED="12345")) == compiled
    assert json.loads(run(FINGERPRINTS, NUMBA_DISABLE_JIT="1")) == compiled
