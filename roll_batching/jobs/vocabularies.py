"""The tokenizer of a job, and the vocabularies of teacher and critic, which read its token ids."""

from __future__ import annotations

from typing import Any

from roll_batching.errors import ConfigError
from roll_batching.huggingface.directory import directory_of, find_directory
from roll_batching.jobs.config import JobConfig
from roll_batching.jobs.config.rl_rules import uses_critic
from roll_batching.jobs.config.teacher_rules import uses_teacher
from roll_batching.jobs.config.worker import WorkerConfig
from roll_batching.jobs.texts.tokenizers import CharTokenizer, HFTokenizer, Tokenizer

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


def load_tokenizer(config: JobConfig) -> Tokenizer:
    """The tokenizer that `config.tokenizer` describes. Raises DataError or ConfigError when it cannot be made."""
    settings = config.tokenizer
    if settings.type == "hf":
        if settings.name_or_path is None:
            raise ConfigError("tokenizer.name_or_path is missing, and actor_train names no model to take it from")
        model = config.actor_train.model_args.model_name_or_path
        names: dict[str, Any] = {"eos": settings.eos_token, "pad": settings.pad_token, "model": model}
        data = config.actor_train.data_args
        if data.images is None or model is None:
            return HFTokenizer(settings.name_or_path, **names)
        from roll_batching.jobs.texts.image_tokenizer import ImageTokenizer  # other jobs need no image processor

        limits: dict[str, Any] = {"min_pixels": data.image_min_pixels, "max_pixels": data.image_max_pixels}
        return ImageTokenizer(settings.name_or_path, folder=directory_of(model), **names, **limits)
    if settings.eos_token is None:
        raise ConfigError("tokenizer.eos_token is missing: a char tokenizer needs a character that ends responses")
    if settings.vocabulary_file is not None:
        return CharTokenizer.from_file(settings.vocabulary_file, settings.eos_token, settings.pad_token)
    return CharTokenizer(settings.vocabulary or "", settings.eos_token, settings.pad_token)


def tokenizer_that_fits(config: JobConfig) -> Tokenizer:
    """The tokenizer of `load_tokenizer`. Raises ConfigError where a model's vocabulary does not hold its tokens."""
    tokenizer = load_tokenizer(config)
    model = config.actor_train.model_args.architecture
    if model is not None and tokenizer.vocab_size > model.vocab_size:
        raise ConfigError(
            f"the tokenizer has {tokenizer.vocab_size} tokens, the model a vocab_size of {model.vocab_size}: "
            "raise actor_train.model_args.architecture.vocab_size"
        )
    check_vocabularies(config, tokenizer)
    return tokenizer
