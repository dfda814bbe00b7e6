"""Makes a job's tokenizer, and describes the sets of texts that it reads: files, keys, limits and chat template."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from datetime import date
from itertools import islice
from pathlib import Path
from typing import Any, Generic

from roll_batching.errors import ConfigError, DataError
from roll_batching.huggingface.directory import directory_of, find_directory
from roll_batching.jobs.config import DataArgs, JobConfig
from roll_batching.jobs.config.rl_rules import uses_critic
from roll_batching.jobs.config.task_rules import uses_teacher
from roll_batching.jobs.config.worker import WorkerConfig
from roll_batching.jobs.rewards.pool import reward_of
from roll_batching.jobs.texts.chat import NO_ARGUMENTS, ChatTemplate, TemplateArguments
from roll_batching.jobs.texts.faults import Fault, Faults
from roll_batching.jobs.texts.fit import BATCH_SIZE, FOLDER, Fit, TokenCountCache, TokenCounts, token_counts
from roll_batching.jobs.texts.hub_data import load_hub_data
from roll_batching.jobs.texts.image_references import ImageFields
from roll_batching.jobs.texts.image_tokenizer import image_fields
from roll_batching.jobs.texts.records import Paths, sources_of
from roll_batching.jobs.texts.texts import (
    Conversation,
    Document,
    Fingerprint,
    Instruction,
    Judged,
    Pair,
    Prompt,
    T,
    iterate_texts,
)
from roll_batching.jobs.texts.token_ids import TokenIds
from roll_batching.jobs.texts.token_store import StoredTokens, TokenCache, file_digest, is_indexed, open_indexed
from roll_batching.jobs.texts.tokenizers import CharTokenizer, HFTokenizer, Tokenizer

_FILES = ("tokenizer.json", "tokenizer_config.json")


def check_vocabularies(config: JobConfig, tokenizer: Tokenizer) -> None:
    """Raises ConfigError if the tokenizer in the directory of teacher or critic has other ids than `tokenizer`.

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
    """Makes the tokenizer that `config.tokenizer` describes. Raises DataError or ConfigError when it cannot be made."""
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
    """Makes the tokenizer, and raises ConfigError if the vocabulary of a model lacks some of its tokens."""
    tokenizer = load_tokenizer(config)
    model = config.actor_train.model_args.architecture
    if model is not None and tokenizer.vocab_size > model.vocab_size:
        raise ConfigError(
            f"the tokenizer has {tokenizer.vocab_size} tokens, the model a vocab_size of {model.vocab_size}: "
            "raise actor_train.model_args.architecture.vocab_size"
        )
    check_vocabularies(config, tokenizer)
    return tokenizer


# ---- text sets


logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class TextSet(Generic[T]):
    """One set of texts that a job reads: kind, files, limits, and how chats and images are read."""

    kind: type[T]
    paths: Paths
    fit: Fit
    template: ChatTemplate | None = None
    """Chat template, for prompts from messages."""
    instruction: Instruction | None = None
    """Keys of a chat's texts, for messages from texts."""
    images: ImageFields | None = None
    arguments: TemplateArguments = NO_ARGUMENTS
    """Variables that the chat template gets in addition to messages."""
    cache: TokenCountCache | None = None
    """Token counts of earlier starts."""
    token_folder: Path | None = None
    """Folder of tokens of earlier starts."""

    @property
    def is_indexed(self) -> bool:
        """Whether the files are Megatron's `.bin` and `.idx`."""
        return any(is_indexed(source) for source in sources_of(self.paths))

    @property
    def is_mapped(self) -> bool:
        """Whether `open_tokens` opens the set, so that its token counts need no file."""
        return self.is_indexed or self.token_folder is not None

    def open_tokens(
        self, faults: Faults, on_bytes_read: Callable[[int], None] = lambda size: None
    ) -> StoredTokens | None:
        """Opens the set as memory-mapped tokens: Megatron's files, or the token cache, which is filled first.

        None for a set that is read into memory, and if texts have faults. Raises DataError.
        """
        if self.is_indexed:
            return open_indexed(sources_of(self.paths), self.fit.max_length)
        if self.token_folder is None:
            return None
        try:
            digests = [
                load_hub_data(source)._fingerprint if isinstance(source, str) else file_digest(source)
                for source in sources_of(self.paths)
            ]
        except Fault as fault:
            faults.add(str(self.paths), fault.what, fault.cure)
            return None
        except OSError:  # reading reports it
            digests = []
        tokenizer = self.fit.tokenizer
        parts: list[Any] = [self.kind.__name__, self.fit.keys, self.instruction, self.arguments, digests]
        parts += [tokenizer.fingerprint, sorted(tokenizer.parts.items())]
        if self.template is not None and self.template.reads_date:
            parts.append(date.today())
        cache = TokenCache(self.token_folder, repr(parts), str(self.paths))
        with cache.lock():
            stored = cache.load()
            if stored is None or int(stored.lengths.max(initial=0)) > self.fit.max_length:
                stored = self._fill(cache, faults, on_bytes_read)
        return stored

    def _fill(self, cache: TokenCache, faults: Faults, on_bytes_read: Callable[[int], None]) -> StoredTokens | None:
        """Tokenises all texts into `cache`, and opens it; None if texts have faults, which are all added."""
        from roll_batching.jobs.texts.encode import encode_many_with_masks  # imports torch

        texts, digest, without_stop, faults_before = self.read(faults, on_bytes_read), Fingerprint(), 0, len(faults)
        with cache.writer() as writer:
            while batch := list(islice(texts, BATCH_SIZE)):
                if not writer.lengths:
                    self.log_template_notices(batch)
                count = len(faults)
                try:
                    encoded = encode_many_with_masks(batch, self.fit.tokenizer)
                except Exception:
                    self.fit.check(batch, faults)  # names the text
                    if len(faults) == count:
                        raise
                    continue
                if max(len(tokens) for tokens, _, _ in encoded) > self.fit.max_length:
                    self.fit.check(batch, faults)
                    continue
                for text, (tokens, trained, lacks_stop) in zip(batch, encoded, strict=True):
                    writer.add(tokens, trained)
                    digest.add(text)
                    digest.add_line(text)
                    without_stop += lacks_stop
            if len(faults) == faults_before:
                value = digest.value()
                lines = digest.value_with_lines(value)
                writer.index = {"fingerprint": value, "record_fingerprint": lines, "without_stop": without_stop}
        return cache.load()

    def cached_counts(self, fingerprint: str) -> TokenCounts | None:
        """Returns cached token counts of the texts with this fingerprint; None without, or if a text is too long."""
        counts = None if self.cache is None else self.cache.load(fingerprint)
        return None if counts is None or int(counts.tokens.max(initial=0)) > self.fit.max_length else counts

    def log_template_notices(self, texts: Iterable[T]) -> None:
        """Logs keys of `texts` that the chat template would read and does not get, or gets and does not read."""
        if self.template is not None:
            records = [text.line for text in texts]
            for notice in self.arguments.notices(records, self.template.variables):
                logger.warning("%s: %s", self.paths, notice)

    def log_missing_stops(self, counts: TokenCounts) -> None:
        """Logs how many texts train turns that end without a stop token."""
        if counts.without_stop:
            stops = [self.fit.tokenizer.decode([token]) for token in self.fit.tokenizer.stop_token_ids]
            logger.warning(
                "%s: %d of %d texts have turns of the assistant that end without a stop token (%s): the model does not "
                "learn to stop there. Set tokenizer.eos_token to the token that ends turns in the chat template",
                *(self.paths, counts.without_stop, len(counts.tokens), ", ".join(map(repr, stops))),
            )

    def drop_long(self, texts: list[T]) -> list[T]:
        """`texts` without those that `long_prompts: drop` leaves out. Raises DataError if none remains."""
        if not self.fit.leaves_out:
            return texts
        try:
            counts = token_counts(texts, self.fit.tokenizer)
        except Exception:  # the check that follows names the text
            return texts
        remaining = [text for text, fits in zip(texts, counts <= self.fit.max_length, strict=True) if fits]
        if not remaining:
            raise DataError(
                f"every prompt of {self.paths} has more than {self.fit.max_length:,} tokens, so long_prompts: drop "
                f"leaves none: raise {self.fit.setting}"
            )
        if len(remaining) < len(texts) and os.environ.get("RANK", "0") == "0":
            logger.warning(
                "%d of %d prompts of %s have more than %s tokens (%s), up to %s, and are left out: long_prompts is "
                "drop",
                *(len(texts) - len(remaining), len(texts), self.paths),
                *(f"{self.fit.max_length:,}", self.fit.setting, f"{int(counts.max()):,}"),
            )
        return remaining

    def read(self, faults: Faults, on_bytes_read: Callable[[int], None] = lambda size: None) -> Iterator[T]:
        """Iterates over the texts; `on_bytes_read` is called with the number of bytes after each read."""
        return iterate_texts(
            self.kind,
            self.paths,
            self.fit.keys,
            faults,
            on_bytes_read,
            template=self.template,
            instruction=self.instruction,
            images=self.images,
            arguments=self.arguments,
        )


def text_sets_of(
    config: JobConfig, tokenizer: Tokenizer
) -> tuple[TextSet[Any] | None, TextSet[Any] | None, TextSet[Any] | None]:
    """Returns the sets of corpus, prompts and held-out texts; None for a set that `config` does not name.

    Raises DataError for messages without a chat template.
    """
    if config.is_supervised:
        texts, held_out = _supervised_parts(config, tokenizer)
        return texts, None, held_out
    data, warmup, reward = config.actor_train.data_args, config.warmup, reward_of(config)
    corpus = prompts = heldout = None
    if warmup is not None:
        fit = Fit(
            tokenizer=tokenizer,
            **_limit(
                config,
                config.sequence_length or 1,
                "sequence_length (prompt_length + response_length where it is not given)",
            ),
            keys=(warmup.prompt, warmup.response) if warmup.messages is None else (warmup.messages,),
        )
        kind, chat_fields = (Document, {}) if warmup.messages is None else (Conversation, _template_of(data, tokenizer))
        corpus = TextSet(kind=kind, paths=warmup.file_name, fit=fit, **chat_fields)
    if config.max_steps > 0:
        assert data.prompts is not None and reward is not None  # check_runnable
        fit = Fit(
            tokenizer=tokenizer,
            max_length=config.prompt_length,
            setting="prompt_length",
            keys=(data.messages or data.prompt, data.response),
            leaves_out=data.long_prompts == "drop",
            reward_fault=lambda prompt: reward.unjudged(prompt.line),
        )
        trained = (
            fit if fit.leaves_out else replace(fit, **_limit(config, config.prompt_length, "prompt_length", answer=1))
        )
        prompts = prompts_of(data, data.prompts, trained)
        if config.eval_samples and (paths := data.held_out_prompts(config.eval_samples)) is not None:
            heldout = prompts_of(data, paths, fit)
    return corpus, prompts, heldout


def _limit(config: JobConfig, length: int, key: str, answer: int = 0) -> dict[str, Any]:
    """Returns `max_length` and `setting` of a `Fit` of training texts: `length`, or less if a micro-batch holds less.

    A text and `answer` response tokens must fit into one micro-batch: under `oversize: error` a longer one would end
    the job in its first step.
    """
    role = config.actor_train
    passes, ranks = role.batching().train, _most_ranks_of_a_pack(config)
    cap = None if passes.max_tokens is None or ranks is None else passes.max_tokens * ranks
    if passes.oversize != "error" or cap is None or cap - answer >= length:
        return {"max_length": length, "setting": key}
    note = "" if ranks == 1 else f" (on each of {ranks} ranks of a pack)"
    note += f" ({answer} of its {cap:,} for the response)" if answer else ""
    return {"max_length": cap - answer, "setting": f"actor_train.{role.cap_key('train')}{note}"}


def _most_ranks_of_a_pack(config: JobConfig) -> int | None:
    """Most ranks that share a pack, or None if that depends on an unknown number of processes."""
    layout = config.actor_train.strategy_args.strategy_config
    if not layout.has_cp_per_pack:
        return 1
    if layout.max_context_parallel_size is not None or config.world_size is None:
        return layout.max_context_parallel_size
    return layout.max_cp_size(config.dp_size(config.world_size))


def prompts_of(data: DataArgs, paths: Paths, fit: Fit) -> TextSet[Prompt]:
    """Makes the text set of the prompts in `paths`. Raises DataError for chats without a chat template."""
    chat_fields = _template_of(data, fit.tokenizer) if data.messages is not None or data.chat else {}
    images = image_fields(data.images, fit.tokenizer)
    prompts = TextSet(kind=Prompt, paths=paths, fit=fit, instruction=_instruction(data), images=images, **chat_fields)
    if prompts.is_indexed:
        raise ConfigError(f"actor_train.data_args: {paths} is a file of token ids, and prompts are texts")
    return prompts


def _template_of(data: DataArgs, tokenizer: Tokenizer) -> dict[str, Any]:
    """Returns the fields `template` and `arguments` of a text set.

    Raises DataError without a template, ConfigError for settings of variables that the template does not read.
    """
    template = ChatTemplate(tokenizer)
    arguments = TemplateArguments(
        tools=data.tools, columns=data.chat_template_columns, values=data.chat_template_kwargs
    )
    arguments.check(template.variables)
    return {"template": template, "arguments": arguments}


def _instruction(data: DataArgs) -> Instruction | None:
    return Instruction(data.query, data.system) if data.chat else None


def _supervised_parts(config: JobConfig, tokenizer: Tokenizer) -> tuple[TextSet[Any], TextSet[Any] | None]:
    """Training and held-out texts of a job of task sft, dpo or kto."""
    data = config.actor_train.data_args
    assert data.file_name is not None  # check_runnable
    chat = data.messages is not None or data.chat
    kind: type[Any] = Judged if config.task == "kto" else Pair
    answers = (data.response, data.label) if config.task == "kto" else (data.chosen, data.rejected)
    keys: tuple[str, ...] = (data.messages or data.prompt, *answers)
    if config.task == "sft":
        kind, keys = Conversation if chat else Document, (data.prompt, data.response)
        if data.messages is not None:
            keys = (data.messages,)
    if data.input_ids is not None and config.task == "sft":
        kind, keys = TokenIds, (data.input_ids,)
    held_out = Fit(tokenizer=tokenizer, max_length=config.sequence_length or 1, setting="sequence_length", keys=keys)
    fit = replace(held_out, **_limit(config, held_out.max_length, "sequence_length"))
    form = kind.__name__ + (" of messages" if chat else "")
    cache = TokenCountCache(Path(config.output_dir) / FOLDER, tokenizer, form)
    chat_fields = _template_of(data, tokenizer) if chat else {}
    chat_fields |= {"instruction": _instruction(data), "cache": cache, "images": image_fields(data.images, tokenizer)}
    folder = Path(data.token_cache).expanduser() if data.token_cache is not None and config.task == "sft" else None
    corpus = TextSet(kind=kind, paths=data.file_name, fit=fit, token_folder=folder, **chat_fields)
    sets = {"file_name": corpus}
    if data.eval_file_name is not None and config.eval_samples:
        sets["eval_file_name"] = replace(corpus, paths=data.eval_file_name, fit=held_out, cache=None)
    unread = f"task: {config.task} reads texts" if config.task != "sft" else "it has no messages or chat to read"
    for key, texts in sets.items():
        if texts.is_indexed and (config.task != "sft" or chat):
            raise ConfigError(f"actor_train.data_args.{key}: {texts.paths} is a file of token ids, and {unread}")
    return corpus, sets.get("eval_file_name")
