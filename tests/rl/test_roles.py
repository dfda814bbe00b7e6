"""Roles in layouts of their own: the rows of the job whose roles share one."""

from __future__ import annotations

from typing import Any

import pytest

from roll_batching.observe.metrics_file import read_metrics
from tests.rl.jobs import settings, write_data
from tests.rl.test_resume import TIMES
from tests.support.ranks import run_ranks

SMALL: dict[str, Any] = {
    "reward_function": "tests.rl.jobs:length",
    "warmup": None,
    "use_kl_loss": True,
    "kl_loss_coef": 0.1,
    "actor_train__strategy_args": {"strategy_config": {"tensor_model_parallel_size": 2}},
}


def rows(folder: Any, **changes: Any) -> list[dict[str, Any]]:
    folder.mkdir()
    write_data(folder)
    run_ranks(4, "tests.rl.jobs:run", settings(folder, **SMALL, **changes), timeout=600)
    return read_metrics(folder / "runs" / "tiny" / "metrics.jsonl")


def own(**sizes: Any) -> dict[str, Any]:
    return {"strategy_args": {"strategy_config": sizes}}


REFERENCE = own(tensor_model_parallel_size=1, pipeline_model_parallel_size=2)


@pytest.mark.layouts
def test_a_reference_in_its_own_layout_writes_the_rows_of_one_that_shares(tmp_path: Any, report: Any) -> None:
    shared = rows(tmp_path / "shared", reference={})
    apart = rows(tmp_path / "apart", reference=REFERENCE, save_steps=1, is_offload_states=True)
    for one, other in zip(shared, apart, strict=True):
        assert one.keys() == other.keys() - {"offload_bytes", "offload_seconds"}
        for name in one.keys() - TIMES:
            close = one[name] if isinstance(one[name], str) else pytest.approx(one[name], rel=1e-4, abs=1e-6)
            assert other[name] == close, name
    report(f"loss with the reference in the policy's layout and in its own: {shared[-1]['loss']}, {apart[-1]['loss']}")
