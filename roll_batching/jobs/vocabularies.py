"""Comparison of a teacher's vocabulary with the student's: distillation compares probabilities by token id."""

from __future__ import annotations

from roll_batching.errors import ConfigError
from roll_batching.huggingface.directory import find_directory
from roll_batching.jobs.config import JobConfig
from roll_batching.jobs.config.teacher_rules import uses_teacher
from roll_batching.jobs.texts.tokenizers import HFTokenizer, Tokenizer

_FILES = ("tokenizer.json", "tokenizer_config.json")


def check_teacher_vocabulary(config: JobConfig, tokenizer: Tokenizer) -> None:
    """Raises ConfigError if the teacher's directory has a tokenizer that gives ids to other tokens than `tokenizer`."""
    name = None if config.teacher is None else config.teacher.model_args.model_name_or_path
    folder = None if name is None else find_directory(name)
    if not uses_teacher(config) or folder is None or not isinstance(tokenizer, HFTokenizer):
        return
    if not any((folder / file).is_file() for file in _FILES):
        return
    if HFTokenizer(folder).parts["vocabulary"] != tokenizer.parts["vocabulary"]:
        raise ConfigError(
            f"teacher.model_args.model_name_or_path: the tokenizer of {name} gives other ids to its tokens than that "
            f"of the student ({tokenizer.name}), and distillation compares probabilities by id: choose a teacher with "
            "the student's tokenizer"
        )
