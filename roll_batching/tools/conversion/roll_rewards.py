"""Translates ROLL's reward workers, and selects the prompts that they score."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from roll_batching.jobs.config.diagnostics import dotted
from roll_batching.tools.conversion.draft import Draft
from roll_batching.tools.conversion.foreign_file import section_at
from roll_batching.tools.conversion.roll_defaults import ROLL

REWARD_WORKERS = (
    "no such reward exists here: write a function, and name it in reward_function or rewards; a plain function of the "
    "response and the answer that the worker calls runs as response_and_answer (docs/rewards.md)"
)
_RUN = (
    "is missing: how to run code that the model wrote (docs/rewards.md): subprocess, or a command that runs it in a "
    "container"
)
_REPETITION_PENALTY = 0.5
"""Source: ROLL 8eb27cc, `max_penalty=-0.5` of two reward workers."""
_GRADINGS = ("loose", "soft", "strict")
_NO_GRADING = "is missing: loose, soft or strict, as ROLL's reward_type, which has no default"
_NO_URL = "is missing: the address of a server of the judge's model that you start (vllm serve), http://host:port/v1"
_KEY_VARIABLE = "JUDGE_API_KEY"
_PROMPT = "is a text of ROLL's; the default template asks for YES or NO as well, and reward_args.template is your own"
_SAMPLING = {"max_new_tokens": "max_tokens", "temperature": "temperature", "top_p": "top_p", "top_k": "top_k"}
_OF_UNKNOWN_TAGS = "math_rule"
"""The reward of prompts with unknown tags (ROLL's `update_dataset_domain`)."""
_LINES_READ = 200
"""Lines of a data file that are read for tags."""
_LONGEST_LINE = 1 << 20
_SHORTEST_NAME = 4
"""Fewest letters of a domain or tag to be recognised in a file name."""


def translate_rewards(draft: Draft, data: dict[str, Any]) -> None:
    """Translates supported rewards of `data`; leaves out the others with the files of their prompts."""
    translated = ROLL.data["rewards"]
    kept: dict[str, Any] = {}
    dropped: dict[str, Any] = {}
    for section in ("rewards", "reward"):
        workers = data.pop(section, None)
        if not isinstance(workers, dict):
            continue
        named = {name: item for name, item in workers.items() if isinstance(item, dict) and "worker_cls" in item}
        for name, reward in named.items():
            kind = str(reward["worker_cls"]).rpartition(".")[2]
            if section == "rewards" and kind in translated:
                kept[name] = _reward(draft, name, reward, *translated[kind])
            else:
                draft.leave_out(f"{section}.{name}", "refused", f"{kind}: {REWARD_WORKERS}")
                dropped[name] = reward
        if not named:
            draft.leave_out(section, "refused", REWARD_WORKERS)
    if _OF_UNKNOWN_TAGS in kept and not dropped and kept[_OF_UNKNOWN_TAGS].pop("tag_included", None) is not None:
        why = "is the reward of all prompts whose tag no other reward names, as in ROLL"
        draft.leave_out(f"rewards.{_OF_UNKNOWN_TAGS}.tag_included", "idle", why)
    if kept:
        data["rewards"] = kept
        for role in ("actor_train", "validation"):
            _drop_files(draft, section_at(data, role, "data_args"), f"{role}.data_args.file_name", kept, dropped)


def _reward(draft: Draft, name: str, worker: dict[str, Any], function: str, difference: str) -> dict[str, Any]:
    """The section of one supported reward."""
    here: dict[str, Any] = {"reward_function": function}
    draft.origins["rewards", name, "reward_function"] = f"rewards.{name}.worker_cls"
    draft.meanings["rewards", name, "reward_function"] = f"{function} {difference}"
    read = {"worker_cls", *_put_arguments(draft, name, worker, here)}
    for key, value in worker.items():
        where = f"rewards.{name}.{key}"
        if key == "tag_included":
            here[key] = value
        elif key == "query_filter_config":
            draft.leave_out(
                where,
                "refused",
                "dynamic_sampling replaces groups with equal rewards; it has no thresholds for their mean",
            )
        elif key not in read:
            draft.leave_out(where, "idle", "rewards run in separate processes, reward_workers of them")
    return here


def _put_arguments(draft: Draft, name: str, worker: dict[str, Any], here: dict[str, Any]) -> set[str]:
    """Writes `reward_args` of a reward into `here`; returns the keys of `worker` that they hold."""
    read: set[str] = set()
    kind = str(worker["worker_cls"]).rpartition(".")[2]

    def put(key: str, value: Any, origin: str = "worker_cls", meaning: str = "") -> None:
        here.setdefault("reward_args", {})[key] = value
        path = ("rewards", name, "reward_args", key)
        draft.origins[path] = f"rewards.{name}.{origin}"
        if meaning:
            draft.meanings[path] = meaning
        read.add(origin)

    if here["reward_function"] == "code_tests":
        put("all_or_nothing", True)
        if worker.get("use_local") is True:  # only if the file says so: ROLL's default does not permit it here
            put("run", "subprocess", "use_local", "code that the model wrote runs on this machine, in a sandbox")
        else:
            draft.missing.append(f"rewards.{name}.reward_args.run: {_RUN}")
    if kind in ("GeneralRuleRewardWorker", "CrossThinkQARuleRewardWorker"):
        put("repetition_penalty", _REPETITION_PENALTY, meaning="as in ROLL, where it is fixed")
    if kind == "CrossThinkQARuleRewardWorker":
        if worker.get("reward_type") in _GRADINGS:
            put("grading", worker["reward_type"], "reward_type")
        else:
            draft.missing.append(f"rewards.{name}.reward_args.grading: {_NO_GRADING}")
            if "reward_type" in worker:
                draft.leave_out(f"rewards.{name}.reward_type", "refused", "is none of loose, soft and strict: set one")
                read.add("reward_type")
        if worker.get("response_length_penalty_coef"):
            why = "ROLL measures the padded length, which is the same for all responses"
            draft.leave_out(f"rewards.{name}.response_length_penalty_coef", "refused", why)
            read.add("response_length_penalty_coef")
    if kind == "LLMJudgeRewardWorker":
        _put_judge(draft, name, worker, put)
    return read


def _put_judge(draft: Draft, name: str, worker: dict[str, Any], put: Callable[..., None]) -> None:
    """Writes the arguments of a judge with `put`. The API key is not kept."""
    model_key = "judge_model_name" if worker.get("judge_model_name") else "model_args"
    model = worker.get("judge_model_name") or section_at(worker, "model_args").get("model_name_or_path")
    if isinstance(model, str):
        put("model", model, model_key)
    else:
        draft.missing.append(f"rewards.{name}.reward_args.model: name of the judge's model")
    url = worker.get("judge_api_url")
    if isinstance(url, str) and url and not set("@?") & set(url):
        put("url", url, "judge_api_url")
    else:
        draft.missing.append(f"rewards.{name}.reward_args.url: {_NO_URL}")
    if worker.get("judge_api_key"):
        put("auth_variable", _KEY_VARIABLE, "judge_api_key", "the key is not kept: set the variable of this name")
    if worker.get("judge_prompt"):
        draft.leave_out(f"rewards.{name}.judge_prompt", "refused", _PROMPT)
    sampling = section_at(worker, "generating_args")
    request = {ours: sampling[key] for key, ours in _SAMPLING.items() if isinstance(sampling.get(key), (int, float))}
    if request and worker.get("judge_model_type") != "api":  # ROLL sends none of them to a URL
        put("request", request, "generating_args")


def _drop_files(
    draft: Draft, texts: dict[str, Any], where: str, kept: Mapping[str, Any], dropped: Mapping[str, Any]
) -> None:
    """Leaves out data files whose prompts all belong to dropped rewards, by the tags of their lines, else by name."""
    files = texts.get("file_name")
    if not isinstance(files, list) or not all(isinstance(file, str) for file in files):
        return
    ours, theirs = _names(kept), _names(dropped)
    key = texts.get("tag") or "tag"
    remaining = []
    for file in files:
        tags = set(_tags(Path(file), str(key)))
        by_name = any(_has(file, name) for name in theirs) and not any(_has(file, name) for name in ours)
        if (tags <= theirs) if tags else by_name:
            origin = f"its prompts are tagged {', '.join(sorted(tags))}" if tags else "its name is that of their domain"
            draft.leave_out(f"{where} ({file})", "refused", f"{origin}, and their reward is left out")
        else:
            remaining.append(file)
    if remaining:  # else keep the key: a job without any file is no better
        texts["file_name"] = remaining


def _names(rewards: Mapping[str, Any]) -> set[str]:
    """The names of all domains in `rewards`, and all tags that these include."""
    tag_lists = (reward.get("tag_included") for reward in rewards.values())
    return set(rewards) | {str(tag) for tags in tag_lists if isinstance(tags, list) for tag in tags}


def _has(file: str, name: str) -> bool:
    """Whether the file name contains `name`, ignoring case and all but letters and digits; never for short names."""
    wanted = "".join(letter for letter in name.lower() if letter.isalnum())
    return len(wanted) >= _SHORTEST_NAME and wanted in "".join(
        letter for letter in Path(file).stem.lower() if letter.isalnum()
    )


def _tags(path: Path, key: str) -> Iterator[str]:
    """Domains or tags of the first prompts of a file; empty if it cannot be read."""
    if not path.is_file():  # opening a pipe would block
        return
    try:
        with path.open(encoding="utf-8") as file:
            for _ in range(_LINES_READ):
                record = json.loads(file.readline(_LONGEST_LINE))
                value = record.get("domain") or record.get(key)
                if isinstance(value, str):
                    yield value
    except (OSError, ValueError, AttributeError):
        return


def divide_prompts(draft: Draft) -> None:
    """Converts `domain_interleave_probs` to the remaining domains, and sets `long_prompts: drop`."""
    texts, rewards = section_at(draft.values, "actor_train", "data_args"), draft.values.get("rewards") or {}
    shares = texts.get("domain_interleave_probs")
    if not isinstance(shares, dict):
        return
    path = ("actor_train", "data_args", "domain_interleave_probs")
    kept = {name: share for name, share in shares.items() if name in rewards}
    if not kept:
        del texts["domain_interleave_probs"]
        why = "divides prompts by domains of `rewards` that are all left out: prompts are drawn regardless of domain"
        draft.leave_out(dotted(path), "refused", why)
    elif len(kept) < len(shares) and all(isinstance(share, (int, float)) and share > 0 for share in kept.values()):
        total = sum(kept.values())  # invalid parts are left to the loader, which reports them
        meaning = f"parts of the remaining domains, over their sum; in ROLL, of {', '.join(shares)}"
        draft.put(path, {name: round(share / total, 4) for name, share in kept.items()}, meaning=meaning)
    meaning = "as in ROLL, which also leaves out prompts of 5 tokens or fewer"
    draft.put(("actor_train", "data_args", "long_prompts"), "drop", "prompt_length", meaning)
