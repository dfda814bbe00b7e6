"""Translates the environments of ROLL's agentic files to arguments of `environments:rollout`.

ROLL plays `custom_envs.TAG` for each of `train_env_manager.tags`. A sample is an episode (TrajEnvManager), or a turn
whose text tells earlier ones (StepEnvManager, StepConcatEnvManager).
"""

from __future__ import annotations

from typing import Any

from roll_batching.jobs.config.rollout_keys import RolloutKeys
from roll_batching.tools.conversion.draft import Draft
from roll_batching.tools.conversion.foreign_file import section_at

AGENTIC = "environments and turns are written as a rollout_function (docs/rollouts.md)"
_SECTIONS = ("custom_envs", "train_env_manager", "val_env_manager", "env_manager_cls", "val_batch_size")
_ROLLOUT = "roll_batching.jobs.rollouts.environments:rollout"
_GAMES: dict[str, tuple[str, str, dict[str, tuple[str, Any]]]] = {
    "frozen_lake": (
        "roll_batching.jobs.rollouts.environments:FrozenLake",
        "the map's letters and the instruction are ours, start and goal are in corners; ROLL draws them",
        {"size": ("size", 4), "p": ("ice", 0.8), "is_slippery": ("is_slippery", True), "": ("has_words", True)},
    ),
    "sokoban": (
        "roll_batching.jobs.rollouts.games:Sokoban",
        "the map's letters, the instruction and the drawing of rooms are ours",
        {"dim_room": ("size", [10, 10]), "num_boxes": ("boxes", 4)},
    ),
}
"""By `env_type`, our environment, the difference, and our arguments by ROLL's, each with ROLL's default."""
_OWN_KEYS = ("action_pattern", "format_penalty", "max_steps")
"""Keys of `env_config` that `environments:rollout` reads in place of an environment."""
_PLACES = {"observation": "observation", "current_observation": "observation", "env_instruction": "instruction"}
_PLACES |= {"turn_idx": "turn", "current_step": "turn", "step_count": "turns_done", "actions_left": "turns_left"}
"""Our places of `observation_format` by those of `agent_template`."""
_TURNS = ("StepEnvManager", "StepConcatEnvManager")
_MOST_SEEDS = 100_000


def take_environments(draft: Draft, data: dict[str, Any]) -> dict[str, Any]:
    """Takes environments and managers out of `data`; their sampling counts where actor_infer has none."""
    sections = {key: data.pop(key, None) for key in _SECTIONS}
    if not section_at(data, "actor_infer").get("generating_args"):
        for role, manager in (("actor_infer", "train_env_manager"), ("validation", "val_env_manager")):
            if sampling := section_at(sections, manager, "generating_args"):
                sampling = {key: value for key, value in sampling.items() if key != "num_return_sequences"}  # ROLL: 1
                data[role] = {**section_at(data, role), "generating_args": sampling}
                for key in sampling:
                    draft.origins[role, "generating_args", key] = f"{manager}.generating_args.{key}"
    return sections


def convert_environments(draft: Draft, sections: dict[str, Any]) -> None:
    """Writes rollout function, prompts and evaluation of the first training environment."""
    tag = next(iter(_tags(sections, "train_env_manager")), "")
    section = section_at(sections, "custom_envs", tag)
    player = str(section.get("env_manager_cls") or "TrajEnvManager").rpartition(".")[2]
    plays_gem = player == "ProxyEnvManager" and str(section.get("agent_runner_cls")).endswith(".GEMRunner")
    is_known = bool(section) and (plays_gem or player in ("TrajEnvManager", *_TURNS))
    for key in [key for key in _SECTIONS if sections[key] is not None]:
        why = f"the job plays {tag}: rollout_args and the numbers of rollouts have it" if is_known else AGENTIC
        draft.leave_out(key, "idle" if is_known else "refused", why)
    if not is_known:
        what = f"{player} of {tag}" if section else "the environments of custom_envs"
        why = f"is missing: write {what} as one, which also returns rewards (docs/rollouts.md)"
        draft.missing.append(f"rollout_function: {why}")
        return
    for key in _SECTIONS[1:3]:
        if others := [other for other in _tags(sections, key) if other != tag]:
            draft.leave_out(f"{key}.tags", "refused", f"{others}: training and evaluation play one environment, {tag}")
    _convert_rollout(draft, f"custom_envs.{tag}", player, section)
    sampling = section_at(draft.values, "actor_infer", "generating_args")
    limits = (section.get("max_tokens_per_step"), sampling.pop("max_new_tokens", None))
    section_at(draft.values, "validation", "generating_args").pop("max_new_tokens", None)
    meaning = "of one turn: the smaller of max_tokens_per_step and max_new_tokens, as in ROLL"
    limit = min((limit for limit in limits if isinstance(limit, int)), default=None)
    draft.put(("response_length",), limit, f"custom_envs.{tag}.max_tokens_per_step", meaning)
    meaning = "the job's prompts are numbers, which the model does not read"
    draft.put(("prompt_length",), 16, f"custom_envs.{tag}.env_type", meaning)
    steps, groups = (draft.values.get(key) for key in ("max_steps", "rollout_batch_size"))
    seeds = steps * groups if isinstance(steps, int) and isinstance(groups, int) else 0
    seeds = min(seeds, _MOST_SEEDS) if seeds > 0 else _MOST_SEEDS
    section_at(draft.values, "actor_train", "data_args").pop("response", None)
    meaning = "groups of rollouts have one seed each, another in every step; ROLL counts seeds on from random ones"
    draft.put(("actor_train", "data_args", "seeds"), seeds, "train_env_manager.num_env_groups", meaning)
    count, groups = sections["val_batch_size"], section_at(sections, "val_env_manager").get("num_env_groups", 0)
    count = count if isinstance(count, int) and count > 0 else groups
    draft.put(("eval_samples",), count, "val_batch_size", "episodes of the training's environment, from held-out seeds")


def _tags(sections: dict[str, Any], manager: str) -> list[str]:
    tags = section_at(sections, manager).get("tags")
    return [str(tag) for tag in tags] if isinstance(tags, list) else []


def _convert_rollout(draft: Draft, where: str, player: str, section: dict[str, Any]) -> None:
    """Writes `rollout_function` and `rollout_args`."""

    def put(name: str, value: Any, key: str, meaning: str = "") -> None:
        if value is not None:
            draft.put(("rollout_args", name), value, f"{where}.{key}", meaning)

    draft.put(("rollout_function",), _ROLLOUT, f"{where}.env_manager_cls")
    kind, settings, turns = str(section.get("env_type")), section_at(section, "env_config"), section.get("max_steps")
    arguments = {key: value for key, value in settings.items() if key not in _OWN_KEYS}
    if kind in _GAMES:
        name, difference, names = _GAMES[kind]
        put("environment", name, "env_type", difference)
        for key in arguments.keys() - names:
            draft.leave_out(f"{where}.env_config.{key}", "refused", f"the environment has no such argument: {name}")
        arguments = {ours: settings.get(theirs, default) for theirs, (ours, default) in names.items()}
    elif ":" in kind:
        put("environment", "roll_batching.jobs.rollouts.games:Gem", "env_type", "gem's: pip install gem-llm==0.0.4")
        arguments = {"name": kind, **settings}
    else:
        why = "is missing: package.module:name of a class with reset(*, seed, options) and step(action) for ROLL's"
        why += f" {kind} (docs/rollouts.md#environments); environment_args are what the file gives it"
        draft.missing.append(f"rollout_args.environment: {why}")
        if "tool_wrapper" in section:
            draft.leave_out(f"{where}.tool_wrapper", "refused", "the class runs the tools between two turns")
    put("environment_args", arguments, "env_config")
    put("max_turns", turns, "max_steps")
    if isinstance(turns, int) and turns > RolloutKeys.model_fields["rollout_max_calls"].default:
        draft.put(("rollout_max_calls",), turns, f"{where}.max_steps")
    if ":" not in kind:
        put("action_pattern", settings.get("action_pattern", "<answer>(.*?)</answer>"), "env_config")
        put("format_penalty", settings.get("format_penalty", 0), "env_config")
    meaning = "ROLL renders with enable_thinking: false; set it in template_args if the chat template reads it"
    put("chat", True, "env_manager_cls", meaning)
    put("system", section.get("agent_system_template"), "agent_system_template")
    length = section.get("history_length")
    history = max(0, length - 1) if isinstance(length, int) else 0
    values: dict[str, Any] = {name: "{" + ours + "}" for name, ours in _PLACES.items()}
    values |= {"history": "{history}"} if player in _TURNS else {}
    values |= {"history_length": history, "suffix": ""}
    values["max_response_length"] = section.get("max_tokens_per_step")
    try:
        text = str(section.get("agent_template")).format(**values)
        if "{observation}" not in text:
            raise ValueError("there is no place for the observation")
    except (LookupError, ValueError, AttributeError) as error:
        text = "{observation}"
        why = f"cannot be filled ({error}): the observation stands alone"
        draft.leave_out(f"{where}.agent_template", "refused", why)
    put("observation_format", text, "agent_template")
    if player in _TURNS:
        told = "{history}" in text
        meaning = "a turn's text tells each earlier one; ROLL's StepEnvManager: those without a valid action" * told
        put("history", history if told else 0, "history_length", meaning)
        if draft.values.get("adv_estimator") == "step_reinforce" and turns != 1:
            meaning = "each turn has the reward of its episode; in ROLL, of itself and the turns behind it"
            draft.meanings["adv_estimator",] = meaning
