"""Recognises files that were written for another framework, and tells how to convert them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import PurePath
from typing import Any, Literal

from roll_batching.jobs.config.diagnostics import ConfigFileError, Problem

Framework = Literal["roll", "nemo_rl", "verl", "slime"]
"""Frameworks whose files `convert-config --from` reads."""
NAMES: Mapping[Framework, str] = {"roll": "ROLL", "nemo_rl": "NeMo-RL", "verl": "verl", "slime": "slime"}
_ALGORITHMS = {"grpo", "sft", "dpo", "rm", "ppo", "distillation", "loss_fn"}
_ROLL = {"hydra", "defaults", "sft_train", "student_train", "student", "custom_envs"}
_VERL = {"trainer", "data"}
VERLS_OWN_FILES = re.compile(r"(_generated_)?(ppo|sft)_(\w+_)?trainer(_engine)?")
"""Names of verl's own files in `defaults`."""
PROGRAMS: Mapping[Framework, re.Pattern[str]] = {
    "verl": re.compile(
        r"verl\.(trainer|experimental)\.[\w.]+|[A-Za-z_][\w.]*\.(main_\w+|sft_trainer\w*)"
        r"|([\w.-]*/)*(main_\w+|sft_trainer\w*)\.py"
    ),
    "slime": re.compile(r"([\w.-]*/)*train(_async)?\.py"),
}
"""Training programs that scripts of a framework run; for verl also programs of forks and recipes with verl's keys."""
MOST_BELOW_HINT = 10
"""Problems shown below the hint: a whole file of another framework has many."""


def framework_of(data: Mapping[str, Any]) -> Framework | None:
    """The framework of a file, recognized by keys that only its files have, or None."""
    keys = set(data)
    parents = data.get("defaults")
    named = [parents] if isinstance(parents, str) else parents if isinstance(parents, list) else []
    if "actor_rollout_ref" in keys or keys >= _VERL or any(VERLS_OWN_FILES.fullmatch(str(name)) for name in named):
        return "verl"
    if ("policy" in keys and keys & _ALGORITHMS) or any(str(name).endswith((".yaml", ".yml")) for name in named):
        return "nemo_rl"
    rewards = data.get("rewards")
    workers = rewards.values() if isinstance(rewards, Mapping) else ()
    if keys & _ROLL or any(isinstance(worker, Mapping) and "worker_cls" in worker for worker in workers):
        return "roll"
    return None


def script_error(text: str, path: str) -> ConfigFileError:
    """The error for a shell script that is given as a job's file; `text` is its content."""
    words = [word.strip("\"'();") for word in text.split()]
    framework = next((name for name, program in PROGRAMS.items() if any(map(program.fullmatch, words))), None)
    if framework is not None:
        return ConfigFileError([_hint(framework, path)])
    why = "is a shell script: give a YAML file. `roll-batching convert-config` converts scripts of verl and slime"
    return ConfigFileError([Problem((), f"{path} {why}")])


def with_hint(error: ConfigFileError, framework: Framework, path: str) -> ConfigFileError:
    """`error`, below a first problem that says how to convert the file at `path`."""
    printed = error.problems[:MOST_BELOW_HINT]
    left_out = len(error.problems) - len(printed) + error.more
    return ConfigFileError([_hint(framework, path), *printed], more=left_out)


def _hint(framework: Framework, path: str) -> Problem:
    """The problem that names the framework of the file at `path` and the command that converts the file."""
    output = "converted.yaml" if PurePath(path).name == "job.yaml" else "job.yaml"  # never the file itself
    command = f"roll-batching convert-config --from {framework} {path} --output {output}"
    return Problem((), f"{path} was written for {NAMES[framework]}; convert it: {command}")
