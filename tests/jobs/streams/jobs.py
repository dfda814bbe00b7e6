"""Supervised jobs so small that they run in seconds, and the functions that test ranks call."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.support.tiny_job import ARCHITECTURE, TOKENIZER, with_changes


def settings(folder: Path, task: str = "sft", **changes: Any) -> dict[str, Any]:
    """Settings of a tiny job of this task with its files in `folder`; `a__b=value` changes a.b."""
    base: dict[str, Any] = {
        "task": task,
        "exp_name": "tiny",
        "seed": 3,
        "output_dir": str(folder / "runs"),
        "max_steps": 4,
        "eval_steps": 2,
        "sequence_length": 64,
        "tokenizer": dict(TOKENIZER),
        "actor_train": {
            "model_args": {"architecture": dict(ARCHITECTURE)},
            "training_args": {"learning_rate": 1e-3, "per_device_train_batch_size": 4},
            "data_args": {
                "file_name": str(folder / f"{task}.jsonl"),
                "eval_file_name": str(folder / f"{task}_heldout.jsonl"),
            },
            "use_sequence_packing": True,
            "sequence_packing_args": {"max_packed_sequence_length_train": 128},
        },
    }
    return with_changes(base, changes)


def rows(count: int, task: str) -> list[dict[str, str]]:
    """Texts or pairs of many lengths: letters, and the same in order (rejected: backwards)."""
    made = []
    for i in range(count):
        letters = "".join("abcdefg"[(i * 5 + j * 3 + i * j) % 7] for j in range(2 + (i * i) % 23))
        good, bad = "".join(sorted(letters)), "".join(sorted(letters, reverse=True)) + "#"
        answers = {"response": good} if task == "sft" else {"chosen": good, "rejected": bad}
        made.append({"prompt": f"{i}{letters}=", **answers})
    return made


def write_data(folder: Path, count: int = 20) -> None:
    """Training and held-out files of both tasks."""
    for task in ("sft", "dpo"):
        made = rows(count + 6, task)
        for name, part in ((task, made[:count]), (f"{task}_heldout", made[count:])):
            (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))


def run(payload: dict[str, Any]) -> None:
    """On a rank: the whole job."""
    from roll_batching.jobs.config import config_from_dict
    from roll_batching.jobs.job import run_job

    run_job(config_from_dict(payload))
