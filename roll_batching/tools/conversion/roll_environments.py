"""Translates the environments of ROLL's agentic files to arguments of `environments:rollout`.

ROLL plays `custom_envs.TAG` for each of `train_env_manager.tags`. Its managers differ in what a turn reads and in what
a sample is: an episode (TrajEnvManager), or a turn, whose text tells earlier ones (StepEnvManager, StepConcatEnvManager).
"""

from __future__ import annotations

from typing import Any

from roll_batching.tools.conversion.draft import Draft
from roll_batching.tools.conversion.foreign_file import section_at
from roll_batching.tools.conversion.roll_defaults import ROLL

AGENTIC = "environments and turns are written as a rollout_function (docs/rollouts.md)"
SECTIONS = ("custom_envs", "train_env_manager", "val_env_manager", "env_manager_cls", "val_batch_size")
_ROOM = "roll_batching.jobs.rollouts"
_GAMES: dict[str, tuple[str, dict[str, tuple[str, Any]]]] = {
    "frozen_lake": (
        f"{_ROOM}.environments:FrozenLake",
        {"size": ("size", 4), "p": ("ice", 0.8), "is_slippery": ("is_slippery", True)},
    ),
    "sokoban": (f"{_ROOM}.games:Sokoban", {"dim_room": ("size", [10, 10]), "num_boxes": ("boxes", 4)}),
}
"""Our environment by `env_type`, and its arguments by ROLL's, each with ROLL's default."""
_DIFFERENCES = {
    "frozen_lake": "the map's letters and the instruction are ours, start and goal are in corners; ROLL draws them",
    "sokoban": "the map's letters, the instruction and the drawing of rooms are ours",
}
_ACTION = "<answer>(.*?)</answer>"
_TURNS = ("StepEnvManager", "StepConcatEnvManager")
_MOST_SEEDS = 100_000
_PROMPT = 16
"""Most tokens of a job's prompt, which is a number."""
_CLASS = (
    "is missing: package.module:name of a class with reset(*, seed, options) and step(action) for ROLL's {kind!r} "
    "(docs/rollouts.md#environments); environment_args are what the file gives it"
)


def take_environments(draft: Draft, data: dict[str, Any]) -> dict[str, Any]:
    """Takes environments and their managers out of `data`. Managers sample by generating_args where actor_infer has none.

    Source: `roll/pipeline/agentic/agentic_config.py`, `AgenticConfig.__post_init__`.
    """
    sections = {key: data.pop(key, None) for key in SECTIONS}
    if not section_at(data, "actor_infer").get("generating_args"):
        for role, manager in (("actor_infer", "train_env_manager"), ("validation", "val_env_manager")):
            if isinstance(sampling := section_at(sections, manager).get("generating_args"), dict):
                sampling = {key: value for key, value in sampling.items() if key != "num_return_sequences"}  # ROLL: 1
                data[role] = {**section_at(data, role), "generating_args": sampling}
                for key in sampling:
                    draft.origins[role, "generating_args", key] = f"{manager}.generating_args.{key}"
    return sections


def convert_environments(draft: Draft, sections: dict[str, Any]) -> None:
    """Writes the rollout function of the first training environment, its prompts and its evaluation into `draft`."""
    manager, held_out = section_at(sections, "train_env_manager"), section_at(sections, "val_env_manager")
    tags = manager.get("tags") if isinstance(manager.get("tags"), list) else []
    tag = str(tags[0]) if tags else ""
    section = section_at(sections, "custom_envs", tag)
    kind, player = str(section.get("env_type")), str(section.get("env_manager_cls") or "TrajEnvManager")
    player, runner = player.rpartition(".")[2], str(section.get("agent_runner_cls"))
    is_known = player in ("TrajEnvManager", *_TURNS) or (player == "ProxyEnvManager" and runner.endswith(".GEMRunner"))
    for key in SECTIONS:
        if sections[key] is not None:
            why = f"the job plays {tag}: rollout_args and the numbers of rollouts have it" if is_known else AGENTIC
            draft.leave_out(key, "idle" if is_known and section else "refused", why)
    if not is_known or not section:
        what = f"{player} of {tag}" if section else "the environments of custom_envs"
        draft.missing.append(
            f"rollout_function: is missing: write {what} as one, which also returns rewards (docs/rollouts.md)"
        )
        return
    for name, others in (("train_env_manager", tags), ("val_env_manager", held_out.get("tags") or [])):
        if others := [other for other in others if other != tag]:
            draft.leave_out(f"{name}.tags", "refused", f"{others}: training and evaluation play one environment, {tag}")
    _rollout(draft, f"custom_envs.{tag}", kind, player, section)
    _lengths(draft, f"custom_envs.{tag}", section)
    steps, groups = draft.values.get("max_steps"), draft.values.get("rollout_batch_size", 128)
    seeds = steps * groups if isinstance(steps, int) and steps > 0 and isinstance(groups, int) else _MOST_SEEDS
    data = ("actor_train", "data_args")
    section_at(draft.values, *data).pop("response", None)
    meaning = "groups of rollouts have one seed each, another in every step; ROLL counts seeds on from random ones"
    draft.put((*data, "seeds"), min(max(seeds, 1), _MOST_SEEDS), "train_env_manager.num_env_groups", meaning)
    count = sections["val_batch_size"]
    count = count if isinstance(count, int) and count > 0 else held_out.get("num_env_groups", 0)
    draft.put(("eval_samples",), count, "val_batch_size", "episodes of the training's environment, from held-out seeds")


def _rollout(draft: Draft, where: str, kind: str, player: str, section: dict[str, Any]) -> None:
    """Writes `rollout_function` and `rollout_args`."""
    draft.put(("rollout_function",), f"{_ROOM}.environments:rollout", f"{where}.env_manager_cls")
    settings = dict(section_at(section, "env_config"))
    arguments: dict[str, Any] = settings
    path = ("rollout_args", "environment")
    if kind in _GAMES:
        name, names = _GAMES[kind]
        draft.put(path, name, f"{where}.env_type", _DIFFERENCES[kind])
        arguments = {ours: settings.get(theirs, default) for theirs, (ours, default) in names.items()}
        arguments |= {"has_words": True} if kind == "frozen_lake" else {}
        for key in settings.keys() - {*names, "action_pattern", "format_penalty", "max_steps"}:
            draft.leave_out(f"{where}.env_config.{key}", "refused", f"the environment has no such argument: {name}")
    elif ":" in kind:
        draft.put(path, f"{_ROOM}.games:Gem", f"{where}.env_type", "an environment of gem: pip install gem-llm==0.0.4")
        arguments = {"name": kind, **settings}
    else:
        arguments = {key: value for key, value in settings.items() if key not in ("action_pattern", "format_penalty")}
        draft.missing.append(f"rollout_args.environment: {_CLASS.format(kind=kind)}")
        if "tool_wrapper" in section:
            draft.leave_out(f"{where}.tool_wrapper", "refused", "the class runs the tools between two turns")
    draft.put(("rollout_args", "environment_args"), arguments, f"{where}.env_config")
    turns = section.get("max_steps")
    draft.put(("rollout_args", "max_turns"), turns, f"{where}.max_steps")
    if isinstance(turns, int) and turns > 64:
        draft.put(("rollout_max_calls",), turns, f"{where}.max_steps")
    if ":" not in kind:
        draft.put(("rollout_args", "action_pattern"), settings.get("action_pattern", _ACTION), f"{where}.env_config")
        draft.put(("rollout_args", "format_penalty"), settings.get("format_penalty", 0), f"{where}.env_config")
    meaning = "ROLL renders with enable_thinking: false; set it in template_args if the chat template reads it"
    draft.put(("rollout_args", "chat"), True, f"{where}.env_manager_cls", meaning)
    if isinstance(system := section.get("agent_system_template"), str):
        draft.put(("rollout_args", "system"), system, f"{where}.agent_system_template")
    length = section.get("history_length")
    history = max(0, length - 1) if isinstance(length, int) else 0
    text = _format(draft, f"{where}.agent_template", section, history)
    draft.put(("rollout_args", "observation_format"), text, f"{where}.agent_template")
    if player in _TURNS:
        told = "{history}" in text
        meaning = "a turn's text tells each earlier one; ROLL's StepEnvManager: those without a valid action" * told
        draft.put(("rollout_args", "history"), history if told else 0, f"{where}.history_length", meaning)
        if draft.values.get("adv_estimator") == "step_reinforce" and turns != 1:
            meaning = "each turn has the reward of its episode; in ROLL, of itself and the turns behind it"
            draft.meanings["adv_estimator",] = meaning


def _format(draft: Draft, where: str, section: dict[str, Any], history: int) -> str:
    """`agent_template` as `observation_format`, with our names of its places."""
    template = section.get("agent_template")
    places = {"observation": "observation", "current_observation": "observation", "turn_idx": "turn"}
    places |= {"current_step": "turn", "step_count": "turns_done", "actions_left": "turns_left"}
    places |= {"env_instruction": "instruction", "history": "history"}
    values = {name: "{" + ours + "}" for name, ours in places.items()}
    values |= {"max_response_length": str(section.get("max_tokens_per_step")), "suffix": "", "history_length": history}
    try:
        text = str(template).format(**values)
    except (LookupError, ValueError, AttributeError) as error:
        draft.leave_out(where, "refused", f"cannot be filled ({error!r}): the observation stands alone")
        return "{observation}"
    if "{observation}" not in text:
        draft.leave_out(where, "refused", "has no place for the observation, which stands alone")
        return "{observation}"
    return text


def _lengths(draft: Draft, where: str, section: dict[str, Any]) -> None:
    """Writes the limits of a turn and of the job's prompt."""
    sampling = section_at(draft.values, "actor_infer", "generating_args")
    limits = [value for value in (section.get("max_tokens_per_step"), sampling.get("max_new_tokens")) if value]
    if limits and all(isinstance(limit, int) for limit in limits):
        meaning = "of one turn: the smaller of max_tokens_per_step and max_new_tokens, as in ROLL"
        draft.put(("response_length",), min(limits), f"{where}.max_tokens_per_step", meaning)
        sampling.pop("max_new_tokens", None)
    section_at(draft.values, "validation", "generating_args").pop("max_new_tokens", None)
    meaning = "the job's prompts are numbers, which the model does not read"
    draft.put(("prompt_length",), _PROMPT, f"{where}.env_type", meaning)


def leave_out_values(draft: Draft, data: dict[str, Any], keys: list[str]) -> None:
    """Leaves out `keys`, which the job does not know: ROLL's of agentic files, and values that `${...}` names."""
    for key in keys:
        del data[key]
        kind, why = ROLL.data["agentic"].get(key, ("idle", "has an effect only where the file names it by ${...}"))
        draft.leave_out(key, kind, why)
