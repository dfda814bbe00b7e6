"""Abuses of distillation: its teacher's directory, vocabulary, weights and processes."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.campaigns.abuse.critics import WAITING_PACKER
from tests.campaigns.abuse.directories import (
    FROM_MODEL,
    edited_json,
    models,
    nothing_written,
    other_vocabulary,
    truncated,
    with_nan,
)
from tests.campaigns.abuse.runner import DONE, FAILED, REFUSED, Abuse
from tests.campaigns.abuse.scenes import kill_rank

DISTILL: dict[str, Any] = {
    **FROM_MODEL,
    "task": "distill",
    "logits_topk": 8,
    "num_return_sequences_in_group": 1,
    "reward_function": None,
    "teacher.model_args": {"model_name_or_path": "teacher"},
    "teacher.use_sequence_packing": True,
    "teacher.sequence_packing_args": {"max_packed_sequence_length_forward": 256},
}
"""Settings of a small job with a teacher."""


def _taught(name: str, change: Callable[[Path], object], *words: str, code: int = FAILED, **options: Any) -> Abuse:
    settings = {**DISTILL, **options.pop("settings", {})}
    left = nothing_written if code != DONE else lambda home: ""
    scene = models(change, left=left, model="qwen3", teacher="llama3")
    return Abuse(name=f"teacher: {name}", code=code, settings=settings, words=words, scene=scene, **options)


TEACHERS = [
    _taught("an ordinary job", lambda home: None, code=DONE),
    _taught(
        "NaN in its weights",
        with_nan("model.norm.weight", "teacher/model.safetensors"),
        "teacher: ",
        "final_layernorm.weight are not finite",
        "model directory",
    ),
    _taught(
        "no directory",
        lambda home: shutil.rmtree(home / "teacher"),
        "teacher.model_args.model_name_or_path",
        code=REFUSED,
        lines=3,
    ),
    _taught(
        "a vocabulary of another size",
        edited_json("teacher/config.json", vocab_size=64),
        "teacher.model_args.model_name_or_path",
        "a vocabulary of 64 tokens, the student 61",
        code=REFUSED,
        lines=3,
    ),
    _taught(
        "another tokenizer",
        other_vocabulary("teacher"),
        "teacher.model_args.model_name_or_path",
        "choose a teacher",
        code=REFUSED,
    ),
    _taught("a truncated file", truncated("teacher/model.safetensors"), "teacher: ", "teacher/model.safetensors"),
    _taught(
        "more tokens than its vocabulary has",
        lambda home: None,
        "logits_topk: is 62, above the vocabulary of 61",
        code=REFUSED,
        lines=3,
        settings={"logits_topk": 62},
    ),
    _taught(
        "SIGKILL of a rank in its passes",
        lambda home: None,
        "rank 1 was ended by signal 9 (SIGKILL)",
        settings={"teacher.sequence_packing_args.algorithm": "packing_of_mine:pack"},
        files={"packing_of_mine.py": WAITING_PACKER},
        meddle=kill_rank,
    ),
]
