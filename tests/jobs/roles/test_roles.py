"""Roles in parallel layouts of their own: the rows of a job whose roles share one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from roll_batching.jobs.observe.run_files import read_metrics
from tests.jobs.rl.jobs import settings, write_data
from tests.jobs.run.test_resume import TIMES, rows_of
from tests.support.ranks import run_ranks

SMALL: dict[str, Any] = {
    "reward_function": "tests.jobs.rl.jobs:length",
    "warmup": None,
    "use_kl_loss": True,
    "kl_loss_coef": 0.1,
    "actor_train__strategy_args": {"strategy_config": {"tensor_model_parallel_size": 2}},
}


def rows(folder: Any, **changes: Any) -> list[dict[str, Any]]:
    folder.mkdir()
    write_data(folder)
    run_ranks(4, "tests.jobs.rl.jobs:run", settings(folder, **SMALL, **changes), timeout=600)
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


# ---- actor_infer

WAY = {"weights_bytes"}
"""Columns of a job whose sampler has a layout of its own, beside `TIMES`."""
OFFLOADS = {"offload_bytes", "offload_seconds"}
EXACT: dict[str, Any] = {
    "reward_function": "tests.jobs.rl.jobs:length",
    "warmup": None,
    "rollout_samples": -1,
    # In fp64, whose roundings no draw is near enough to notice. Megatron clips gradients of fp32 alone.
    "actor_train__model_args__dtype": "fp64",
    "max_grad_norm": 0,
}


def written(folder: Path, ranks: int, name: str, **changes: Any) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """A job's rows, without times, and all that its model said."""
    write_data(folder)
    run_ranks(ranks, "tests.jobs.rl.jobs:run", settings(folder, **{"exp_name": name, **EXACT, **changes}), timeout=600)
    said = (folder / "runs" / name / "rollouts.jsonl").read_text().splitlines()
    return rows_of(folder, name), [json.loads(line) for line in said]


def without(names: set[str], row: dict[str, Any]) -> dict[str, Any]:
    """`row` without some of its columns."""
    return {name: value for name, value in row.items() if name not in names}


def same_rows(one: list[dict[str, Any]], other: list[dict[str, Any]], dtype: str = "fp64") -> None:
    """But for what the way of the weights takes, and what `dtype` rounds."""
    near = {"rel": 1e-9, "abs": 1e-12} if dtype == "fp64" else {"rel": 1e-4, "abs": 1e-6}
    for row, wanted in zip(other, one, strict=True):
        assert row.keys() - WAY == wanted.keys()
        for name, value in without(OFFLOADS, wanted).items():
            close = value if isinstance(value, str) or value is None else pytest.approx(value, **near)
            assert row[name] == close, name


def test_a_sampler_in_its_own_layout_writes_the_rows_of_one_that_shares(tmp_path: Path, report: Any) -> None:
    """TP 2 that samples as two replicas, whose weights are there while they sample only."""
    layout = {
        "actor_train__strategy_args": own(tensor_model_parallel_size=2)["strategy_args"],
        "eval_steps": 1,
        "is_offload_states": True,
    }
    shared, said = written(tmp_path, 2, "shared", **layout)
    apart, said_apart = written(tmp_path, 2, "apart", actor_infer=own(tensor_model_parallel_size=1), **layout)
    same_rows(shared, apart)
    assert said == said_apart and {line["kind"] for line in said} == {"train", "eval"}
    assert {line["version"] for line in said if line["kind"] == "train"} == {0, 1}
    assert all(row["weights_bytes"] > 0 for row in apart) and not WAY & shared[0].keys()
    assert all(b["offload_bytes"] > a["offload_bytes"] for a, b in zip(shared, apart, strict=True))
    report(f"a sampler in its own layout: {apart[1]['weights_bytes']:,} bytes of weights between two ranks a step")


SHARDED = {"use_distributed_optimizer": True, "overlap_grad_reduce": True, "overlap_param_gather": True}
JOBS: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "tensor parallel, sampled in a pipeline": (
        2,
        {
            "actor_train": {"tensor_model_parallel_size": 2},
            "actor_infer": {"tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 2},
        },
        {"actor_train__logprob_plan": "rollout"},
    ),
    "replicas, sampled under sequence parallelism": (
        4,
        {
            "actor_train": SHARDED,
            "actor_infer": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
        },
        # Megatron's distributed optimizer knows no fp64.
        {"actor_train__logprob_plan": "own", "actor_train__model_args__dtype": "fp32"},
    ),
    "pipeline, sampled tensor parallel, against greedy answers": (
        4,
        {
            "actor_train": {"pipeline_model_parallel_size": 2},
            "actor_infer": {"pipeline_model_parallel_size": 1, "tensor_model_parallel_size": 2},
        },
        {"adv_estimator": "remax", "reference": {}, "use_kl_loss": True, "kl_loss_coef": 0.1, "eval_steps": 1},
    ),
}


@pytest.mark.slow
@pytest.mark.layouts
@pytest.mark.parametrize("name", JOBS)
def test_jobs_with_a_sampler_in_its_own_layout(name: str, tmp_path: Path) -> None:
    ranks, roles, changes = JOBS[name]
    layout = {"actor_train__strategy_args": {"strategy_config": roles["actor_train"]}, **changes}
    shared, said = written(tmp_path, ranks, "shared", **layout)
    apart, said_apart = written(tmp_path, ranks, "apart", actor_infer=own(**roles["actor_infer"]), **layout)
    same_rows(shared, apart, changes.get("actor_train__model_args__dtype", "fp64"))
    assert said == said_apart


@pytest.mark.slow
@pytest.mark.layouts
def test_a_job_with_a_sampler_in_its_own_layout_goes_on_to_the_bit(tmp_path: Path) -> None:
    layout = {
        "actor_train__strategy_args": own(tensor_model_parallel_size=2)["strategy_args"],
        "actor_infer": own(tensor_model_parallel_size=1),
        "actor_train__logprob_plan": "none",
        "actor_train__training_args__per_device_train_batch_size": 12,
        "is_offload_states": True,
        "save_steps": 1,
        "eval_steps": 1,
    }
    straight, said = written(tmp_path, 2, "straight", max_steps=3, **layout)
    written(tmp_path, 2, "stopped", max_steps=1, **layout)
    resumed, said_again = written(tmp_path, 2, "stopped", max_steps=3, resume_from_checkpoint=True, **layout)
    assert [without(OFFLOADS, row) for row in resumed] == [without(OFFLOADS, row) for row in straight]
    assert said == said_again


@pytest.mark.bad_input
def test_sizes_that_the_processes_do_not_have_end_all_ranks_before_anything_starts(tmp_path: Path) -> None:
    write_data(tmp_path)
    sizes = own(pipeline_model_parallel_size=2, tensor_model_parallel_size=2)
    job = settings(tmp_path, warmup=None, actor_infer=sizes)
    one, other = run_ranks(2, "tests.jobs.run.test_resume:refusals", {"it": job})
    assert one == other
    assert "actor_infer.strategy_args.strategy_config" in one["it"]
    assert "2 processes do not divide into copies of TP 2 x PP 2 x CP 1 = 4 ranks" in one["it"]
    assert not (tmp_path / "runs").exists()
