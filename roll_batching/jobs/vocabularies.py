"""Comparison of the vocabularies of teacher and critic with the policy's: both read its token ids."""

from __future__ import annotations

from roll_batching.errors import ConfigError
from roll_batching.huggingface.directory import find_directory
from roll_batching.jobs.config import JobConfig
from roll_batching.jobs.config.critic_rules import uses_critic
from roll_batching.jobs.config.teacher_rules import uses_teacher
from roll_batching.jobs.config.worker import WorkerConfig
from roll_batching.jobs.texts.tokenizers import HFTokenizer, Tokenizer

_FILES = ("tokenizer.json", "tokenizer_config.json")


def check_vocabularies(config: JobConfig, tokenizer: Tokenizer) -> None:
    """Raises ConfigError if the directory of teacher or critic gives ids to other tokens than `tokenizer`.

    Directories without a tokenizer are not compared.
    """
    if not isinstance(tokenizer, HFTokenizer):
        return
    if uses_teacher(config):
        _check("teacher", config.teacher, tokenizer, "distillation compares probabilities by id", "that of the student")
    if uses_critic(config):
        _check("critic", config.critic, tokenizer, "the critic reads the policy's ids", "that of the policy")


def _check(name: str, role: WorkerConfig | None, tokenizer: HFTokenizer, reason: str, other: str) -> None:
    model = None if role is None else role.model_args.model_name_or_path
    folder = None if model is None else find_directory(model)
    if folder is None or not any((folder / file).is_file() for file in _FILES):
        return
    if HFTokenizer(folder).parts["vocabulary"] != tokenizer.parts["vocabulary"]:
        raise ConfigError(
            f"{name}.model_args.model_name_or_path: the tokenizer of {model} gives other ids to its tokens than "
            f"{other} ({tokenizer.name}), and {reason}: choose a {name} with the same tokenizer"
        )
