"""Supervised fine-tuning and preference training as jobs: what they learn from, resume to the bit, say when wrong."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from roll_batching.errors import ConfigError, RollBatchingError
from roll_batching.jobs.config import ConfigFileError, config_from_dict, load_config
from roll_batching.jobs.config.job_keys import TRACKERS
from roll_batching.jobs.observe.run_files import read_metrics
from roll_batching.jobs.observe.trackers import TrackedRun, tracker_of
from roll_batching.jobs.rewards.pool import reward_of
from tests.huggingface import tiny
from tests.jobs.observe.rows import TIMES
from tests.jobs.streams.jobs import rows, run, settings, write_data
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.streams
ROOT = Path(__file__).parents[3]
RUN = "tests.jobs.streams.jobs:run"
HERE = "tests.jobs.streams.test_jobs:"


@pytest.fixture
def folder(tmp_path):
    write_data(tmp_path)
    return tmp_path


def rows_of(folder: Path, name: str = "tiny") -> list[dict[str, Any]]:
    found = read_metrics(folder / "runs" / name / "metrics.jsonl")
    return [{key: value for key, value in row.items() if key not in TIMES} for row in found]


# ---- on ranks


def run_many(jobs: list[dict[str, Any]]) -> None:
    """One job after the other in the same processes."""
    for job in jobs:
        run(job)


def run_until(payload: dict[str, Any]) -> None:
    """The whole job; with `die_after`, rank 1 kills itself as soon as that many rows are written."""
    if payload.get("die_after") and os.environ["RANK"] == "1":
        file = Path(payload["job"]["output_dir"]) / payload["job"]["exp_name"] / "metrics.jsonl"
        threading.Thread(target=_die_after, args=(file, payload["die_after"]), daemon=True).start()
    run(payload["job"])


def _die_after(file: Path, count: int) -> None:
    while not file.exists() or file.read_bytes().count(b"\n") < count:
        time.sleep(0.001)
    os.kill(os.getpid(), signal.SIGKILL)


# ---- what they learn from


MODES = {
    "packed": {},
    "dynamic": {
        "actor_train__use_sequence_packing": False,
        "actor_train__use_dynamic_batching": True,
        "actor_train__max_tokens_per_microbatch_in_train": 128,
    },
    "padded": {"actor_train__use_sequence_packing": False},
}


@pytest.mark.parametrize("task", ["sft", "dpo"])
def test_the_batching_mode_changes_no_number(folder, task):
    """Two ranks, all modes: the same losses of the same mini-batches, in training and held out."""
    run_ranks(2, HERE + "run_many", [settings(folder, task, exp_name=m, **MODES[m]) for m in MODES])
    packed, *others = (rows_of(folder, mode) for mode in MODES)
    assert [row["step"] for row in packed] == [1, 2, 3, 4] and {row["phase"] for row in packed} == {task}
    assert [row.get("eval_updates") for row in packed] == [0, 2, None, 4]
    assert packed[-1]["eval_loss"] < packed[0]["eval_loss"]
    for other in others:
        for one, two in zip(packed, other, strict=True):
            for key in ("loss", "eval_loss", "grad_norm"):
                assert one.get(key, 0) == pytest.approx(two.get(key, 0), rel=1e-4), (key, one["step"])
    if task == "dpo":
        assert packed[0]["loss"] == pytest.approx(0.693147, abs=1e-5), "the reference is the model as training begins"
        assert packed[-1]["eval_reward_accuracy"] > 0.5


def as_parquet(lines: list[dict[str, Any]], path: Path) -> Path:
    import pyarrow
    import pyarrow.parquet as parquet

    parquet.write_table(pyarrow.Table.from_pylist(lines), path)
    return path


def as_datasets(lines: list[dict[str, Any]], path: Path) -> Path:
    datasets = pytest.importorskip("datasets", reason="pip install datasets")
    datasets.Dataset.from_list(lines).save_to_disk(str(path), num_shards=2)
    return path


@pytest.mark.parametrize("write", [as_parquet, as_datasets])
def test_tables_hold_what_lines_hold(folder, write):
    file = write(rows(20, "sft"), folder / "table")
    names = {"actor_train__data_args__file_name": str(file)}
    run_ranks(1, HERE + "run_many", [settings(folder), settings(folder, exp_name="table", **names)])
    assert rows_of(folder, "table") == rows_of(folder)


def test_passes_over_the_data_in_place_of_steps(folder):
    job = settings(folder, num_train_epochs=1.5)
    del job["max_steps"]
    run_ranks(2, RUN, job)
    assert len(rows_of(folder)) == 4, "1.5 x 20 texts, 8 per step"
    again = load_config(folder / "runs" / "tiny" / "config.yaml")
    assert again.num_train_epochs == 1.5, "what a run writes can be read again"


@pytest.mark.models
def test_conversations_on_a_model_directory(folder):
    """Both tasks from a real directory and its chat template; the trained model is left as one."""
    tiny.write_model(folder / "model", "qwen3")
    tiny.write_tokenizer(folder / "model")
    jobs = []
    for task in ("sft", "dpo"):
        lines = []
        for row in rows(12, task):
            messages = [{"role": "user", "content": row["prompt"]}]
            if task == "sft":
                lines.append({"messages": [*messages, {"role": "assistant", "content": row["response"]}]})
            else:
                lines.append({"messages": messages, "chosen": row["chosen"], "rejected": row["rejected"]})
        file = as_parquet(lines, folder / f"{task}.parquet")
        data_args = {"file_name": str(file), "messages": "messages"}
        job = settings(folder, task, exp_name=task, pretrain=str(folder / "model"), sequence_length=200, max_steps=2)
        del job["tokenizer"], job["actor_train"]["model_args"]
        job["actor_train"] |= {
            "data_args": data_args,
            "sequence_packing_args": {"max_packed_sequence_length_train": 512},
        }
        jobs.append(job)
    run_ranks(2, HERE + "run_many", jobs)
    for task in ("sft", "dpo"):
        assert len(rows_of(folder, task)) == 2
        assert (folder / "runs" / task / "model" / "config.json").is_file()


# ---- going on


@pytest.mark.slow
@pytest.mark.parametrize("task", ["sft", "dpo"])
def test_killed_and_resumed_to_the_bit(folder, task):
    variant = {
        "save_steps": 1,
        "max_steps": 5,
        "actor_train__model_args__architecture__hidden_dropout": 0.1,
        "actor_train__training_args__lr_scheduler_type": "linear",
        "actor_train__strategy_args__strategy_config__use_distributed_optimizer": True,
    }
    run_ranks(2, HERE + "run_until", {"job": settings(folder, task, exp_name="straight", **variant)})
    job = settings(folder, task, exp_name="killed", resume_from_checkpoint=True, save_total_limit=2, **variant)
    outcomes = run_ranks(2, HERE + "run_until", {"job": job, "die_after": 3}, check=False, timeout=90, grace=3)
    assert outcomes[1].returncode == -signal.SIGKILL, outcomes[1].output
    run_ranks(2, HERE + "run_until", {"job": job})
    expected = rows_of(folder, "straight")
    assert len({row["loss"] for row in expected}) == 5
    assert rows_of(folder, "killed") == expected


# ---- the commands


def command(folder: Path, name: str, job: dict[str, Any], *more: str, **variables: str) -> subprocess.CompletedProcess:
    (folder / "job.yaml").write_text(json.dumps(job))
    arguments = [sys.executable, "-m", "roll_batching.cli", name, "--config", "job.yaml", *more]
    env = {**os.environ, "PYTHONPATH": str(ROOT), **variables}
    return subprocess.run(arguments, cwd=folder, env=env, capture_output=True, text=True, timeout=200)


@pytest.mark.slow
def test_the_command_trains_and_says_how_far_it_is(folder, report):
    job = settings(folder, max_steps=2, actor_train__device_mapping="0-1")
    del job["task"]
    done = command(folder, "sft", job)
    assert done.returncode == 0, done.stderr
    line = next(line for line in done.stdout.splitlines() if line.startswith("sft") and "2/2" in line)
    words = ("s/step", "left", "loss", "held-out", "tokens/s", "packing efficiency")
    assert all(word in line for word in words), line
    assert (folder / "runs" / "tiny" / "tensorboard").is_dir() and len(rows_of(folder)) == 2
    report(line)


@pytest.mark.bad_input
def test_what_the_commands_refuse(folder, report):
    done = command(folder, "dpo", settings(folder))
    assert done.returncode == 2 and "task: is 'sft', and the command is `roll-batching dpo`" in done.stderr
    (folder / "sft.jsonl").write_text('{"prompt": "ab=", "response": 3}\n')
    done = command(folder, "sft", settings(folder))
    assert done.returncode == 1 and "sft.jsonl:1: 'response' must be a string" in done.stderr
    report(done.stderr.strip().splitlines()[-1])


@pytest.mark.bad_input
@pytest.mark.parametrize(
    "task, changes, path, words",
    [
        ("sft", {"num_train_epochs": 2.0, "max_steps": 9}, "num_train_epochs", "replaces max_steps"),
        ("sft", {"warmup": {"file_name": "a", "training_args": {"max_steps": 1}}}, "warmup", "precedes RL"),
        ("sft", {"loss_function": "dpo"}, "loss_function", "samples of task: sft do not have"),
        ("sft", {"loss_function": "policy"}, "loss_function", "reads advantages"),
        ("sft", {"max_steps": 0}, "max_steps", "nothing to do"),
        (
            "dpo",
            {"actor_train__training_args__per_device_train_batch_size": 3},
            "actor_train.training_args.per_device_train_batch_size",
            "a pair is two of them",
        ),
        ("dpo", {"loss_args": {"beta": 0.0}}, "loss_args.beta", "greater than 0"),
        ("grpo", {"num_train_epochs": 2.0}, "num_train_epochs", "RL has max_steps"),
    ],
)
def test_settings_that_contradict_each_other(folder, task, changes, path, words):
    with pytest.raises(ConfigFileError) as caught:
        config_from_dict(settings(folder, task, **changes)).check_runnable()
    said = [problem.message for problem in caught.value.problems if ".".join(map(str, problem.path)) == path]
    assert any(words in message for message in said), str(caught.value)


def test_what_a_supervised_job_does_not_read_gets_a_notice(folder):
    given = {
        "rollout_batch_size": 4,
        "ppo_epochs": 2,
        "reward_function": "a:b",
        "track_with": "tensorboard",
        "reference": {},
    }
    config = config_from_dict(settings(folder, actor_train__data_args__chosen="better", **given))
    noticed = {notice.path for notice in config.notices}
    assert noticed >= {*given, "actor_train.data_args.chosen"}
    assert reward_of(config) is None
    assert not {notice.path for notice in config_from_dict(settings(folder)).notices}


@pytest.mark.parametrize("name", TRACKERS)
def test_a_tracker_is_refused_where_it_is_not_installed(name, monkeypatch):
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError, match=rf"pip install 'roll-batching\[{name}\]'"):
        tracker_of(name)


@pytest.mark.parametrize(
    ("name", "kept"), [("wandb", "wandb/offline-run-*/run-*.wandb"), ("swanlab", "run-*/run-*.swanlab")]
)
def test_rows_go_to_a_tracker(name, kept, folder):
    """The tracker itself, without network: its own file of the run holds the rows."""
    pytest.importorskip(name, reason=f"pip install {name}")
    job = settings(folder, max_steps=2, track_with=name, tracker_kwargs={"mode": "offline", "name": "mine"})
    run_ranks(1, RUN, job)
    (file,) = (folder / "runs" / "tiny").glob(kept)
    assert b"sft/eval_loss" in file.read_bytes()


def tracked_runs(name: str, folder: Path) -> list[tuple[str, list[int]]]:
    """Names of the runs in a tracker's local store, with the steps that have a loss."""
    if name == "mlflow":
        client = importlib.import_module(name).MlflowClient(f"sqlite:///{folder}/mlflow.db")
        (experiment,) = (one for one in client.search_experiments() if one.name == "roll-batching")
        runs = client.search_runs([experiment.experiment_id])
        assert all(run.info.status == "FINISHED" and run.data.params["max_steps"] == "2" for run in runs)
        losses = [client.get_metric_history(run.info.run_id, "sft/loss") for run in runs]
        return [(run.info.run_name, [one.step for one in loss]) for run, loss in zip(runs, losses, strict=True)]
    with contextlib.closing(sqlite3.connect(folder / "trackio" / "roll-batching.db")) as store:
        found = store.execute("SELECT run_id, run_name, step, metrics FROM metrics ORDER BY id").fetchall()
    steps: dict[tuple[str, str], list[int]] = {}
    for run_id, run_name, step, metrics in found:
        steps.setdefault((run_id, run_name), []).extend([step] * ("sft/loss" in json.loads(metrics)))
    return [(run_name, of_run) for (_, run_name), of_run in steps.items()]


@pytest.mark.parametrize("name", ["mlflow", "trackio"])
def test_a_resumed_job_continues_its_run_of_a_tracker(name, folder):
    """Two ranks, in a local store; then a new run of the same name."""
    pytest.importorskip(name, reason=f"pip install {name}")
    stores = {"MLFLOW_TRACKING_URI": f"sqlite:///{folder}/mlflow.db", "TRACKIO_DIR": str(folder / "trackio")}
    job = settings(folder, max_steps=2, save_steps=1, track_with=name)
    resumed = job | {"max_steps": 3, "resume_from_checkpoint": True}
    run_ranks(2, HERE + "run_many", [job, resumed], env=stores, fresh=True)
    assert tracked_runs(name, folder) == [("tiny", [1, 2, 3])]
    shutil.rmtree(folder / "runs")
    run_ranks(1, RUN, job, env=stores, fresh=True)
    assert sorted(tracked_runs(name, folder)) == [("tiny", [1, 2]), ("tiny", [1, 2, 3])]


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("mlflow", {"tracking_uri": "http://127.0.0.1:9"}),
        ("trackio", {"server_url": "http://127.0.0.1:9/?write_token=a"}),
    ],
)
def test_a_server_that_does_not_answer_is_an_error(name, options, folder, monkeypatch):
    tracker = pytest.importorskip(name, reason=f"pip install {name}")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    before = tracker.get_tracking_uri() if name == "mlflow" else None
    with pytest.raises(
        RollBatchingError, match=rf"(?s){name} cannot start \(.*127.0.0.1.*\): log in, set .*, or leave"
    ):
        TrackedRun(name, folder, "tiny", {}, options)
    if before:
        tracker.set_tracking_uri(before)


def test_a_run_of_mlflow_is_begun_anew_in_another_store(folder, caplog):
    """The cure of an unreachable server; names that MLflow does not take are changed."""
    mlflow = pytest.importorskip("mlflow", reason="pip install mlflow-skinny")
    for store in "ab":
        options = {"tracking_uri": f"sqlite:///{folder}/{store}.db", "experiment_name": "mine", "tags": {"of": store}}
        run = TrackedRun("mlflow", folder, "tiny", {"rewards": {"a+b": 1}}, options, resumes=True)
        run.add({"phase": "rl", "step": 1, "score@2": float("nan")})
        run.close()
    (found,) = mlflow.MlflowClient(f"sqlite:///{folder}/b.db").search_runs(["1"])
    assert (
        found.data.params == {"rewards.a_b": "1"}
        and "rl/score_2" in found.data.metrics
        and found.data.tags["of"] == "b"
    )
    assert (folder / "mlflow_run_id").read_text() == found.info.run_id and "has no run" in caplog.text


@pytest.mark.bad_input
@pytest.mark.parametrize("name", TRACKERS)
def test_what_a_tracker_does_not_take_is_an_error(name, folder, monkeypatch):
    pytest.importorskip(name, reason=f"pip install {name}")
    monkeypatch.chdir(folder)
    with pytest.raises(ConfigError, match=rf"tracker_kwargs: {name}.(init|start_run) refuses them"):
        TrackedRun(name, folder, "tiny", {}, {"mode": "nowhere"})
