"""Computes digests of all that decides how a job continues; checkpoints save them, and resuming compares them."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from roll_batching.errors import CheckpointError
from roll_batching.jobs.config import JobConfig
from roll_batching.jobs.config.plain_data import without_secrets
from roll_batching.jobs.config.task_rules import uses_teacher
from roll_batching.jobs.inputs import JobInputs
from roll_batching.jobs.observe.run_files import iterate_leaves
from roll_batching.jobs.rewards.pool import reward_of
from roll_batching.jobs.texts.tokenizers import Tokenizer
from roll_batching.strategy.adapter_checkpoint import read_directory

Digests = Mapping[str, Mapping[str, str]]
"""Digests by part of a job (tokenizer, data, reward code, rollout code, settings, teacher), then by name."""
_WITHOUT_EFFECT = {
    *("exp_name", "output_dir", "resume_from_checkpoint", "verify_checkpoint", "system_envs"),
    *("save_steps", "save_total_limit", "async_save", "export_model", "rollout_samples", "logging_steps"),
    *("track_with", "tracker_kwargs", "tokenizer", "device_memory_limit"),
}
"""Keys that do not change how a run continues, or whose files are compared instead (tokenizer)."""
_OF_A_MACHINE = {"output_dir", "system_envs", "track_with", "tracker_kwargs"}
_PATHS = ("file_name", "eval_file_name", "vocabulary_file", "name_or_path")
"""Keys, and last parts of keys, that may differ between machines; `JobContext` compares the files' contents."""
_SHOWN = 12
_LONGEST = 100
"""Characters of a value in an error."""
_HEX = 16


def digests_of(
    config: JobConfig, inputs: JobInputs, teacher: Mapping[str, str] | None = None
) -> dict[str, dict[str, str]]:
    """Digests of all but the weights that decides how the job continues; `teacher`: from `teacher_digests`."""
    texts = {"learnt texts": inputs.corpus, "prompts": inputs.prompts, "held-out data": inputs.heldout}
    texts["held-out data"] = texts["held-out data"] or inputs.validation
    rewards = reward_of(config)
    return {
        "tokenizer": dict(inputs.tokenizer.parts),
        "data": {name: part.record_fingerprint for name, part in texts.items() if part is not None},
        "reward code": _code_digests([] if rewards is None else [domain.path for domain in rewards.domains]),
        "rollout code": _code_digests([] if config.rollout_function is None else [config.rollout_function]),
        "teacher": dict(teacher or {}),
        "settings": {path: _digest(value) for path, value in settings_of(config).items()},
    }


def settings_of(config: JobConfig) -> dict[str, Any]:
    """The settings that decide how the job continues, by path; secrets are replaced by a placeholder."""
    settings = config.model_dump(mode="json", exclude_defaults=True, exclude=_WITHOUT_EFFECT)
    return dict(iterate_leaves(without_secrets(settings))) | dict.fromkeys(config.resolved_caps, "auto")


def shared_settings(config: JobConfig) -> dict[str, str]:
    """The settings that all ranks must share, by path, as text; secrets are replaced by a placeholder."""
    settings = config.model_dump(mode="json", exclude_defaults=True, exclude=_OF_A_MACHINE)
    leaves = iterate_leaves(without_secrets(settings))
    texts = {path: repr(value) for path, value in leaves if path.rpartition(".")[2] not in _PATHS}
    return {path: text if len(text) <= _LONGEST else f"digest {_digest(text)}" for path, text in texts.items()}


def teacher_digests(config: JobConfig, group: Any) -> dict[str, str]:
    """Digests of the files of a job's teacher by name; empty without one. Collective."""
    if not uses_teacher(config):
        return {}
    assert config.teacher is not None
    sizes, digests = read_directory(str(config.teacher.model_args.model_name_or_path), group)
    return {name: _digest([sizes[name], digests[name]]) for name in sizes}


def check_tokenizer(saved: Digests, tokenizer: Tokenizer, path: Path) -> None:
    """Raises CheckpointError when the vocabulary differs from that of the job that wrote the checkpoint `path`."""
    before, now = saved.get("tokenizer", {}).get("vocabulary"), tokenizer.parts["vocabulary"]
    if before is not None and before != now:
        raise CheckpointError(
            f"{path} was trained with another vocabulary: the same token id is another text here, so its weights "
            "cannot be used. Set the tokenizer of that run (tokenizer.vocabulary, vocabulary_file or "
            "name_or_path), or start a new run"
        )


def changes(saved: Digests, current: Digests) -> list[str]:
    """Allowed differences from the job that wrote a checkpoint, as clauses of a sentence."""
    clauses = []
    for part, clause in (
        ("tokenizer", "the tokenizer's {}"),
        ("data", "{} (some lines, or keys beside their texts)"),
        ("reward code", "the code of the reward {}"),
        ("rollout code", "the code of the rollout function {}"),
        ("teacher", "the teacher's files {}"),
        ("settings", "{}"),
    ):
        if part not in saved:  # an earlier version's
            continue
        before, now = saved[part], current[part]
        names = sorted(name for name in before.keys() | now.keys() if before.get(name) != now.get(name))
        if names:
            rest = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
            clauses.append(clause.format(", ".join(names[:_SHOWN]) + rest))
    return clauses


def _code_digests(paths: Iterable[str]) -> dict[str, str]:
    """Digests of the files of functions, by `package.module:function`; missing files are left out.

    Files are located without an import: reward functions are imported by their own processes only.
    """
    digests = {}
    for path in paths:
        module = path.partition(":")[0].split(".")
        for folder in sys.path:
            base = Path(folder or ".", *module)  # "" stands for the working directory
            candidates = (base.with_suffix(".py"), base / "__init__.py")
            file = next(filter(Path.is_file, candidates), None)
            if file is not None:
                digests[path] = hashlib.sha256(file.read_bytes()).hexdigest()[:_HEX]
                break
    return digests


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=repr).encode()).hexdigest()[:_HEX]
