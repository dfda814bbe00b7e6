"""The example to copy: README's commands work as they stand there, the data are right, the reward is, and it trains."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from roll_batching.jobs.config import load_config
from roll_batching.jobs.observe.run_files import read_metrics
from roll_batching.jobs.rewards import Completion, load_reward

ROOT = Path(__file__).resolve().parents[3]
EXAMPLE = ROOT / "examples" / "own_task"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def commands(page: Path, heading: str) -> list[list[str]]:
    """The indented lines of one section, as words."""
    section = re.split(r"\n#+ ", page.read_text().split(f"# {heading}\n", 1)[1])[0]
    return [shlex.split(line) for line in section.splitlines() if line.startswith("    ")]


README = commands(ROOT / "README.md", "Your own task")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A working directory that sees the repository's examples and keeps what the commands write."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    subprocess.run([sys.executable, "examples/own_task/make_data.py"], check=True, capture_output=True)
    return tmp_path


def lines(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_the_commands_are_there_in_an_order_that_works():
    words = [" ".join(command) for command in README]
    assert words[:2] == ["python3 -m venv .venv", "source .venv/bin/activate"]
    assert README[2][:3] == ["pip", "install", "--editable"]
    extra = re.fullmatch(r"\.\[(\w+)\]", README[2][3])
    assert extra and extra[1] in PROJECT["optional-dependencies"]
    assert (ROOT / README[2][README[2].index("--constraint") + 1]).is_file()
    assert words[3] == "python examples/own_task/make_data.py" and (ROOT / README[3][1]).is_file()
    assert [command[0] for command in README[4:]] == ["roll-batching"] * 2 and len(README) == 6
    assert "roll-batching" in PROJECT["scripts"]
    assert commands(EXAMPLE / "README.md", "Your own task") == README[3:5]


def test_the_environment_is_activated_before_its_commands_are_used():
    text = (ROOT / "README.md").read_text()
    used = re.search(r"^    (roll-batching |python -m roll_batching)", text, re.MULTILINE)
    assert used and text.index("source .venv/bin/activate") < used.start()


@pytest.mark.parametrize("command", README[4:], ids=lambda command: command[-1])
def test_the_training_commands_name_a_job_that_can_run(folder, command):
    assert command[1:3] == ["train", "--config"]
    job = load_config(command[3], command[4:])
    job.check_runnable()
    if not command[4:]:
        assert job.notices == ()
    for name in (job.warmup.file_name, job.actor_train.data_args.file_name, job.actor_train.data_args.eval_file_name):
        assert lines(folder / name)


def test_the_lines_to_change_are_marked_and_said():
    config = (EXAMPLE / "config.yaml").read_text().splitlines()
    marked = [line.split(":")[0].strip() for number in "123" for line in config if f" # {number}:" in line]
    assert marked == ["reward_function", "vocabulary", "file_name"]
    assert all(f"{key}`" in (EXAMPLE / "README.md").read_text() for key in marked)


def test_data_and_reward_agree(folder):
    data = {name: lines(folder / "data" / "own_task" / f"{name}.jsonl") for name in ("heldout", "prompts", "corpus")}
    job = load_config("examples/own_task/config.yaml")
    reward = load_reward(job.reward_function)
    held = {row["prompt"] for row in data["heldout"]}
    assert not held & {row["prompt"] for row in data["prompts"] + data["corpus"]}
    for row in data["heldout"] + data["prompts"]:
        assert set(row["prompt"] + row["answer"]) <= set(job.tokenizer.vocabulary)
        assert len(row["prompt"]) <= job.prompt_length and len(row["answer"]) < job.response_length
    row = data["heldout"][0]

    def score(response):
        return reward(
            Completion(
                prompt=row["prompt"], response=response, finished=True, tokens=1, answer=row["answer"], record=row
            )
        )

    answer = row["answer"]
    assert (score(answer), score(answer + "a"), score("")) == (1.0, 0.0, 0.0)
    assert 0 < score(answer[:-1] + "=") < 1
    assert all(document["response"] == "".join(sorted(document["prompt"][:-1])) for document in data["corpus"])


@pytest.mark.slow
def test_it_trains(folder):
    few = ["max_steps=2", "warmup.training_args.max_steps=3", "eval_samples=8", "rollout_batch_size=16"]
    command = [sys.executable, "-m", "roll_batching.cli", *README[4][1:], *few]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    rows = read_metrics(folder / "runs" / "own_task" / "metrics.jsonl")
    assert [(row["phase"], row["step"]) for row in rows][-2:] == [("rl", 1), ("rl", 2)]


def test_every_extra_holds_what_is_imported_or_called():
    files = [file for room in ("roll_batching", "tests", "scripts") for file in (ROOT / room).rglob("*.py")]
    sources = [file.read_text() for file in files]
    tools = {"psutil", "mypy", "pytest", "pytest_xdist", "ruff", "types_pyyaml", "roll_batching"}
    tools |= {"jinja2"}  # which transformers needs for chat templates
    tools |= {"mkdocstrings"}  # mkdocs.yml names them
    modules = {"megatron_core": "megatron.core", "hydra_core": "hydra", "fla_core": "fla", "mlflow_skinny": "mlflow"}
    for extra, packages in PROJECT["optional-dependencies"].items():
        names = {re.split(r"[\[><=]", package)[0].lower().replace("-", "_") for package in packages} - tools
        for name in names:
            module = modules.get(name, name)
            pattern = re.compile(rf"^\s*(import|from) {re.escape(module)}\b|\"{re.escape(module)}[\".]", re.MULTILINE)
            assert any(pattern.search(text) for text in sources), f"{extra}: {name} is used nowhere"
