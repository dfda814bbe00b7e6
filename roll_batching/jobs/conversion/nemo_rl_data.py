"""NeMo-RL's sections `data` and `env`: local files of texts or pairs, and rewards that exist here."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from roll_batching.jobs.conversion.nemo_rl_given import REWARDS, Given

_DATA = ("actor_train", "data_args")
_TEXTS = {"prompt": ("input_key", "input"), "response": ("output_key", "output")}
_PAIRS = {
    "prompt": ("prompt_key", "prompt"),
    "chosen": ("chosen_key", "chosen"),
    "rejected": ("rejected_key", "rejected"),
}
_CHATS = {"messages": ("chat_key", "messages")}
_KINDS: Mapping[str, Mapping[str, Mapping[str, tuple[str, str]]]] = {
    "grpo": {"ResponseDataset": _TEXTS},
    "sft": {"ResponseDataset": _TEXTS, "openai_format": _CHATS},
    "dpo": {"BinaryPreferenceDataset": _PAIRS},
}
"""By task and class of local data: our keys, each with the key that names it there and what that is unsaid."""
_PROCESSORS = {"grpo": ("math_hf_data_processor",), "sft": ("sft_processor",), "dpo": ()}
"""What makes tokens of them as is done here: a chat through the tokenizer's template."""
_READ = (".json", ".jsonl", ".parquet")
_RANKED = (
    "PreferenceDataset: ranked completions are not read; write prompt, chosen and rejected, one pair a line "
    "(actor_train.data_args)"
)
_AROUND_PROMPTS = "its words stand around every prompt there: write them into the lines of your files"
_VERIFIERS: Mapping[str, tuple[dict[str, Any], str]] = {
    "hf_math_verify": ({}, "the same library, which looks for the answer in the whole response"),
    "dapo_math_verify": (
        {"after": "Answer:"},
        "what follows the last `Answer:`, compared as mathematics; there, by its spelling, in the last 300 characters",
    ),
}
"""NeMo-RL's ways to judge an answer: reward_args of math_verify, and what is different."""
_IDLE = {
    "seed": "divided the texts; there is no such division here",
    "subset": "belongs to data sets on the Hub",
    "split": "belongs to data sets on the Hub",
    "download_dir": "belongs to data sets on the Hub",
}
_WRITTEN_BY_TEMPLATE = {
    "add_bos": "the chat template alone says what a text begins with; there, a missing first token is added",
    "add_eos": "the chat template alone says what a text ends with; there, a missing end token is added",
}


def data(given: Given, task: str) -> None:
    """Files of `data`, with the keys of their lines. What only has a name on the Hub is left to be filled in."""
    default = given.take("data.default") or {}
    first = given.peek("data.train")
    first = first[0] if isinstance(first, list) and first else first
    environment = {**default, **first}.get("env_name") if isinstance(first, dict) else default.get("env_name")
    if default.get("prompt_file"):
        given.draft.leave_out("data.default.prompt_file", "refused", _AROUND_PROMPTS)
    trained = _files(given, task, "train", default, "file_name", {})
    held_out = _files(given, task, "validation", default, "eval_file_name", trained)
    keys = trained or held_out
    for ours, (value, origin) in keys.items():
        given.draft.put((*_DATA, ours), value, origin)
    if not keys:
        for ours, (theirs, plain) in next(iter(_KINDS[task].values())).items():
            text = f"the key of the lines that you write; {theirs} names it there"
            given.draft.put((*_DATA, ours), plain, "data.train", text)
    template = given.take("policy.tokenizer.chat_template", "default")
    if "messages" not in keys:
        text = "texts are turns of a chat, which go through the tokenizer's own template"
        if template is None:
            text = "the response follows the prompt as it is, and the end token follows both"
        key = "data" if template is not None else "policy.tokenizer.chat_template"
        given.draft.put((*_DATA, "chat"), template is not None, key, text)
    if task == "grpo":
        text = "longer prompts are left out; there, they take a place in the batch that bears no loss"
        given.draft.put((*_DATA, "long_prompts"), "drop", "data.max_input_seq_length", text)
        _reward(given, environment)
    _around(given, task)


def _files(
    given: Given, task: str, which: str, default: Mapping[str, Any], ours: str, before: dict[str, tuple[Any, str]]
) -> dict[str, tuple[Any, str]]:
    """Puts the files of `data.WHICH` at data_args.OURS; the keys of their lines, each with the key that says so."""
    given_sets = given.peek(f"data.{which}")
    names: list[str] = []
    keys: dict[str, tuple[Any, str]] = {}
    for number, one in enumerate(given_sets if isinstance(given_sets, list) else [given_sets]):
        if not isinstance(one, dict):
            continue
        where = f"data.{which}.{number}" if isinstance(given_sets, list) else f"data.{which}"
        merged = {**default, **one}
        path, found, why = _local(task, merged)
        if not why and found != (wanted := {key: value for key, (value, _) in (keys or before or {}).items()} or found):
            why = f"its lines have the keys {found}, and all files are read alike, here by {wanted}"
        if why:
            given.draft.leave_out(where, "refused", why)
            continue
        names.append(path)
        kinds = _KINDS[task][_kind(task, merged)]
        keys = {key: (value, f"{where}.{kinds[key][0]}") for key, value in found.items()}
        _said_of(given, task, where, one, merged)
    if names:
        given.draft.put((*_DATA, ours), names[0] if len(names) == 1 else names, f"data.{which}.data_path")
    given.take(f"data.{which}")
    return keys


def _kind(task: str, one: Mapping[str, Any]) -> str:
    return str(one.get("dataset_name") or next(iter(_KINDS[task])))


def _local(task: str, one: Mapping[str, Any]) -> tuple[str, dict[str, Any], str]:
    """(path, keys of its lines by ours, why it cannot be read) of one data set."""
    path, kind = str(one.get("data_path") or ""), _kind(task, one)
    if kind == "PreferenceDataset" and task == "dpo":
        return path, {}, _RANKED
    if kind not in _KINDS[task]:
        made = "is fetched and rewritten by NeMo-RL" if not path else "is read by code of NeMo-RL's"
        return path, {}, f"{kind} {made}: write its lines as JSONL, and name them in actor_train.data_args"
    suffix = Path(path).suffix
    if not path or (suffix not in _READ and not Path(path).is_dir()):
        what = f"a {suffix} file" if suffix in (".arrow", ".csv", ".txt") else "a data set on the Hub, or not here"
        return path, {}, f"{path or 'data_path'} is {what}: JSONL, Parquet and saved folders are read"
    keys = {ours: one.get(theirs) or plain for ours, (theirs, plain) in _KINDS[task][kind].items()}
    return path, keys, ""


def _said_of(given: Given, task: str, where: str, own: Mapping[str, Any], one: Mapping[str, Any]) -> None:
    """What else is said of a data set that is kept: in its `own` section, or in that of all (`one` has both)."""
    if own.get("prompt_file"):
        given.draft.leave_out(f"{where}.prompt_file", "refused", _AROUND_PROMPTS)
    if one.get("system_prompt_file") or one.get("system_key") or one.get("system_prompt"):
        text = "write what the system says into a key of the lines, and name it in actor_train.data_args.system"
        given.draft.leave_out(f"{where}.system_prompt_file", "refused", text)
    if one.get("processor") not in (None, *_PROCESSORS[task]):
        text = f"{one['processor']}: what is done to texts here is the chat template"
        given.draft.leave_out(f"{where}.processor", "refused", text)
    if one.get("split_validation_size"):
        text = "a part of the texts is not held out: name a file of its own in eval_file_name"
        given.draft.leave_out(f"{where}.split_validation_size", "refused", text)
    for name, why in _IDLE.items():
        if one.get(name) is not None:
            given.draft.leave_out(f"{where}.{name}", "idle", why)


def _reward(given: Given, environment: Any) -> None:
    """The reward of the data's environment, where it exists here."""
    math = given.peek("env.math")
    if environment != "math" or not isinstance(math, dict):
        given.draft.leave_out("data.default.env_name", "refused", f"{environment}: {REWARDS}")
        return
    verifier, by = math.get("verifier_type") or "math", math.get("math_verify_impl") or "hf_math_verify"
    if verifier != "math" or by not in _VERIFIERS:
        given.draft.leave_out("env.math", "refused", f"{by if verifier == 'math' else verifier}: {REWARDS}")
        return
    arguments, text = _VERIFIERS[by]
    given.draft.put(("reward_function",), "math_verify", "env.math.math_verify_impl", text)
    if arguments:
        given.draft.put(("reward_args",), arguments, "env.math.math_verify_impl", text)
    given.off("env.math.stop_strings", why="a response ends at the tokenizer's end token, or the model's stop tokens")
    given.take("env.math")
    for name in list(given.peek("env") or {}):
        given.take(f"env.{name}")
        given.draft.leave_out(f"env.{name}", "idle", "no prompts of data.train are of this environment")


def _around(given: Given, task: str) -> None:
    """What `data` says of all sets."""
    given.take("data.max_input_seq_length")
    if given.take("data.shuffle") is False:
        given.draft.leave_out("data.shuffle", "refused", "texts are drawn in shuffled order, anew in every epoch")
    given.take("data.num_workers")
    for name, why in _WRITTEN_BY_TEMPLATE.items():
        if given.take(f"data.{name}"):
            given.draft.leave_out(f"data.{name}", "refused", why)
    opened = given.take("data.add_generation_prompt")
    if task == "sft":
        text = "what opens the assistant's turn (its header) is never learnt"
        given.draft.leave_out("data.add_generation_prompt", "idle" if opened else "refused", text)
