"""A job so small that it runs in seconds, and the functions that test ranks call."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from roll_batching.errors import RollBatchingError
from tests.support.ranks import run_ranks
from tests.support.tiny_job import ARCHITECTURE, TOKENIZER, with_changes


def settings(folder: Path, **changes: Any) -> dict[str, Any]:
    """Settings of a tiny job with its files in `folder`; `a__b=value` changes a.b."""
    base: dict[str, Any] = {
        "exp_name": "tiny",
        "seed": 3,
        "output_dir": str(folder / "runs"),
        "max_steps": 2,
        "eval_steps": 0,
        "eval_samples": 5,
        "prompt_length": 40,
        "response_length": 24,
        "rollout_batch_size": 4,
        "num_return_sequences_in_group": 3,
        "reward_function": "roll_batching.jobs.rewards:final_answer",
        "tokenizer": dict(TOKENIZER),
        "adv_estimator": "grpo",
        "warmup": {
            "file_name": str(folder / "corpus.jsonl"),
            "training_args": {"max_steps": 2, "per_device_train_batch_size": 3, "learning_rate": 1e-3},
        },
        "actor_train": {
            "model_args": {"architecture": dict(ARCHITECTURE)},
            "training_args": {"learning_rate": 1e-3, "per_device_train_batch_size": 3},
            "data_args": {
                "file_name": str(folder / "prompts.jsonl"),
                "eval_file_name": str(folder / "heldout.jsonl"),
            },
            "use_sequence_packing": True,
            "sequence_packing_args": {"algorithm": "load_balance", "max_packed_sequence_length_train": 128},
        },
    }
    return with_changes(base, changes)


def write_data(folder: Path) -> None:
    """Three files as the demo has them, a few lines each."""
    problems = [(f"a+{i % 9 + 1}b+{i % 7 + 1}=", f"{i % 9 + i % 7 + 2:02d}") for i in range(12)]
    corpus = [{"prompt": p, "response": f"#{a}"} for p, a in problems]
    prompts = [{"prompt": p, "answer": a, "level": len(p)} for p, a in problems]
    for name, rows in (("corpus", corpus), ("prompts", prompts[:8]), ("heldout", prompts[8:])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def run(payload: dict[str, Any]) -> None:
    """On a rank: the whole job."""
    from roll_batching.jobs.config import JobConfig
    from roll_batching.jobs.job import run_job

    run_job(JobConfig.model_validate(payload))


def refusal(payload: dict[str, Any]) -> str:
    """On a rank: the whole job, which must end in an error of ours; its type and text."""
    try:
        run(payload)
    except RollBatchingError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def run_straight_and_resumed(make: Callable[..., dict[str, Any]], folder: Path, *points: str, **changes: Any) -> None:
    """Two jobs on two ranks each, named straight and resumed; the second is resumed from its checkpoints `points`."""
    for name in ("straight", "resumed"):
        run_ranks(2, f"{__name__}:run", make(folder, name, **changes))
    for point in points:
        saved = str(folder / "runs" / "resumed" / "checkpoints" / point)
        run_ranks(2, f"{__name__}:run", make(folder, "resumed", **changes, resume_from_checkpoint=saved))


def run_recording(payload: dict[str, Any], record: Callable[[Any, Any, Any], None]) -> None:
    """On a rank: the whole job; `record` gets batch, plan and counts of every optimizer step."""
    from roll_batching.strategy import MegatronTrainStrategy

    train_step = MegatronTrainStrategy.train_step

    def recorded(self: Any, batch: Any, plan: Any, loss: Any, *, counts: Any = None) -> Any:
        record(batch, plan, counts)
        return train_step(self, batch, plan, loss, counts=counts)

    MegatronTrainStrategy.train_step = recorded  # type: ignore[method-assign]
    try:
        run(payload)
    finally:
        MegatronTrainStrategy.train_step = train_step  # type: ignore[method-assign]


def run_and_count(payload: dict[str, Any]) -> list[tuple[list[int], int | None]]:
    """On a rank: the whole job; of every optimizer step the computed lengths and the counted response tokens."""
    seen = []

    def record(batch: Any, plan: Any, counts: Any) -> None:
        seen.append((plan.lengths.tolist(), None if counts is None else counts.tokens["response_mask"]))

    run_recording(payload, record)
    return seen


def run_and_keep(payload: dict[str, Any]) -> dict[int, list[float]]:
    """On a rank: the whole job; by id the advantages of the response's counted tokens that its loss read."""
    kept: dict[int, list[float]] = {}

    def record(batch: Any, plan: Any, counts: Any) -> None:
        rows = zip(batch.ids.tolist(), batch.to_lists("advantages"), batch.to_lists("response_mask"), strict=True)
        for number, values, mask in rows:
            counted = mask.bool().roll(-1)
            counted[-1] = False
            kept[number] = (values[counted] if values.ndim else values.expand(int(counted.sum()))).tolist()

    run_recording(payload, record)
    return kept


# Reward functions that tests name by path.


def length(completion: Any) -> float:
    """A reward that differs between responses from the first step on."""
    return completion.tokens / 10


def nan_for_one(completion: Any) -> float:
    """Not a number for one particular prompt."""
    return float("nan") if completion.prompt.startswith("a+3b+3") else 1.0
