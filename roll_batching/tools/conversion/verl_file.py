"""verl's sections and defaults (`data/verl.yaml`), and its critic, whose keys are those of an actor."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from roll_batching.tools.conversion.draft import Draft
from roll_batching.tools.conversion.foreign_file import ForeignFile, Tables, value_at

VERL = Tables("verl")
ACTOR, ROLLOUT, MODEL = (f"actor_rollout_ref.{name}" for name in ("actor", "rollout", "model"))
_OF_ROLLOUTS = {
    "forward_max_token_len_per_gpu": "log_prob_max_token_len_per_gpu",
    "forward_micro_batch_size_per_gpu": "log_prob_micro_batch_size_per_gpu",
}
"""Key of rollouts with the same effect on the actor, by key of the critic."""
_NAMES = (
    *((f"{ROLLOUT}.{theirs}", f"critic.{name}") for name, theirs in _OF_ROLLOUTS.items()),
    (f"{ACTOR}.fsdp_config", "critic.model.fsdp_config"),
    (MODEL, "critic.model"),
    (ACTOR, "critic"),
)


def defaults_of(supervised: bool, megatron: bool) -> dict[str, Any]:
    """Verl's defaults by dotted key, for a job of one task with one engine."""
    engine, model = ("engine", "model") if supervised else (f"{ACTOR}.megatron", MODEL)
    optimizer = VERL.defaults("optimizer", f"{'megatron' if megatron else 'fsdp'}_optimizer")
    defaults = VERL.defaults("sft" if supervised else "rl", "both")
    defaults |= {f"{'optim' if supervised else f'{ACTOR}.optim'}.{name}": value for name, value in optimizer.items()}
    if not megatron:
        return defaults | {f"{model}.enable_gradient_checkpointing": True}
    return defaults | {f"{engine}.{name}": value for name, value in VERL.defaults("megatron_layout").items()}


def has_critic(data: Mapping[str, Any]) -> bool:
    """Whether verl trains a critic: as `critic.enable` says, or without that key for the estimator `gae`."""
    enabled = value_at(data, "critic.enable")
    return (value_at(data, "algorithm.adv_estimator") or "gae") == "gae" if enabled is None else bool(enabled)


def critic_defaults(file: ForeignFile) -> dict[str, Any]:
    """Verl's defaults of the critic, with those that it takes from the actor's settings."""
    cap = file.peek("critic.ppo_max_token_len_per_gpu", 32768)
    shared = ("ppo_mini_batch_size", "use_dynamic_bsz", "ppo_epochs", "loss_agg_mode")
    defaults = VERL.defaults("critic") | {f"critic.{name}": file.peek(f"{ACTOR}.{name}") for name in shared}
    return defaults | dict.fromkeys(("critic.ppo_max_token_len_per_gpu", "critic.forward_max_token_len_per_gpu"), cap)


def critic_as_actor(file: ForeignFile, megatron: bool) -> ForeignFile:
    """Returns a file whose actor, model and rollouts have the settings of the section `critic` of `file`.

    Keys that the critic lacks have the engine's defaults.
    """
    critic = copy.deepcopy(file.take("critic") or {})
    model = critic.pop("model", None) or {}
    critic["fsdp_config"] = model.pop("fsdp_config", None) or {}
    rollout = {theirs: critic.pop(name, None) for name, theirs in _OF_ROLLOUTS.items()}
    sections = {"actor": critic, "model": model, "rollout": rollout | {"n": file.peek(f"{ROLLOUT}.n")}}
    below = ForeignFile(VERL, {"actor_rollout_ref": sections}, Draft(file.draft.source, framework="verl"))
    engine = (f"{ACTOR}.optim.", f"{ACTOR}.megatron.", f"{MODEL}.")
    defaults = defaults_of(supervised=False, megatron=megatron)
    del defaults[f"{ACTOR}.optim.lr"]  # `critic_defaults` has the critic's learning rate
    below.fill_defaults({key: value for key, value in defaults.items() if key.startswith(engine)})
    return below


def critic_name(text: str) -> str:
    """Replaces the actor's keys in `text` by the critic's keys in the file."""
    for actor, critic in _NAMES:
        text = text.replace(actor, critic)
    return text
