"""What other batching modes would have cost: figures beside a run, which never end it."""

from __future__ import annotations

import numpy as np
import pytest

from roll_batching.jobs.config import config_from_dict
from roll_batching.jobs.rollouts.step_metrics import ModeComparison
from roll_batching.planning import ParallelDims
from tests.jobs.rl.jobs import settings

pytestmark = pytest.mark.config


@pytest.mark.parametrize(
    "changes",
    [
        {"sequence_packing_args": {"max_packed_sequence_length_train": 63}},  # no multiple of a rectangle's 4
        {"sequence_packing_args": {"max_packed_sequence_length_train": 64}, "max_tokens_per_microbatch_in_train": 32},
        {
            "use_sequence_packing": False,
            "use_dynamic_batching_in_train": True,
            "max_tokens_per_microbatch_in_train": 64,
            "sequence_packing_args": {"max_packed_sequence_length_train": 32},
        },
    ],
)
def test_a_sample_may_be_longer_than_the_cap_of_a_mode_that_does_not_run(tmp_path, changes):
    job = settings(tmp_path, prompt_length=40, response_length=23)
    job["actor_train"] |= changes
    config = config_from_dict(job)
    comparison = ModeComparison(config.actor_train, ParallelDims(dp_size=1), sequence_length=63)
    tokens = comparison.tokens(np.array([63, 20, 12]))
    assert (tokens["full"], tokens["padded"]) == (189, 189)
    assert 95 <= tokens["packed"] <= tokens["dynamic"] <= 189
