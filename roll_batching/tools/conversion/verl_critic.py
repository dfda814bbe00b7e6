"""verl's critic, and the keys of PPO that go with it."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from roll_batching.tools.conversion.critics import HEAD, put_critic
from roll_batching.tools.conversion.draft import Draft
from roll_batching.tools.conversion.foreign_file import ForeignFile, value_at
from roll_batching.tools.conversion.verl_options import ACTOR, MODEL, ROLLOUT, VERL

_OF_ROLLOUTS = {
    "forward_max_token_len_per_gpu": "log_prob_max_token_len_per_gpu",
    "forward_micro_batch_size_per_gpu": "log_prob_micro_batch_size_per_gpu",
}
"""By key of the critic, the key of rollouts that does for the actor what it does for the critic."""
_FROM_ACTOR = ("ppo_mini_batch_size", "use_dynamic_bsz", "ppo_epochs", "loss_agg_mode")
"""Keys whose defaults are the actor's values."""
_NAMES = (
    *((f"{ROLLOUT}.{theirs}", f"critic.{name}") for name, theirs in _OF_ROLLOUTS.items()),
    (f"{ACTOR}.fsdp_config", "critic.model.fsdp_config"),
    (MODEL, "critic.model"),
    (ACTOR, "critic"),
)
_UNIFORM = "verl's Megatron: uniform between plus and minus 1 / sqrt(hidden size)"
_BIAS = "verl's FSDP engine adds a bias, which starts at 0"


def has_critic(data: Mapping[str, Any]) -> bool:
    """Whether verl trains a critic with these settings: where critic.enable says so, else with gae."""
    enabled = value_at(data, "critic.enable")
    return (value_at(data, "algorithm.adv_estimator") or "gae") == "gae" if enabled is None else bool(enabled)


def critic_defaults(file: ForeignFile) -> dict[str, Any]:
    """Verl's defaults of the critic; those that are the actor's values included."""
    cap = file.peek("critic.ppo_max_token_len_per_gpu", 32768)
    defaults = {f"critic.{name}": file.peek(f"{ACTOR}.{name}") for name in _FROM_ACTOR}
    own = {"optim.lr": 1e-5, "cliprange_value": 0.5, "model.path": "~/models/deepseek-llm-7b-chat"}
    defaults["algorithm.lam"] = 1.0
    caps = {"ppo_max_token_len_per_gpu": cap, "forward_max_token_len_per_gpu": cap}
    return defaults | {f"critic.{name}": value for name, value in (own | caps).items()}


def critic_as_actor(file: ForeignFile) -> ForeignFile:
    """The section `critic` as the actor, its model and its rollouts in a file, whose keys it has."""
    critic = copy.deepcopy(file.peek("critic") or {})
    model = critic.pop("model", None) or {}
    critic["fsdp_config"] = model.pop("fsdp_config", None) or {}
    rollout = {theirs: critic.pop(name, None) for name, theirs in _OF_ROLLOUTS.items()}
    rollout["n"] = file.peek(f"{ROLLOUT}.n")
    sections = {"actor": critic, "model": model, "rollout": rollout}
    return ForeignFile(VERL, {"actor_rollout_ref": sections}, Draft(file.draft.source, framework="verl"))


def convert_ppo(file: ForeignFile, below: ForeignFile, megatron: bool) -> None:
    """Puts the translated critic and the keys of PPO; `below` is the critic as an actor, read."""
    own = below.draft.values
    passes = own.get("ppo_epochs")
    file.put(("critic_epochs",), passes, "critic.ppo_epochs")
    clip, aggregation = below.take(f"{ACTOR}.cliprange_value"), below.take(f"{ACTOR}.loss_agg_mode")
    file.put(("value_clip",), clip, "critic.cliprange_value")
    if aggregation != file.peek(f"{ACTOR}.loss_agg_mode"):
        text = f"{aggregation}: the actor's loss_agg_mode holds for both losses"
        file.draft.leave_out("critic.loss_agg_mode", "refused", text)
    below.take(f"{ACTOR}.enable")
    below.take(f"{MODEL}.tokenizer_path")
    below.leave_out_rest()
    put_critic(file.draft, below.draft, _name)
    key = "the start of the value head in verl"
    file.put(HEAD, 0.01 if megatron else 0.02, key, _UNIFORM if megatron else _BIAS)
    file.draft.defaults.add(key)
    file.move("algorithm.lam", ("lambd",))
    file.put(("whiten_advantages",), True, "algorithm.adv_estimator", "verl's gae always whitens advantages")
    steps = file.take("trainer.critic_warmup")
    if steps:
        text = f"the first {steps - 1} steps; verl trains the actor in step {steps}"
        file.put(("critic_warmup",), max(0, steps - 1), "trainer.critic_warmup", text)


def _name(text: str) -> str:
    """`text` with the critic's names for keys of the actor."""
    for actor, critic in _NAMES:
        text = text.replace(actor, critic)
    return text
