"""A stream that is killed at random batches goes on, from its last saved state, as if it never had been."""

from __future__ import annotations

import pytest

from benchmarks.streams import resume

pytestmark = [pytest.mark.streams, pytest.mark.filterwarnings("ignore:This process .* is multi-threaded")]


@pytest.mark.parametrize("workers", [0, 2])
def test_killed_a_few_times(workers, report):
    again, differing, _, wrong = resume.killed_and_resumed(workers, 600, 4)
    assert again > 0 and not differing and not wrong
    report(f"600 batches, killed 4 times, {workers} loader processes: {again} drawn again, none differs")


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2, 4])
def test_killed_twenty_times_in_ten_thousand(workers):
    again, differing, epochs, wrong = resume.killed_and_resumed(workers, resume.BATCHES, resume.KILLS)
    assert again > 0 and epochs > 1 and not differing and not wrong
