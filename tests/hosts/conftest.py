"""Tests against checkouts of hosts: `scripts/hosts.sh` makes each one's environment and names its checkout."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

VARIABLES = {
    "test_verl.py": "VERL",
    "test_verl_trainer.py": "VERL",
    "test_roll.py": "ROLL",
    "test_nemo_rl.py": "NEMO_RL",
    "test_megatron_lm.py": "MEGATRON",
    "test_megatron_lm_training.py": "MEGATRON",
}
collect_ignore = [name for name, variable in VARIABLES.items() if f"{variable}_CHECKOUT" not in os.environ]


@pytest.fixture(scope="module")
def checkout(request: pytest.FixtureRequest) -> Path:
    """The checkout of the test module's host."""
    return Path(os.environ[f"{VARIABLES[request.path.name]}_CHECKOUT"])
