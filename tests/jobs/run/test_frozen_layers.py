"""Jobs that freeze some layers of policy and critic: killed while they save, and resumed to the bit."""

from __future__ import annotations

import signal
from typing import Any

import pytest

from tests.jobs.rl.jobs import write_data
from tests.jobs.run.test_resume import rows_of, saved, saving
from tests.support.ranks import run_ranks

RUN = "tests.jobs.run.test_resume:run_until"
FROZEN = "embedding,decoder.layers.0"  # the example of docs/fine-tuning.md
CASES = {
    "grpo": {"actor_train__strategy_args__strategy_config": {"use_distributed_optimizer": True}},
    "ppo, pipeline, saved in the background": {
        "adv_estimator": "gae",
        "async_save": True,
        "critic__model_args__freeze_module_prefix": "decoder.layers.1",
        "actor_train__strategy_args__strategy_config": {"pipeline_model_parallel_size": 2},
    },
}


@pytest.mark.parametrize("case", [pytest.param(case, marks=[pytest.mark.slow] * (case != "grpo")) for case in CASES])
def test_killed_and_resumed_to_the_bit(tmp_path: Any, case: str) -> None:
    write_data(tmp_path)
    changes = {
        "actor_train__model_args__freeze_module_prefix": FROZEN,
        "actor_train__model_args__architecture__num_layers": 4,
        "use_kl_loss": True,
        "reference": {},
        **CASES[case],
    }
    run_ranks(2, RUN, {"job": saving(tmp_path, "straight", **changes), "generators": 5})
    job = saving(tmp_path, "killed", resume_from_checkpoint=True, **changes)
    outcomes = run_ranks(2, RUN, {"job": job, "generators": 5, "die_after": 7}, check=False, grace=3)
    assert outcomes[1].returncode == -signal.SIGKILL, outcomes[1].output
    run_ranks(2, RUN, {"job": job, "generators": 7})
    expected, found = (
        [{key: value for key, value in row.items() if not key.endswith("_seconds")} for row in rows_of(tmp_path, name)]
        for name in ("straight", "killed")
    )
    assert len(expected) == 8 and len({row["loss"] for row in expected}) == 8
    assert not [(a["phase"], a["step"]) for a, b in zip(expected, found, strict=True) if a != b]
    assert saved(tmp_path, "killed") == saved(tmp_path, "straight")
