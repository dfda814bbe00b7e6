"""Roles on separate devices: worker processes, their failures, and the rows of a job without them."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from roll_batching.errors import ConfigError
from roll_batching.jobs.config import JobConfig, load_config
from roll_batching.jobs.launch.devices import devices_under_torchrun, role_device_variables, role_gpus
from roll_batching.jobs.observe.run_files import read_metrics
from roll_batching.jobs.processes.child_process import ROLE_DEVICES
from roll_batching.jobs.processes.role_workers import LocalRoleWorkers
from roll_batching.jobs.roles.client import SAMPLER, RoleClient, RoleKind
from roll_batching.jobs.roles.remote_reference import REFERENCE
from tests.jobs.observe.rows import TIMES
from tests.jobs.rl.jobs import settings, write_data
from tests.jobs.rl.test_async_rollouts import trained_on
from tests.jobs.roles.role_processes import MARK, ROLES, is_of_role, left_of
from tests.support.own_attention import MaskedSoftmax
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.layouts

RUN = "tests.jobs.rl.jobs:run"
ROLE_PROCESSES = "tests.jobs.roles.role_processes:"
HERE = "tests.jobs.roles.test_own_devices:"
APART = {"staleness_mean", "staleness_max", "dropped_samples", "queue_depth", "sampler_restarts"} | TIMES
APART |= {"reference_restarts"}
"""Metrics that roles with processes of their own add."""
TP2 = {"strategy_config": {"tensor_model_parallel_size": 2}}
DEMO = Path(__file__).resolve().parents[3] / "configs" / "demo_grpo.yaml"
INFER_TP2 = {"actor_infer.strategy_args.strategy_config.tensor_model_parallel_size": 2}
INFER_CP2 = {"actor_infer.strategy_args.strategy_config.context_parallel_size": 2}
SMALL: dict[str, Any] = {
    "warmup": None,
    "eval_samples": 0,
    "reward_function": "tests.jobs.rl.jobs:length",
    "rollout_samples": -1,
    "max_steps": 3,
    "actor_train__device_mapping": [0, 1],
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_data(tmp_path)
    return tmp_path


def job_of(folder: Path, name: str, **changes: Any) -> dict[str, Any]:
    return settings(folder, exp_name=name, **(SMALL | changes))


def rows_of(folder: Path, name: str) -> list[dict[str, Any]]:
    rows = read_metrics(folder / "runs" / name / "metrics.jsonl")
    return [{key: value for key, value in row.items() if key not in APART} for row in rows]


def run(count: int, job: dict[str, Any], **options: Any) -> list[Any]:
    """The job on `count` ranks."""
    return run_ranks(count, RUN, job, timeout=600, env={MARK: job["output_dir"]}, **options)


# ---- what goes wrong


class FailsOnRankOne(MaskedSoftmax):
    """An attention that fails on one of two workers."""

    def build_core(self, rotation: Any, **arguments: Any) -> torch.nn.Module:
        core = super().build_core(rotation, **arguments)
        if (os.environ["RANK"], os.environ["WORLD_SIZE"]) == ("1", "2"):
            core.register_forward_pre_hook(_fail)
        return core


def _fail(*_: Any) -> None:
    raise ValueError("this process alone cannot attend")


def end_with_its_workers(payload: dict[str, Any]) -> None:
    """On a rank: starts a sampler's workers, records their process ids, and kills itself."""
    client = RoleClient(JobConfig.model_validate(payload), SAMPLER)
    client.start()
    assert isinstance(client.workers, LocalRoleWorkers)
    (Path(payload["output_dir"]).parent / "pids").write_text(json.dumps(client.workers.pids))
    time.sleep(2)
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("kind", [SAMPLER, REFERENCE], ids=lambda kind: kind.name)
def test_processes_of_a_role_are_found_by_its_module(
    kind: RoleKind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The slow tests below kill one of them, and would find none if command lines changed."""
    monkeypatch.setenv(MARK, str(tmp_path / "runs"))
    workers = LocalRoleWorkers(kind.module, 2, os.environ)
    roles = {one.pid: [role for role in ROLES if is_of_role(one, role)] for one in left_of(tmp_path)}
    workers.kill()
    assert roles == {pid: [kind.name.removeprefix("the ")] for pid in workers.pids}


# ---- the sampler


@pytest.mark.slow
def test_a_sampler_that_takes_turns_writes_the_rows_of_a_policy_that_samples_itself(folder: Path) -> None:
    """To the bit, in the same layout; and again after one of its processes was killed alone."""
    run(2, job_of(folder, "itself", actor_train__strategy_args=TP2))
    killing = {"folder": str(folder), "role": "sampler", "rank": 1}
    job = job_of(
        folder,
        "apart",
        actor_train__strategy_args=TP2,
        actor_infer={"device_mapping": [2, 3]},
        reward_function=f"{ROLE_PROCESSES}kills_a_rank",
        reward_args=killing,
    )
    outcomes = run(2, job, check=False)
    assert [outcome.returncode for outcome in outcomes] == [0, 0], outcomes[0].output
    assert "the sampler ended: rank 1 of its 2 by signal 9 (SIGKILL)" in outcomes[0].output, outcomes[0].output
    assert trained_on(folder, "apart") == trained_on(folder, "itself")
    assert rows_of(folder, "apart") == rows_of(folder, "itself")
    rows = read_metrics(folder / "runs" / "apart" / "metrics.jsonl")
    assert rows[-1]["sampler_restarts"] == 1 and {row["staleness_max"] for row in rows} == {0}
    assert not left_of(folder) and not (folder / "runs" / "apart" / "weights").exists()


@pytest.mark.slow
def test_a_sampler_of_several_processes_draws_ahead_in_a_layout_of_its_own(folder: Path) -> None:
    """TP 2 of its own over trainers that share nothing; its log-probs are those of the weights in training."""
    fixed = {"actor_train__training_args__learning_rate": 1e-12, "async_generation_ratio": 1}
    run(2, job_of(folder, "ahead", actor_infer={"device_mapping": [2, 3], "strategy_args": TP2}, **fixed))
    rows = read_metrics(folder / "runs" / "ahead" / "metrics.jsonl")
    assert [len(step) for step in trained_on(folder, "ahead")] == [12] * 3
    assert all(row["ratio_max"] == pytest.approx(1, abs=1e-3) for row in rows)
    assert all(row["staleness_max"] <= 1 for row in rows) and rows[-1]["sampler_restarts"] == 0


@pytest.mark.slow
@pytest.mark.bad_input
@pytest.mark.parametrize(
    "changes, words",
    [
        ({"reward_function": f"{ROLE_PROCESSES}refuses"}, "DataError: reward function"),
        (
            {"actor_train__strategy_args__strategy_config": {"attention_backend": f"{HERE}FailsOnRankOne"}},
            "ValueError: this process alone cannot attend",
        ),
    ],
    ids=["all", "one"],
)
def test_what_fails_in_the_workers_of_a_sampler_ends_the_job(folder: Path, changes: dict[str, Any], words: str) -> None:
    """Also when one process fails alone and the others only lose it; nothing is started again."""
    job = job_of(folder, "failing", actor_train__device_mapping=[0], actor_infer={"device_mapping": [2, 3]}, **changes)
    (outcome,) = run(1, job, check=False)
    assert outcome.returncode not in (0, -9), outcome.output
    assert "the sampler ended: " in outcome.output and words in outcome.output, outcome.output
    assert "started again" not in outcome.output


@pytest.mark.slow
def test_workers_end_with_the_process_that_started_it(folder: Path) -> None:
    job = job_of(folder, "killed", actor_train__device_mapping=[0], actor_infer={"device_mapping": [2, 3]})
    (outcome,) = run_ranks(1, f"{HERE}end_with_its_workers", job, check=False)
    assert outcome.returncode == -signal.SIGKILL, outcome.output
    pids = json.loads((folder / "pids").read_text())
    _, living = psutil.wait_procs([psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)], timeout=60)
    assert len(pids) == 2 and not [one for one in living if one.status() != psutil.STATUS_ZOMBIE]


# ---- the reference


@pytest.mark.slow
def test_a_reference_on_its_own_devices_writes_the_rows_of_one_that_shares(folder: Path) -> None:
    """In TP 1, PP 2, with one of its processes killed on the way; resumed to the bit."""
    divergence = {"use_kl_loss": True, "kl_loss_coef": 0.1}
    run(2, job_of(folder, "shared", reference={}, **divergence))
    layout = {"strategy_config": {"pipeline_model_parallel_size": 2}}
    apart = {"reference": {"device_mapping": "2-3", "strategy_args": layout}, **divergence}
    killing = {"folder": str(folder), "role": "reference", "rank": 1}
    dying = {"reward_function": f"{ROLE_PROCESSES}kills_a_rank", "reward_args": killing}
    outcomes = run(2, job_of(folder, "apart", **apart, **dying), check=False)
    assert [outcome.returncode for outcome in outcomes] == [0, 0], outcomes[0].output
    assert "the reference ended: rank 1 of its 2 by signal 9 (SIGKILL)" in outcomes[0].output, outcomes[0].output
    for one, other in zip(rows_of(folder, "shared"), rows_of(folder, "apart"), strict=True):
        assert one.keys() == other.keys()
        for name in one:
            close = one[name] if isinstance(one[name], str) else pytest.approx(one[name], rel=1e-4, abs=1e-6)
            assert other[name] == close, name
    rows = read_metrics(folder / "runs" / "apart" / "metrics.jsonl")
    assert rows[-1]["reference_restarts"] == 1 and rows[-1]["ref_kl"] > 0
    assert not left_of(folder) and not (folder / "runs" / "apart" / "reference_weights").exists()
    again = {"save_steps": 1, "max_steps": 1, **apart}
    run(2, job_of(folder, "again", **again))
    run(2, job_of(folder, "again", **again | {"max_steps": 3}, resume_from_checkpoint=True))
    assert rows_of(folder, "again") == rows_of(folder, "apart")


# ---- keys


@pytest.mark.bad_input
@pytest.mark.parametrize(
    "changes, words",
    [
        ({"actor_infer.device_mapping": "1-2"}, "names some of actor_train's devices"),
        ({"reference.device_mapping": "1,0"}, "in the same order, or none"),
        ({"actor_infer.device_mapping": "2-4", **INFER_TP2}, "3 processes do not divide"),
        ({"actor_infer.device_mapping": "2-3", **INFER_CP2}, "models sample only with 1"),
        ({"actor_infer.device_mapping": "2-3", "reference.device_mapping": "3-4"}, "some of actor_infer's devices"),
        ({"actor_train.device_mapping": "~", "reference.device_mapping": "3"}, "actor_train.device_mapping"),
        ({"actor_infer.device_mapping": "2-3", "adv_estimator": "remax"}, "greedy completions"),
        ({"task": "dpo", "reference.device_mapping": "2-3"}, "run on the same devices"),
    ],
)
def test_devices_that_cannot_be_are_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load_config(DEMO, [f"{key}={value}" for key, value in changes.items()])


def test_a_job_says_which_processes_get_which_devices() -> None:
    job = load_config(DEMO, ["actor_infer.device_mapping=4-5", "reference.device_mapping=[2]"])
    assert job.world_size == 2 and job.dp_size(2) == 2 and job.has_sampler and not job.asynchronous
    found = role_device_variables(job, {"CUDA_VISIBLE_DEVICES": "0,1,2,3,5,7"})
    assert found == {ROLE_DEVICES["actor_infer"]: "5,7", ROLE_DEVICES["reference"]: "2"}
    one, several = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}, {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1"}
    assert devices_under_torchrun(job, one) == {"CUDA_VISIBLE_DEVICES": "0,1"}
    assert devices_under_torchrun(load_config(DEMO), several) == {}
    with pytest.raises(ConfigError, match="torchrun has started ranks on several"):
        devices_under_torchrun(job, several)
    assert role_gpus(job, [0, 1], gpus=6) == [4, 5, 2] and role_gpus(job, [], gpus=0) == []
    with pytest.raises(ConfigError, match="actor_infer.device_mapping names device 5, but this machine has 5 GPUs"):
        role_gpus(job, [0, 1], gpus=5)
    with pytest.raises(ConfigError, match="take device 2 of reference.device_mapping"):
        role_gpus(job, [0, 1, 2], gpus=6)
