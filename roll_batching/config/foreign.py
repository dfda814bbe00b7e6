"""Files that were written for another framework: told by their sections, so that an error can say what to do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

Framework = Literal["roll", "nemo_rl"]
NAMES: Mapping[Framework, str] = {"roll": "ROLL", "nemo_rl": "NeMo-RL"}
_ALGORITHMS = {"grpo", "sft", "dpo", "rm", "ppo", "distillation", "loss_fn"}
_ROLL = {"hydra", "defaults", "rewards", "sft_train", "student_train", "student", "custom_envs"}


def framework_of(data: Mapping[str, Any]) -> Framework | None:
    """Whose file `data` is, by its top-level keys; None: none that is known."""
    keys = set(data)
    parents = data.get("defaults")
    named = [parents] if isinstance(parents, str) else parents if isinstance(parents, list) else []
    if ("policy" in keys and keys & _ALGORITHMS) or any(str(name).endswith((".yaml", ".yml")) for name in named):
        return "nemo_rl"
    return "roll" if keys & _ROLL else None


def hint(framework: Framework, path: str) -> str:
    """What to do with such a file."""
    command = f"roll-batching convert-config --from {framework} {path} --output job.yaml"
    return f"is a file of {NAMES[framework]}'s; convert it: {command}"
