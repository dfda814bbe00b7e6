"""The table of what goes with what: every row has a reason, a cure, keys of the schema, and tests that exist."""

from __future__ import annotations

from pathlib import Path

import pytest

from roll_batching.jobs.config import ConfigFileError, config_from_dict
from roll_batching.jobs.config import features as f
from roll_batching.jobs.config.key_paths import field_at
from roll_batching.jobs.config.reference import support_page
from roll_batching.jobs.config.support import PACKING_REFUSALS, PACKING_TESTED, REFUSALS, TESTED
from roll_batching.settings.support import ROLE_REFUSALS, ROLE_TESTED
from tests.jobs.config.test_idle_keys import changed_rl

ROOT = Path(__file__).parents[3]


def test_the_page_of_what_goes_with_what_is_current():
    page = (ROOT / "docs" / "what-goes-with-what.md").read_text(encoding="utf-8")
    assert page == support_page(), "run python -m roll_batching.jobs.config.reference docs/what-goes-with-what.md"


ALL = [*REFUSALS, *PACKING_REFUSALS, *ROLE_REFUSALS]


@pytest.mark.parametrize("row", ALL, ids=lambda row: f"{row.feature.name}, {row.other.name}")
def test_a_refused_pair_has_a_key_a_reason_and_a_cure(row):
    prefix = () if row in REFUSALS else ("actor_train",)
    assert field_at((*prefix, *row.path)) is not None or row.path[0] == "loss_args"
    assert len(row.reason) > 8 and len(row.cure) > 3 and row.feature is not row.other


def test_no_pair_is_refused_twice_or_both_refused_and_tested():
    for refusals, tested in ((REFUSALS, TESTED), (PACKING_REFUSALS, PACKING_TESTED), (ROLE_REFUSALS, ROLE_TESTED)):
        pairs = [frozenset((row.feature.name, row.other.name)) for row in refusals]
        assert len(pairs) == len({(row.feature, row.other) for row in refusals})
        assert not set(pairs) & {frozenset((one.name, other.name)) for one, other in tested}
        assert all((ROOT / "tests" / test).is_file() for test in tested.values())


@pytest.mark.bad_input
def test_a_refused_pair_names_key_reason_and_cure():
    with pytest.raises(ConfigFileError) as caught:
        config_from_dict(changed_rl({"dynamic_sampling": True, "async_generation_ratio": 1}))
    (problem,) = [problem for problem in caught.value.problems if problem.path == ("dynamic_sampling",)]
    (row,) = [row for row in REFUSALS if (row.feature, row.other) == (f.DYNAMIC, f.ASYNC)]
    assert problem.message == f"{row.reason}; {row.cure}"
