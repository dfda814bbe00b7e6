"""GRPO in fp16: it learns and its control does not, and a resumed run and the checkpoint's model repeat its numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from roll_batching.jobs.observe.run_files import read_metrics
from tests.jobs.observe.rows import TIMES
from tests.jobs.rl.jobs import settings, write_data
from tests.support.ranks import run_ranks

RUN = "tests.jobs.rl.jobs:run"
STEPS = 16
FP16 = {
    "actor_train__model_args__dtype": "fp16",
    "actor_train__training_args": {
        "learning_rate": 1e-2,
        "per_device_train_batch_size": 12,
        "initial_loss_scale": 2.0**21,
        "loss_scale_window": 6,
        "hysteresis": 1,
    },
}


def digits(completion: Any) -> float:
    """The share of digits in a response."""
    return sum(letter.isdigit() for letter in completion.response) / max(1, len(completion.response))


def job(folder: Path, **changes: Any) -> dict[str, Any]:
    shape = {"max_steps": STEPS, "num_return_sequences_in_group": 6, "response_length": 12, "warmup": None}
    reference = {"use_kl_loss": True, "kl_loss_coef": 0.01, "reference": {}}
    reward = {"reward_function": "tests.jobs.rl.test_fp16:digits", "save_steps": STEPS // 2, "eval_samples": 4}
    return settings(folder, **shape, **reference, **reward, **FP16, **changes)


def rows_of(folder: Path) -> list[dict[str, Any]]:
    rows = read_metrics(folder / "runs" / "tiny" / "metrics.jsonl")
    return [{key: value for key, value in row.items() if key not in TIMES} for row in rows]


def reopened(run: str) -> tuple[str, float]:
    """The precision of the model of a run's last checkpoint, and its reward on held-out prompts."""
    from roll_batching.jobs.inputs import load_inputs
    from roll_batching.jobs.run.saved_model import open_checkpoint

    model = open_checkpoint(Path(run))
    inputs = load_inputs(model.config)
    sampling = model.sampling(inputs.tokenizer, held_out=True, seed=model.config.seed)
    metrics, _ = model.evaluate(inputs.heldout, inputs.tokenizer, sampling, samples=4, shown=0)
    return str(model.strategy.dtype), metrics["eval_reward"]


def rewards(rows: list[dict[str, Any]]) -> tuple[float, float]:
    """The mean rewards of the first and the last four steps."""
    first, last = (sum(row["reward"] for row in part) / 4 for part in (rows[:4], rows[-4:]))
    return first, last


def test_a_job_in_fp16_learns_resumes_and_is_read_again(tmp_path: Path, report: Any) -> None:
    write_data(tmp_path)
    run_ranks(1, RUN, job(tmp_path))
    rows = rows_of(tmp_path)
    (first, last), scales = rewards(rows), [row["loss_scale"] for row in rows]
    report(f"fp16: reward {first:.2f} -> {last:.2f}; {rows[-1]['skipped_steps']} steps skipped; scales {scales}")
    assert 0 < rows[-1]["skipped_steps"] < STEPS / 2 and min(scales) < scales[0]
    assert last > first + 0.3
    assert reopened_in(tmp_path) == ("torch.float16", pytest.approx(rows[-1]["eval_reward"]))
    saved = tmp_path / "runs" / "tiny" / "checkpoints" / f"rl-{STEPS // 2:06d}"
    run_ranks(1, RUN, job(tmp_path, resume_from_checkpoint=str(saved)))
    assert rows_of(tmp_path) == rows


def reopened_in(folder: Path) -> tuple[str, float]:
    (found,) = run_ranks(1, "tests.jobs.rl.test_fp16:reopened", str(folder / "runs" / "tiny"))
    return found


def test_shuffled_advantages_teach_nothing(tmp_path: Path, report: Any) -> None:
    write_data(tmp_path)
    run_ranks(1, RUN, job(tmp_path, control="shuffled"))
    first, last = rewards(rows_of(tmp_path))
    report(f"fp16, control: reward {first:.2f} -> {last:.2f}")
    assert last < first + 0.15
