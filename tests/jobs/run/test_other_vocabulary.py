"""`generate` and `eval` refuse a tokenizer whose tokens stand for other texts than those of the run's training."""

from __future__ import annotations

import contextlib
import io
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.huggingface import tiny
from tests.jobs.rl.jobs import settings, write_data
from tests.jobs.run.test_resume_changes import PERMUTED
from tests.support.ranks import run_ranks
from tests.support.tiny_job import VOCABULARY

HERE = "tests.jobs.run.test_other_vocabulary:"
REFUSED = r"rl-000001 was trained with another vocabulary: .* Set the tokenizer of that run"


def commands(lines: dict[str, list[str]]) -> dict[str, tuple[int, str]]:
    """In one process: the exit code of each command line, and what it prints on both streams."""
    from roll_batching.cli import main

    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        del os.environ[name]  # a command is no rank of a job
    endings = {}
    for name, arguments in lines.items():
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
            try:
                main(arguments)
                code = 0
            except SystemExit as end:
                code = int(end.code or 0)
        endings[name] = code, printed.getvalue()
    return endings


def train(folder: Path, **changes: Any) -> Path:
    """The folder of a run of one step of RL, which saved."""
    job = settings(
        folder, warmup=None, max_steps=1, save_steps=1, reward_function="tests.jobs.rl.jobs:length", **changes
    )
    run_ranks(1, "tests.jobs.rl.jobs:run", job)
    return folder / "runs" / "tiny"


def asking(run: Path, *more: str) -> dict[str, list[str]]:
    return {
        "generate": ["generate", "--checkpoint", str(run), "--prompt", "a+1=", "--max-new-tokens", "2", *more],
        "eval": ["eval", "--checkpoint", str(run), *more],
    }


def check_answered(lines: dict[str, list[str]]) -> None:
    (endings,) = run_ranks(1, HERE + "commands", lines)
    assert [code for code, _ in endings.values()] == [0, 0], endings


def check_refused(lines: dict[str, list[str]]) -> dict[str, str]:
    """Messages of the commands, which print nothing else."""
    (endings,) = run_ranks(1, HERE + "commands", lines)
    for name, (code, text) in endings.items():
        assert code == 1 and re.search(REFUSED, text), f"{name}: {text}"
        assert len(text.splitlines()) == 1, "no answers beside the message"
    return {name: text for name, (_, text) in endings.items()}


@pytest.mark.bad_input
def test_permuted_characters_of_the_same_number_are_refused(tmp_path, report):
    write_data(tmp_path)
    run = train(tmp_path)
    config = run / "config.yaml"
    assert len(PERMUTED) == len(VOCABULARY) and config.read_text().count(VOCABULARY) == 1
    check_answered(asking(run))
    config.write_text(config.read_text().replace(VOCABULARY, PERMUTED))
    report(check_refused(asking(run))["eval"].strip().replace(str(tmp_path), "..."))


@pytest.mark.bad_input
def test_a_vocabulary_file_that_was_rewritten_is_refused(tmp_path):
    write_data(tmp_path)
    file = tmp_path / "vocabulary.txt"
    file.write_text(VOCABULARY)
    tokenizer = {"type": "char", "vocabulary_file": str(file), "eos_token": "$", "pad_token": "."}
    run = train(tmp_path, tokenizer=tokenizer)
    check_answered(asking(run))
    file.write_text(PERMUTED)
    check_refused(asking(run))


@pytest.mark.bad_input
@pytest.mark.models
def test_a_model_directory_with_another_tokenizer_is_refused(tmp_path, monkeypatch):
    """A tokenizer of Hugging Face: in the directory that the run began with, and in one given by --pretrain."""
    write_data(tmp_path)
    model, other = tmp_path / "model", tmp_path / "other"
    tiny.write_model(model, "qwen3")
    tiny.write_tokenizer(model)
    shutil.copytree(model, other)
    with monkeypatch.context() as patch:
        patch.setattr(tiny, "TEXT", tiny.TEXT[::-1])
        tiny.write_tokenizer(other)
    run = train(tmp_path, pretrain=str(model), tokenizer={"type": "hf"}, actor_train__model_args={})
    check_answered(asking(run))
    check_refused(asking(run, "--pretrain", str(other)))
    for file in other.glob("tokenizer*.json"):
        shutil.copy(file, model / file.name)
    check_refused(asking(run))
