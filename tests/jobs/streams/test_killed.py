"""A stream that is killed at random batches goes on, from its last saved state, as if it never had been."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

pytestmark = [pytest.mark.streams, pytest.mark.filterwarnings("ignore:This process .* is multi-threaded")]


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[3] / "scripts"))
    return importlib.import_module("_streams_resume")


@pytest.mark.parametrize("workers", [0, 2])
def test_killed_a_few_times(script, workers, report):
    again, differing, _, wrong = script.killed_and_resumed(workers, 600, 4)
    assert again > 0 and not differing and not wrong
    report(f"600 batches, killed 4 times, {workers} loader processes: {again} drawn again, none differs")


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2, 4])
def test_killed_twenty_times_in_ten_thousand(script, workers):
    again, differing, epochs, wrong = script.killed_and_resumed(workers, script.BATCHES, script.KILLS)
    assert again > 0 and epochs > 1 and not differing and not wrong
