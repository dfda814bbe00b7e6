"""NeMo-RL's sections `data` and `env`: local files of texts or pairs, and supported rewards."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from roll_batching.jobs.config.rollout_keys import NEMO_GYM
from roll_batching.tools.conversion.foreign_file import REWARDS, STOP, ForeignFile
from roll_batching.tools.conversion.nemo_rl_file import RL_TASKS

_DATA = ("actor_train", "data_args")
_TEXTS = {"prompt": ("input_key", "input"), "response": ("output_key", "output")}
_PAIRS = {
    "prompt": ("prompt_key", "prompt"),
    "chosen": ("chosen_key", "chosen"),
    "rejected": ("rejected_key", "rejected"),
}
_CHATS = {"messages": ("chat_key", "messages"), "tools": ("tool_key", "tools")}
_GYM = {"messages": ("responses_create_params", "responses_create_params.input")}
_KINDS: Mapping[str, Mapping[str, Mapping[str, tuple[str, str]]]] = {
    "grpo": {"ResponseDataset": _TEXTS, "NemoGymDataset": _GYM},
    "distill": {"ResponseDataset": _TEXTS, "NemoGymDataset": _GYM},
    "sft": {"ResponseDataset": _TEXTS, "openai_format": _CHATS},
    "dpo": {"BinaryPreferenceDataset": _PAIRS},
}
"""By task and class of local data: our keys, each with NeMo-RL's key for it and that key's default."""
_PROCESSORS = {
    **dict.fromkeys(RL_TASKS, ("math_hf_data_processor", "nemo_gym_data_processor")),
    "sft": ("sft_processor",),
    "dpo": (),
}
"""Processors that do the same as this package: a chat through the tokenizer's template."""
_WITH_IMAGES = "vlm_hf_data_processor"
"""NeMo-RL's processor of prompts with images."""
_GYM_SECONDS = 3600.0
_READ = (".json", ".jsonl", ".parquet")
_RANKED = (
    "PreferenceDataset: ranked completions are not read; write prompt, chosen and rejected, one pair a line "
    "(actor_train.data_args)"
)
_PROMPT_FILE = "NeMo-RL puts its text around every prompt: write it into the lines of your files"
_VERIFIERS: Mapping[str, tuple[dict[str, Any], str]] = {
    "hf_math_verify": ({}, "the same library, which searches the whole response for the answer"),
    "dapo_math_verify": (
        {"after": "Answer:"},
        "compares the text after the last `Answer:` as mathematics; NeMo-RL: by spelling, in the last 300 characters",
    ),
}
"""By verifier of NeMo-RL: reward_args of math_verify, and the difference."""
_ENVIRONMENTS = {
    "math_multi_reward": "GDPO normalises each of several rewards of a response, and rewards here are one number",
    "reward_model": "a reward model scores responses: serve it, and name a reward function that asks the server",
}
"""By environment of NeMo-RL, why it is not converted."""
_IDLE = {
    "seed": "belongs to splits of a file, which do not exist here",
    "subset": "belongs to data sets on the Hub",
    "split": "belongs to data sets on the Hub",
    "download_dir": "belongs to data sets on the Hub",
}
_WRITTEN_BY_TEMPLATE = {
    "add_bos": "only the chat template decides how a text begins; NeMo-RL adds a missing first token",
    "add_eos": "only the chat template decides how a text ends; NeMo-RL adds a missing end token",
}


def convert_data(file: ForeignFile, task: str) -> None:
    """Converts the local files of `data` and the keys of their lines; the user fills in data sets of the Hub."""
    default = file.take("data.default") or {}
    first = file.peek("data.train")
    first = first[0] if isinstance(first, list) and first else first
    environment = {**default, **first}.get("env_name") if isinstance(first, dict) else default.get("env_name")
    if default.get("prompt_file"):
        file.draft.leave_out("data.default.prompt_file", "refused", _PROMPT_FILE)
    trained = _files(file, task, "train", default, "file_name", {})
    held_out = _files(file, task, "validation", default, "eval_file_name", trained)
    keys = trained or held_out
    for ours, (value, origin) in keys.items():
        file.draft.put((*_DATA, ours), value, origin)
    if not keys:
        kind = _GYM if task in RL_TASKS and _uses_gym(file, environment) else next(iter(_KINDS[task].values()))
        keys = {ours: (plain, "data.train") for ours, (_, plain) in kind.items()}
        for ours, (theirs, plain) in kind.items():
            meaning = f"key of the lines in the file to be filled in; NeMo-RL: {theirs}"
            file.draft.put((*_DATA, ours), plain, "data.train", meaning)
    if default.get("processor") == _WITH_IMAGES and task in ("grpo", "sft"):
        meaning = "key of the images of a line; NeMo-RL takes them out of its data sets"
        file.draft.put((*_DATA, "images"), "images", "data.default.processor", meaning)
    template = file.take("policy.tokenizer.chat_template", "default")
    if "messages" not in keys:
        meaning = "texts are turns of a chat, which go through the tokenizer's own template"
        if template is None:
            meaning = "the response follows the prompt as it is, and the end token follows both"
        key = "data" if template is not None else "policy.tokenizer.chat_template"
        file.draft.put((*_DATA, "chat"), template is not None, key, meaning)
    if task in RL_TASKS:
        _reward(file, environment)
    _common_keys(file, task)


def _files(
    file: ForeignFile, task: str, which: str, default: Mapping[str, Any], ours: str, before: dict[str, tuple[Any, str]]
) -> dict[str, tuple[Any, str]]:
    """Sets data_args.OURS to the files of `data.WHICH`; returns the keys of their lines, each with its origin.

    `before`: keys of files that were converted earlier; all files must have the same ones. If no file can be read (its
    name may be an unset variable), the keys are those of the first file.
    """
    datasets = file.peek(f"data.{which}")
    names: list[str] = []
    keys: dict[str, tuple[Any, str]] = {}
    unread: dict[str, tuple[Any, str]] = {}
    for number, data_set in enumerate(datasets if isinstance(datasets, list) else [datasets]):
        if not isinstance(data_set, dict):
            continue
        where = f"data.{which}.{number}" if isinstance(datasets, list) else f"data.{which}"
        merged = {**default, **data_set}
        path, line_keys, why = _check_data_set(task, merged)
        wanted = {key: value for key, (value, _) in (keys or before or unread).items()}
        if line_keys and wanted and line_keys != wanted:
            other = f"its lines have the keys {line_keys}, but all files are read by the same keys, {wanted}"
            why = f"{why}; {other}" if why else other
        kinds = _KINDS[task].get(_kind(task, merged), {})
        named = {key: (value, f"{where}.{kinds[key][0]}") for key, value in line_keys.items()}
        if line_keys:
            _leave_out_details(file, task, where, data_set, merged)
        if why:
            file.draft.leave_out(where, "refused", why)
            unread = unread or named
            continue
        names.append(path)
        keys = named
    if names:
        file.draft.put((*_DATA, ours), names[0] if len(names) == 1 else names, f"data.{which}.data_path")
    file.take(f"data.{which}")
    return keys or unread


def _kind(task: str, data_set: Mapping[str, Any]) -> str:
    return str(data_set.get("dataset_name") or next(iter(_KINDS[task])))


def _check_data_set(task: str, data_set: Mapping[str, Any]) -> tuple[str, dict[str, Any], str]:
    """(Path, keys of the lines by our keys, reason why the data set cannot be read or "")."""
    path, kind = str(data_set.get("data_path") or ""), _kind(task, data_set)
    if kind == "PreferenceDataset" and task == "dpo":
        return path, {}, _RANKED
    if kind not in _KINDS[task]:
        reader = "is fetched and rewritten by NeMo-RL" if not path else "is read by code of NeMo-RL's"
        return path, {}, f"{kind} {reader}: write its lines as JSONL, and name them in actor_train.data_args"
    keys = {ours: data_set.get(theirs) or default for ours, (theirs, default) in _KINDS[task][kind].items()}
    suffix = Path(path).suffix
    cure = "save its lines as JSONL or Parquet, and name that file in actor_train.data_args"
    why = ""
    if not path:
        why = "data_path is missing: name a JSONL or Parquet file, or a saved folder, in actor_train.data_args"
    elif suffix in (".arrow", ".csv", ".txt"):
        why = f"{path} is a {suffix} file: {cure}"
    elif suffix not in _READ and not Path(path).is_dir():
        why = f"{path} is no local file or folder, perhaps a data set on the Hub: {cure}"
    return path, keys, why


def _leave_out_details(
    file: ForeignFile, task: str, where: str, section: Mapping[str, Any], merged: Mapping[str, Any]
) -> None:
    """Leaves out the other keys of a converted data set; `merged` is its `section` over `data.default`."""
    if section.get("prompt_file"):
        file.draft.leave_out(f"{where}.prompt_file", "refused", _PROMPT_FILE)
    if merged.get("system_prompt_file") or merged.get("system_key") or merged.get("system_prompt"):
        why = "write the system message into a key of the lines, and name that key in actor_train.data_args.system"
        file.draft.leave_out(f"{where}.system_prompt_file", "refused", why)
    if merged.get("processor") not in (None, *_PROCESSORS[task]):
        why = f"{merged['processor']}: texts are only processed by the chat template here"
        file.draft.leave_out(f"{where}.processor", "refused", why)
    if merged.get("split_validation_size"):
        why = "files are not split: name a file of held-out texts in eval_file_name"
        file.draft.leave_out(f"{where}.split_validation_size", "refused", why)
    for name, why in _IDLE.items():
        if merged.get(name) is not None:
            file.draft.leave_out(f"{where}.{name}", "idle", why)


def _reward(file: ForeignFile, environment: Any) -> None:
    """Converts the environment that the data names to a reward function; leaves out unsupported ones."""
    if _uses_gym(file, environment):
        _gym(file)
        return
    math = file.peek("env.math")
    if environment != "math" or not isinstance(math, dict):
        why = _ENVIRONMENTS.get(str(environment), REWARDS)
        file.draft.leave_out("data.default.env_name", "refused", f"{environment}: {why}")
        return
    verifier, library = math.get("verifier_type") or "math", math.get("math_verify_impl") or "hf_math_verify"
    if verifier != "math" or library not in _VERIFIERS:
        file.draft.leave_out("env.math", "refused", f"{library if verifier == 'math' else verifier}: {REWARDS}")
        return
    arguments, meaning = _VERIFIERS[library]
    file.draft.put(("reward_function",), "math_verify", "env.math.math_verify_impl", meaning)
    if arguments:
        file.draft.put(("reward_args",), arguments, "env.math.math_verify_impl", meaning)
    file.expect_off("env.math.stop_strings", why=STOP)
    file.take("env.math")
    for name in list(file.peek("env") or {}):
        file.take(f"env.{name}")
        file.draft.leave_out(f"env.{name}", "idle", "no prompts of data.train are of this environment")


def _uses_gym(file: ForeignFile, environment: Any) -> bool:
    return environment == "nemo_gym" or bool(file.peek("env.should_use_nemo_gym"))


def _gym(file: ForeignFile) -> None:
    """Converts NeMo-Gym to its rollout function. The user starts Gym, with the section `env.nemo_gym`."""
    key = "env.should_use_nemo_gym"
    meaning = "Gym and the engine are started by hand (docs/rollouts.md); NeMo-RL starts both"
    file.draft.put(("rollout_function",), NEMO_GYM, key, meaning)
    meaning = "seconds of a whole rollout; NeMo-RL has no limit"
    file.draft.put(("rollout_function_timeout",), _GYM_SECONDS, key, meaning)
    gym = file.take("env.nemo_gym") or {}
    if gym.get("effort_levels"):
        why = "rewards are the agents' own, and not changed by lengths"
        file.draft.leave_out("env.nemo_gym.effort_levels", "refused", why)
    why = "is Gym's configuration: start Gym with it"
    file.draft.leave_out("env.nemo_gym", "idle", why)
    if file.take("env.should_mask_flagged_samples") is not False:
        why = "samples that an environment flags are trained on; mark/flagged is their share"
        file.draft.leave_out("env.should_mask_flagged_samples", "refused", why)
    for name in list(file.peek("env") or {}):
        if file.take(f"env.{name}") and name != "should_use_nemo_gym":
            file.draft.leave_out(f"env.{name}", "idle", "is not read by NeMo-Gym's agents")


def _common_keys(file: ForeignFile, task: str) -> None:
    """Takes the keys of `data` that concern all data sets; leaves out those without a counterpart."""
    file.take("data.max_input_seq_length")
    if file.take("data.shuffle") is False:
        file.draft.leave_out("data.shuffle", "refused", "texts are shuffled anew in every epoch")
    file.take("data.num_workers")
    for name, why in _WRITTEN_BY_TEMPLATE.items():
        if file.take(f"data.{name}"):
            file.draft.leave_out(f"data.{name}", "refused", why)
    has_header = file.take("data.add_generation_prompt")
    if task == "sft":
        # With the key NeMo-RL does not train on the header either, so leaving it out changes nothing.
        why = "the header of the assistant's turn is never trained on"
        file.draft.leave_out("data.add_generation_prompt", "idle" if has_header else "refused", why)
