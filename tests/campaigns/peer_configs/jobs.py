"""Start-up checks of converted files, with the model and data that they name.

Model directories hold the true `config.json` of the models that the files name (models.json) and a small
tokenizer; data files hold a line for every tag that theirs have. No weights: they are read after all checks.
"""

from __future__ import annotations

import copy
import fnmatch
import json
import re
from collections.abc import Iterator
from pathlib import Path, PurePath
from typing import Any

import yaml

from roll_batching.errors import RollBatchingError
from roll_batching.jobs.config import load_config
from roll_batching.jobs.config.diagnostics import ConfigFileError, dotted
from roll_batching.jobs.config.job import JobConfig
from roll_batching.jobs.config.rollout_keys import NEMO_GYM

FACTS = json.loads((Path(__file__).parent / "models.json").read_text(encoding="utf-8"))
ROLES = ("actor_train", "actor_infer", "reference", "critic", "teacher")
JUDGE_URL = "http://127.0.0.1:8000/v1"
"""Stands for the judge's server; the checks do not call it."""
CHAT = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
GYM_URL, ENGINE_URL = "http://127.0.0.1:11000", "http://127.0.0.1:8001"
"""Stand for NeMo-Gym's head server and the engine that its agents call; the checks do not call them."""
_TESTS = {
    "case_type": "check_based",
    "test_case_function": "",
    "test_cases": '[{"stdin": "1", "expected_stdout": "1"}]',
}


class PeerModels:
    """Directories of the models in models.json, made below `folder` as they are asked for."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def path(self, name: str) -> Path | None:
        """Directory of the model `name`; None if its config.json is unknown."""
        name = FACTS["same_as"].get(name, name)
        if name not in FACTS["configs"]:  # a directory of the author's machine that is called as the model
            called = name.rstrip("/").rpartition("/")[2]
            name = next((one for one in FACTS["configs"] if one.rpartition("/")[2] == called), name)
        config = FACTS["configs"].get(name)
        if config is None:
            return None
        path = self._folder / name.replace("/", "--")
        if not path.is_dir():
            path.mkdir(parents=True)
            (path / "config.json").write_text(json.dumps(config))
            _write_tokenizer(path, config)
        return path


_IMAGE_MARKS = {
    "vision_start_token_id": "<|vision_start|>",
    "vision_end_token_id": "<|vision_end|>",
    "image_token_id": "<|image_pad|>",
}


def _write_tokenizer(path: Path, config: dict[str, Any]) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    marks = {mark: config[name] for name, mark in _IMAGE_MARKS.items() if "vision_config" in config and name in config}
    vocabulary = {letter: number for number, letter in enumerate(letters)} | marks
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>", "<|user|>", "<|assistant|>", "<|system|>", *marks])
    if marks:
        (path / "preprocessor_config.json").write_text('{"image_processor_type": "Qwen2VLImageProcessor"}')
    tokenizer.save(str(path / "tokenizer.json"))
    named = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|end|>", "pad_token": "<|end|>"}
    (path / "tokenizer_config.json").write_text(json.dumps({**named, "chat_template": CHAT}))


def model_names(settings: dict[str, Any]) -> set[str]:
    """Models and tokenizers that the settings name."""
    return {section[key] for section, key in _named_models(settings) if section.get(key)}


def is_placeholder(settings: dict[str, Any]) -> bool:
    """Whether the name is a placeholder for the user's model."""
    names = model_names(settings)
    return not names or any(map(is_unnamed, names))


def meant_model(path: PurePath) -> str | None:
    """The model that the file at `path` of a checkout means where it names a placeholder; None: it does not say."""
    return next((one["model"] for one in FACTS["meant"] if fnmatch.fnmatch(str(path), one["files"])), None)


def with_model(settings: dict[str, Any], model: str) -> dict[str, Any]:
    """`settings` with `model` in place of every placeholder."""
    settings = copy.deepcopy(settings)
    for section, key in _named_models(settings):
        if is_unnamed(section.get(key)):
            section[key] = model
    settings.setdefault("pretrain", model)
    return settings


def is_unnamed(name: Any) -> bool:
    """Whether a model's name is a placeholder."""
    return isinstance(name, str) and name.startswith(tuple(FACTS["placeholders"]))


def what_stops(settings: dict[str, Any], models: PeerModels, folder: Path) -> list[str]:
    """Short reasons why the job does not start; empty if it starts."""
    if is_placeholder(settings):
        return ["its model is a placeholder"]
    if unknown := sorted(name for name in model_names(settings) if models.path(name) is None):
        return [f"unknown here: config.json of {name}" for name in unknown]
    (folder / "job.yaml").write_text(yaml.safe_dump(_supplied(settings, models, folder)))
    try:
        _start(load_config(folder / "job.yaml"))
    except ConfigFileError as error:
        return sorted({_short(f"{dotted(one.path)}: {one.message}", folder) for one in error.problems})
    except RollBatchingError as error:
        return [_short(str(error), folder)]
    return []


def _start(job: JobConfig) -> None:
    """Run the checks of `roll-batching train` and its ranks before a process group or a model is made.

    Installed trackers and the number of devices are not checked, because they depend on the machine.
    """
    # Imported here, because they import Megatron, whose warnings the script hides first.
    from roll_batching.jobs.inputs import check_inputs, load_inputs
    from roll_batching.jobs.objectives.from_config import advantages_of, loss_of
    from roll_batching.jobs.rewards.contract import load_reward
    from roll_batching.jobs.rewards.pool import reward_of
    from roll_batching.jobs.rollouts.contract import load_rollout_function
    from roll_batching.jobs.rollouts.prompts import prompts_by_domain

    job.check_runnable()
    reward = reward_of(job)
    for domain in reward.domains if reward is not None else ():
        load_reward(domain.path, domain.arguments)
    if job.rollout_function is not None:
        load_rollout_function(job.rollout_function, job.rollout_args)
    check_inputs(job)
    inputs = load_inputs(job)
    if inputs.prompts is not None and inputs.reward is not None:
        prompts_by_domain(job, inputs.prompts, inputs.reward)
    if job.max_steps:
        loss_of(job)
        if job.task == "grpo":
            advantages_of(job)


def _named_models(settings: dict[str, Any]) -> list[tuple[dict[str, Any], str]]:
    """Sections that may name a model or a tokenizer, each with the key."""
    roles = [((settings.get(role) or {}).get("model_args") or {}, "model_name_or_path") for role in ROLES]
    return [(settings, "pretrain"), (settings.get("tokenizer") or {}, "name_or_path"), *roles]


def _supplied(settings: dict[str, Any], models: PeerModels, folder: Path) -> dict[str, Any]:
    """`settings` with model directories and data files for those that are named or must be filled in."""
    settings = copy.deepcopy(settings)
    for section, key in _named_models(settings):
        if section.get(key):
            section[key] = str(models.path(section[key]))
    data = settings.setdefault("actor_train", {}).setdefault("data_args", {})
    for key in () if "seeds" in data else ("file_name", "eval_file_name"):
        names = data.get(key) or "filled_in.jsonl"
        names = [names] if isinstance(names, str) else names
        data[key] = [str(_write_data(settings, name, folder / f"{key}{number}")) for number, name in enumerate(names)]
    for domain in (settings.get("rewards") or {}).values():
        if domain.get("reward_function") == "llm_judge":
            domain.setdefault("reward_args", {}).setdefault("url", JUDGE_URL)
    if settings.get("rollout_function") == NEMO_GYM:
        settings.setdefault("rollout_args", {}).setdefault("url", GYM_URL)
        engine = settings.setdefault("actor_infer", {}).setdefault("engine_args", {})
        engine.setdefault("urls", [ENGINE_URL])
    settings["output_dir"] = str(folder / "run")
    settings.pop("track_with", None)
    settings.pop("tracker_kwargs", None)
    return settings


def _write_data(settings: dict[str, Any], name: str, path: Path) -> Path:
    """Write a data file like `name`, with one line per tag."""
    path = path.with_suffix(".json" if name.endswith(".json") else ".jsonl")
    stem = Path(name).stem
    lines = [_line(settings, tag) for tag in FACTS["tags_of_files"].get(stem) or _tags(settings)] * 2
    if domain := FACTS["domains_of_files"].get(stem):
        lines = [{**line, "domain": domain} for line in lines]
    whole = json.dumps(lines) if path.suffix == ".json" else "".join(json.dumps(line) + "\n" for line in lines)
    path.write_text(whole)
    return path


def _tags(settings: dict[str, Any]) -> list[str]:
    """Tags of a data file of the user: all tags that rewards score."""
    rewards = (settings.get("rewards") or {}).values()
    judged: Iterator[str] = (tag for one in rewards for tag in one.get("tag_included") or ())
    return list(judged) or ["any"]


def _line(settings: dict[str, Any], tag: str) -> dict[str, Any]:
    data = settings["actor_train"]["data_args"]
    line: dict[str, Any] = {data.get("tag", "tag"): tag, **_TESTS}
    names = ["prompt", "response", "chosen", "rejected"]
    line |= {data.get(name) or {"response": "answer"}.get(name, name): f"{name} 1" for name in names}
    line |= {data[name]: name for name in ("query", "system") if data.get(name)}
    if data.get("messages"):
        turns = [{"role": "user", "content": "prompt 1"}]
        turns += [{"role": "assistant", "content": "1"}] if settings.get("task") == "sft" else []
        line[data["messages"]] = turns
    if data.get("messages") == "responses_create_params.input":  # a line of NeMo-Gym
        params = {"input": line.pop(data["messages"])}
        line |= {"responses_create_params": params, "agent_ref": {"type": "responses_api_agents", "name": "agent"}}
    return line


def _short(text: str, folder: Path) -> str:
    """`text` without folder names and numbers that differ between files."""
    text = " ".join(text.replace(str(folder.parent), "").split())
    if family := re.search(r"model_type '\w+' is not supported", text):
        return family[0]
    return re.sub(r"\d+(\.\d+)?", "N", text)[:150]
