"""What is known of NeMo-RL's keys (`data/nemo_rl.yaml`): types and defaults."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from roll_batching.jobs.config.diagnostics import ConfigFileError, Place, Problem, shortened
from roll_batching.tools.conversion.foreign_file import Tables, value_at, wrong_types

NEMO_RL = Tables("nemo_rl")
RL_TASKS = ("grpo", "distill")
"""Tasks that sample."""
CORRECTIONS = {None: "truncate", "tis": "truncate", "icepop": "mask", "seq-mask-tis": "mask_sequences"}
"""Our `engine_correction` by NeMo-RL's `truncated_importance_sampling_type`."""
_RENAMED = {"policy": "value", "grpo": "ppo", "grpo.async_grpo": "ppo.async_ppo"}
"""Section of PPO by the section of GRPO that has the same keys."""


def check_types(data: Mapping[str, Any], source: str) -> None:
    """Raises ConfigFileError with all values of a wrong type."""
    names = {kind: list(NEMO_RL.of_type(kind)) for kind in ("sections", "counts", "numbers")}
    for keys in names.values():
        for section, renamed in _RENAMED.items():
            keys += [renamed + key.removeprefix(section) for key in keys if f"{key}.".startswith(f"{section}.")]
    problems = list(wrong_types(data, names["sections"], names["counts"], names["numbers"]))
    kind = value_at(data, "loss_fn.truncated_importance_sampling_type")
    if not isinstance(kind, str | None) or kind not in CORRECTIONS:
        text = f"is {shortened(repr(kind))}; NeMo-RL knows {', '.join(name for name in CORRECTIONS if name)}"
        problems.append((("loss_fn", "truncated_importance_sampling_type"), text))
    if problems:
        raise ConfigFileError([Problem(path, text, Place(source)) for path, text in problems])


def defaults_of(data: Mapping[str, Any]) -> dict[str, Any]:
    """NeMo-RL's defaults by dotted key, for the sections that `data` has."""
    sections = dict(NEMO_RL.data["defaults"])
    if isinstance(value_at(data, "distillation"), Mapping):
        sections["loss_fn"] = NEMO_RL.data["distillation_loss"]
    optimizer = str(value_at(data, "policy.optimizer.name") or "").rpartition(".")[2]
    sections["policy.optimizer.kwargs"] = NEMO_RL.data["torch_optimizers"].get(optimizer, {})
    defaults = {
        f"{section}.{name}": value
        for section, values in sections.items()
        if isinstance(value_at(data, section), Mapping) or section == "policy.optimizer.kwargs"
        for name, value in values.items()
    }
    if isinstance(value_at(data, "async_rl"), Mapping):
        kind = value_at(data, "async_rl.sampler.name") or "in_order"
        defaults[f"async_rl.sampler.max_{'lookahead' if kind == 'in_order' else 'staleness'}_versions"] = 1
    # Passes without gradient have the micro-batches of training by default.
    if (batch_size := value_at(data, "policy.train_micro_batch_size")) is not None:
        defaults["policy.logprob_batch_size"] = batch_size
    return defaults
