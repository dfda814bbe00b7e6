"""A run that is killed and resumed writes the rows of one that never was; what cannot be resumed is refused."""

from __future__ import annotations

import json
import os
import random
import re
import resource
import shutil
import signal
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from roll_batching.jobs.observe.run_files import read_metrics
from tests.jobs.observe.rows import TIMES
from tests.jobs.rl.jobs import settings, write_data
from tests.support.ranks import run_ranks

HERE = "tests.jobs.run.test_resume:"


# ---- on ranks


def noisy(completion: Any) -> float:
    """A reward that draws from its process's generators, as a user's may."""
    return completion.tokens / 10 + 0.1 * random.random() + 0.1 * np.random.random()


def run_until(payload: dict[str, Any]) -> None:
    """The whole job; with `die_after`, rank 1 kills itself as soon as that many rows are written."""
    from tests.jobs.rl.jobs import run

    random.seed(payload["generators"])
    np.random.seed(payload["generators"] + int(os.environ["RANK"]))
    if payload.get("die_after") and os.environ["RANK"] == "1":
        file = Path(payload["job"]["output_dir"]) / payload["job"]["exp_name"] / "metrics.jsonl"
        threading.Thread(target=_die_after, args=(file, payload["die_after"]), daemon=True).start()
    run(payload["job"])


def _die_after(file: Path, rows: int) -> None:
    while not file.exists() or file.read_bytes().count(b"\n") < rows:
        time.sleep(0.001)
    os.kill(os.getpid(), signal.SIGKILL)


def refusals(jobs: dict[str, dict[str, Any]]) -> dict[str, str]:
    """What each job ends with, on this rank."""
    from roll_batching.errors import RollBatchingError
    from tests.jobs.rl.jobs import run

    said = {}
    for name, job in jobs.items():
        try:
            run(job)
        except RollBatchingError as error:
            said[name] = f"{type(error).__name__}: {error}"
    return said


def run_out_of_room(job: dict[str, Any]) -> None:
    """The whole job; once it has saved, no file of this process may grow beyond some bytes."""
    from tests.jobs.rl.jobs import run

    first = Path(job["output_dir"]) / job["exp_name"] / "checkpoints" / "rl-000001"

    def limit() -> None:
        while not first.exists():
            time.sleep(0.001)
        resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))

    threading.Thread(target=limit, daemon=True).start()
    run(job)


# ---- tests


def saving(folder: Path, name: str, **changes: Any) -> dict[str, Any]:
    """A small job that saves after every second step."""
    return settings(
        folder,
        exp_name=name,
        save_steps=2,
        max_steps=4,
        eval_steps=3,
        reward_function=HERE + "noisy",
        warmup__training_args__max_steps=4,
        warmup__training_args__lr_scheduler_type="linear",
        **changes,
    )


def supervised(folder: Path, name: str, **changes: Any) -> dict[str, Any]:
    """Only the warm-up: two steps, saved at the end."""
    return settings(folder, **{"exp_name": name, "save_steps": 2, "max_steps": 0, **changes})


def rows_of(folder: Path, name: str) -> list[dict[str, Any]]:
    rows = read_metrics(folder / "runs" / name / "metrics.jsonl")
    return [{key: value for key, value in row.items() if key not in TIMES} for row in rows]


def saved(folder: Path, name: str, where: str = "checkpoints") -> list[str]:
    place = folder / "runs" / name / where
    return sorted(path.name for path in place.iterdir()) if place.is_dir() else []


def test_killed_and_resumed_to_the_bit(tmp_path):
    """Killed in the warm-up and again in RL, with dropout, a reference, a random reward and a sharded optimizer."""
    write_data(tmp_path)
    variant = {
        "use_kl_loss": True,
        "kl_loss_coef": 0.1,
        "reference": {},
        "actor_train__logprob_plan": "own",
        "actor_train__model_args__architecture__hidden_dropout": 0.1,
        "actor_train__strategy_args__strategy_config__use_distributed_optimizer": True,
    }
    run_ranks(2, HERE + "run_until", {"job": saving(tmp_path, "straight", **variant), "generators": 5})
    job = saving(tmp_path, "killed", resume_from_checkpoint=True, save_total_limit=3, **variant)
    for generators, rows in ((5, 3), (6, 7)):
        payload = {"job": job, "generators": generators, "die_after": rows}
        outcomes = run_ranks(2, HERE + "run_until", payload, check=False, timeout=90, grace=3)
        assert outcomes[1].returncode == -signal.SIGKILL, outcomes[1].output
        assert outcomes[0].returncode != 0, "nobody goes on alone"
    run_ranks(2, HERE + "run_until", {"job": job, "generators": 7})
    expected = rows_of(tmp_path, "straight")
    assert [(row["phase"], row["step"]) for row in expected] == [(p, s) for p in ("warmup", "rl") for s in (1, 2, 3, 4)]
    assert len({row["loss"] for row in expected}) == 8
    found = rows_of(tmp_path, "killed")
    differing = [(a["phase"], a["step"]) for a, b in zip(expected, found, strict=True) if a != b]
    assert not differing
    assert saved(tmp_path, "killed") == ["rl-000002", "rl-000004", "warmup-000004"]


def test_what_is_taken_for_the_last_checkpoint(tmp_path):
    """Names without a whole checkpoint behind them are passed over; a new run takes nothing from an old one."""
    write_data(tmp_path)
    run_ranks(1, "tests.jobs.rl.jobs:run", supervised(tmp_path, "one"))
    place = tmp_path / "runs" / "one" / "checkpoints"
    shutil.copytree(place / "warmup-000002", place / "warmup-000009.partial")
    (place / "warmup-000008").mkdir()
    (place / "mine").mkdir()
    before = rows_of(tmp_path, "one")
    longer = {"warmup__training_args__max_steps": 3, "resume_from_checkpoint": True}
    run_ranks(1, "tests.jobs.rl.jobs:run", supervised(tmp_path, "one", **longer))
    assert rows_of(tmp_path, "one")[:2] == before and len(rows_of(tmp_path, "one")) == 3
    assert saved(tmp_path, "one") == ["mine", "warmup-000002", "warmup-000003", "warmup-000008"]
    run_ranks(1, "tests.jobs.rl.jobs:run", supervised(tmp_path, "one"))
    assert saved(tmp_path, "one") == ["mine", "warmup-000002", "warmup-000008"]
    other, earlier = sorted((tmp_path / "runs" / "one" / "previous").iterdir())
    assert [path.name for path in other.iterdir()] == ["config.yaml"], "what the resumed run changed"
    assert saved(tmp_path, "one", f"previous/{earlier.name}/checkpoints") == ["warmup-000002", "warmup-000003"]


def test_another_layout_goes_on_with_a_notice(tmp_path):
    write_data(tmp_path)
    sharded = {"strategy_config": {"use_distributed_optimizer": True}}
    run_ranks(2, "tests.jobs.rl.jobs:run", supervised(tmp_path, "wide", actor_train__strategy_args=sharded))
    other = supervised(
        tmp_path,
        "wide",
        resume_from_checkpoint=True,
        warmup__training_args__max_steps=3,
        actor_train__strategy_args={"strategy_config": {"tensor_model_parallel_size": 2}},
    )
    outcomes = run_ranks(2, "tests.jobs.rl.jobs:run", other, check=False, timeout=60)
    assert [outcome.returncode for outcome in outcomes] == [0, 0], outcomes[0].output
    assert "continues from the same weights and data" in outcomes[0].output
    assert "warmup continues after step 2 of 3, from " in outcomes[0].output
    assert [row["step"] for row in rows_of(tmp_path, "wide")] == [1, 2, 3]


@pytest.mark.bad_input
def test_what_cannot_be_resumed_says_why_on_every_rank(tmp_path, report):
    write_data(tmp_path)
    run_ranks(1, "tests.jobs.rl.jobs:run", supervised(tmp_path, "base"))
    base = tmp_path / "runs" / "base" / "checkpoints" / "warmup-000002"
    shutil.copytree(base, tmp_path / "torn")
    (tmp_path / "torn" / "job.json").write_text('{"phase": "warmup", "st')
    (tmp_path / "other.jsonl").write_text(json.dumps({"prompt": "a+1b+1=", "response": "#02"}) + "\n")
    cases = {
        "no such checkpoint": ({"resume_from_checkpoint": str(tmp_path / "nowhere")}, "name one, or set true"),
        "a checkpoint that cannot be read": ({"resume_from_checkpoint": str(tmp_path / "torn")}, "cannot be read"),
        "a phase that the job has not": (
            {"resume_from_checkpoint": str(base), "warmup": None, "max_steps": 1},
            "this configuration has no warmup section",
        ),
        "another seed": (
            {"resume_from_checkpoint": str(base), "seed": 4},
            "another seed (seed 3, here 4): set seed: 3, or start a new run under another exp_name",
        ),
        "other texts": (
            {"resume_from_checkpoint": str(base), "warmup__file_name": str(tmp_path / "other.jsonl")},
            "other texts",
        ),
        "another model": (
            {"resume_from_checkpoint": str(base), "actor_train__model_args__architecture__num_layers": 1},
            "num_layers is 2 there and 1 here",
        ),
    }
    jobs = {name: supervised(tmp_path, "base", **changes) for name, (changes, _) in cases.items()}
    said = run_ranks(2, HERE + "refusals", jobs)
    for name, (_, words) in cases.items():
        assert words in said[0][name] and words in said[1][name], said[0][name]
        report(f"{name}: {said[0][name]}")
    assert "checkpoint before it" not in said[0]["another seed"] + said[0]["other texts"], "it has the same seed"


@pytest.mark.bad_input
def test_trouble_with_checkpoints_tells_which_is_whole_and_how_to_go_on(tmp_path, report):
    write_data(tmp_path)
    run = tmp_path / "runs" / "full"
    job = settings(tmp_path, exp_name="full", save_steps=1, warmup=None, reward_function="tests.jobs.rl.jobs:length")
    outcomes = run_ranks(2, HERE + "run_out_of_room", job, check=False, timeout=90)
    for outcome in outcomes:
        said = outcome.output.strip().splitlines()[-1]
        assert re.search(r"rl-000002\.partial/(__|random-)\S+ cannot be written", said), outcome.output
        assert "cannot be written: File too large (EFBIG)" in said, outcome.output
        assert f"{run}/checkpoints/rl-000001 is complete: resume with resume_from_checkpoint=true" in said
    report(said.replace(str(tmp_path), "..."))
    assert saved(tmp_path, "full") == ["rl-000001"]

    job = supervised(tmp_path, "cut", save_steps=1)
    run_ranks(1, "tests.jobs.rl.jobs:run", job)
    places = tmp_path / "runs" / "cut" / "checkpoints"
    first, second = places / "warmup-000001", places / "warmup-000002"
    files = [next(second.glob("__0_*.distcp")), second / "random-00000.pt"]
    for file in files:
        raw = file.read_bytes()
        file.write_bytes(raw[:500])
        said = run_ranks(1, HERE + "refusals", {"it": job | {"resume_from_checkpoint": True}})[0]["it"]
        file.write_bytes(raw)
        assert f"{file} " in said and len(said.splitlines()) == 1, said
        assert f"The checkpoint before it is complete: resume with resume_from_checkpoint={first}" in said
        report(said.replace(str(tmp_path), "..."))
    run_ranks(1, "tests.jobs.rl.jobs:run", job | {"resume_from_checkpoint": str(first)})


def test_a_warm_up_longer_than_the_epochs_of_its_phase_is_said(tmp_path):
    """How many steps epochs make is known when the data is read."""
    write_data(tmp_path)
    args = {"learning_rate": 1e-3, "warmup_steps": 10_000, "gradient_accumulation_steps": 64}
    job = supervised(tmp_path, "late", warmup__training_args=args, warmup__num_train_epochs=1)
    (outcome,) = run_ranks(1, "tests.jobs.rl.jobs:run", job, check=False, timeout=60)
    steps = len(rows_of(tmp_path, "late"))
    assert outcome.returncode == 0, outcome.output
    assert (
        f"warmup_steps is 10000, above the number of optimizer steps, {steps}: the learning rate rises to"
        in outcome.output
    )
