"""Files that were written for another framework: told by their sections, so that an error can say what to do."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PurePath
from typing import Any, Literal

from roll_batching.jobs.config.diagnostics import ConfigFileError, Problem

Framework = Literal["roll", "nemo_rl"]
NAMES: Mapping[Framework, str] = {"roll": "ROLL", "nemo_rl": "NeMo-RL"}
_ALGORITHMS = {"grpo", "sft", "dpo", "rm", "ppo", "distillation", "loss_fn"}
_ROLL = {"hydra", "defaults", "sft_train", "student_train", "student", "custom_envs"}
MOST_BESIDE = 10
"""Problems that are shown below the hint: those of a whole file of another framework's are many."""


def framework_of(data: Mapping[str, Any]) -> Framework | None:
    """The framework whose file `data` is, by keys that only its files give a value; None: none that is known.

    A run's own config.yaml names all keys, with null for sections that are not there (`hydra: null`).
    """
    keys = {key for key, value in data.items() if value is not None}
    parents = data.get("defaults")
    named = [parents] if isinstance(parents, str) else parents if isinstance(parents, list) else []
    if ("policy" in keys and keys & _ALGORITHMS) or any(str(name).endswith((".yaml", ".yml")) for name in named):
        return "nemo_rl"
    rewards = data.get("rewards")
    workers = rewards.values() if isinstance(rewards, Mapping) else ()
    if keys & _ROLL or any(isinstance(one, Mapping) and "worker_cls" in one for one in workers):
        return "roll"
    return None


def with_hint(error: ConfigFileError, framework: Framework, path: str) -> ConfigFileError:
    """`error` with what to do about such a file before its own problems."""
    output = "converted.yaml" if PurePath(path).name == "job.yaml" else "job.yaml"  # not over itself
    command = f"roll-batching convert-config --from {framework} {path} --output {output}"
    first = Problem((), f"{path} is a file of {NAMES[framework]}'s; convert it: {command}")
    own = error.problems[:MOST_BESIDE]
    return ConfigFileError([first, *own], more=len(error.problems) - len(own) + error.more)
