"""`pytest tests/planning --deep`: 100,000 random plans instead of 2,000, all invariants on each."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--deep", action="store_true", help="100,000 random plans instead of 2,000")


@pytest.fixture
def random_plans(request: pytest.FixtureRequest) -> int:
    return 100_000 if request.config.getoption("--deep", default=False) else 2_000
