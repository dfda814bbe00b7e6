"""Number of random plans in property tests."""

from __future__ import annotations

import pytest


@pytest.fixture
def random_plans(request: pytest.FixtureRequest) -> int:
    return 100_000 if request.config.getoption("--deep") else 2_000
