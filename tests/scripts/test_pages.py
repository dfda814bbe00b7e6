"""Command blocks of README.md and the docs pages: known to the command line, and what they name is there."""

from __future__ import annotations

import functools
import os
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import typer

from roll_batching.cli import app
from roll_batching.jobs.config import JobConfig, load_config

ROOT = Path(__file__).resolve().parents[2]
CLI = typer.main.get_command(app)
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "examples").glob("*/README.md"))]
OF_THE_READER = {"job.yaml", "job.toml", "RUN", "DIR", "more.jsonl", "other.jsonl"}
"""Files and folders that stand for the reader's own."""
TASKS = {"sft": "sft", "dpo": "dpo"}


def command_lines(page: str) -> list[str]:
    """The commands of indented lines, without comments."""
    lines = page.replace("\\\n", " ").splitlines()
    found = [line.strip() for line in lines if re.match(r"    (\./|python3? |roll-batching |pip |ray |PYTHON=)", line)]
    return [" ".join(re.sub(r"\s# .*", "", line).split()) for line in found]


def blocks(page: str) -> list[list[str]]:
    """The commands of indented lines, as words."""
    return [shlex.split(line) for line in command_lines(page)]


@functools.cache
def made_by(script: str, arguments: tuple[str, ...]) -> frozenset[str]:
    """The files that a generator of data writes, relative to the folder where it is started."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([sys.executable, ROOT / script, *arguments], cwd=folder, check=True, capture_output=True)
        return frozenset(str(path.relative_to(folder)) for path in Path(folder).rglob("*") if path.is_file())


def data_files(job: JobConfig) -> set[str]:
    names = [job.actor_train.data_args.file_name, job.actor_train.data_args.eval_file_name]
    if not job.is_supervised and job.warmup is not None:
        names.append(job.warmup.file_name)
    return {name for name in names if name}


def faults(commands: list[list[str]]) -> list[str]:
    """What does not work as written of a page's commands, one after the other."""
    found, made, runs = [], set(), set(OF_THE_READER)
    for command in commands:
        words = " ".join(command)
        if command[0].startswith("./scripts/demo.sh"):
            runs.add("runs/demo-seed1")
        if command[0].startswith("./") and not os.access(ROOT / command[0], os.X_OK):
            found.append(f"{words}: {command[0]} is no program")
        if command[0].startswith("python") and command[1].endswith("make_data.py"):
            made |= made_by(command[1], tuple(command[2:]))
        if command[0].startswith("python") and command[1].endswith(".py") and not (ROOT / command[1]).is_file():
            found.append(f"{words}: {command[1]} does not exist")
        if command[0] == "roll-batching":
            found += [f"{words}: {fault}" for fault in _faults(command[1:], made, runs)]
    return found


def _faults(arguments: list[str], made: set[str], runs: set[str]) -> list[str]:
    name, *rest = arguments
    if name not in CLI.commands:
        return [f"there is no command {name}"]
    try:
        given = CLI.commands[name].make_context(name, list(rest)).params
    except Exception as error:  # of click's or its copy in typer, which differ by version
        return [f"{type(error).__name__}: {error}"]
    if given.get("checkpoint") is not None and str(given["checkpoint"]) not in runs:
        return [f"nothing makes {given['checkpoint']}"]
    config = given.get("config")
    if config is None or str(config) in OF_THE_READER:
        return []
    try:
        job = load_config(ROOT / config, given.get("overrides") or (), task=TASKS.get(name))
    except Exception as error:
        return [str(error)]
    if job.save_steps:
        runs.add(f"{job.output_dir}/{job.exp_name}")
    missing = data_files(job) - made if name not in ("rehearse", "fit") else set()
    return [f"nothing makes {file}" for file in sorted(missing)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_commands_of_a_page_are_known(page):
    text = page.read_text()
    assert not faults(blocks(text))
    for name in re.findall(r"`roll-batching ([a-z][\w-]*)", text):
        assert name in CLI.commands, name


@pytest.mark.parametrize(
    ("commands", "words"),
    [
        ("    roll-batching trian --config job.yaml", "there is no command trian"),
        ("    roll-batching train --confg job.yaml", "--confg"),
        ("    roll-batching train --config configs/nowhere.yaml", "no such file"),
        ("    roll-batching train --config examples/own_task/config.yaml max_stepz=3", "max_stepz"),
        ("    roll-batching train --config examples/own_task/config.yaml", "nothing makes data/own_task/corpus.jsonl"),
        ("    roll-batching generate --checkpoint runs/demo_grpo", "nothing makes runs/demo_grpo"),
        ("    ./scripts/nothing.sh", "is no program"),
    ],
)
def test_a_command_that_fails_as_written_is_found(commands, words):
    (fault, *_) = faults(blocks(commands))
    assert words in fault


def test_the_readme_names_an_extra_for_what_it_shows():
    text = (ROOT / "README.md").read_text()
    for word, extra in (("--launcher ray", "[megatron,ray]"), ("train_hf_model.sh", "[megatron,hf]")):
        assert extra in text[max(text.index(word) - 400, 0) : text.index(word)], word
    assert text.count("Parquet") == len(re.findall(r"Parquet (?:\(|with the )extra `parquet`", text))


@pytest.mark.slow
def test_the_quick_commands_of_the_readme_run_in_order(tmp_path):
    """With few steps; the checkpoint that is asked is the first run's, in place of the demo's."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    few = {
        "train": ["max_steps=1", "warmup.training_args.max_steps=2", "eval_samples=8"],
        "sft": ["train.max_num_steps=2", "eval_samples=8"],
        "dpo": ["max_steps=2", "eval_samples=8"],
    }
    for command in blocks((ROOT / "README.md").read_text()):
        if command[0] not in ("python", "roll-batching") or "--launcher" in command or "rehearse" in command:
            continue
        if command[0] == "roll-batching":
            words = [word.replace("runs/demo-seed1", "runs/own_task").replace("a+9b+7c-4=", "cab=") for word in command]
            command = ["python", "-m", "roll_batching.cli", *words[1:], *few.get(words[1], [])]
        done = subprocess.run(
            [sys.executable, *command[1:]], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600
        )
        assert done.returncode == 0, (command, done.stderr[-3000:])
        assert "Warning" not in done.stderr, command
    assert (tmp_path / "answers.jsonl").is_file()
