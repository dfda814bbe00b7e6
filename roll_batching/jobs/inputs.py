"""Inputs of a job, read and checked before it starts: texts, tokenizer, reward function.

The launcher reads and checks all texts once (`check_inputs`). The ranks compare their texts with the checked ones, by
fingerprint, and check again if these differ; under torchrun, where no launcher of ours checks, they check everything.
Training texts are tokenised for the check; their token counts are cached, so that the next start skips it.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, Generic

import numpy as np

from roll_batching.errors import ConfigError, DataError
from roll_batching.jobs.config import DataArgs, JobConfig
from roll_batching.jobs.config.supervised import supervised
from roll_batching.jobs.observe.reading import ReadingProgress
from roll_batching.jobs.rewards.pool import RewardPool, reward_of
from roll_batching.jobs.texts.chat import ChatTemplate
from roll_batching.jobs.texts.faults import Faults
from roll_batching.jobs.texts.fit import BATCH_SIZE, Fit, token_counts
from roll_batching.jobs.texts.image_references import ImageFields
from roll_batching.jobs.texts.image_tokenizer import image_fields
from roll_batching.jobs.texts.jsonl import PathLike, as_files
from roll_batching.jobs.texts.texts import (
    Conversation,
    Document,
    Fingerprint,
    Instruction,
    Judged,
    Pair,
    Prompt,
    PromptDataset,
    T,
    TextDataset,
    iterate_texts,
)
from roll_batching.jobs.texts.token_count_cache import FOLDER, TokenCountCache
from roll_batching.jobs.texts.tokenizers import Tokenizer
from roll_batching.jobs.vocabularies import tokenizer_that_fits
from roll_batching.planning.arrays import Ints

logger = logging.getLogger(__name__)

_SPOT_CHECKS = 16
"""Texts that are tokenised again before cached token counts are used."""
CHECKED = "ROLL_BATCHING_CHECKED"
"""Environment variable with the fingerprint of the texts that the launcher has checked."""


@dataclass(frozen=True, kw_only=True)
class JobInputs:
    """Texts, tokenizer and reward of a job, checked. A part that the job does not need is None."""

    tokenizer: Tokenizer
    corpus: TextDataset[Any] | None
    """Training texts: of the warm-up, sft, dpo or kto."""
    validation: TextDataset[Any] | None
    token_counts: Ints | None
    """sft, dpo, kto: token counts of `corpus`, as `texts.fit.token_counts`; None if they are not cached."""
    prompts: PromptDataset | None
    """Training prompts of the RL phase."""
    heldout: PromptDataset | None
    reward: RewardPool | None
    """Not yet started."""

    @property
    def fingerprint(self) -> str:
        """Digest of all texts, to compare between ranks."""
        parts = (self.corpus, self.prompts, self.heldout or self.validation)
        return _join_digests(None if part is None else part.fingerprint for part in parts)


@dataclass(frozen=True, kw_only=True)
class _TextSet(Generic[T]):
    """One of the sets of texts that a job reads, and its limits."""

    kind: type[T]
    paths: PathLike | Sequence[PathLike]
    fit: Fit
    template: ChatTemplate | None = None
    """Chat template, for prompts from messages."""
    instruction: Instruction | None = None
    """Keys of a chat's texts, for messages from texts."""
    images: ImageFields | None = None
    cache: TokenCountCache | None = None
    """Token counts of earlier starts."""

    def cached_counts(self, fingerprint: str) -> Ints | None:
        """Cached token counts of the texts with this fingerprint, if all of them fit."""
        counts = None if self.cache is None else self.cache.load(fingerprint)
        return None if counts is None or int(counts.max(initial=0)) > self.fit.max_length else counts

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

    def read(self, faults: Faults, read: Callable[[int], None] = lambda size: None) -> Iterator[T]:
        """Iterate over the texts; `read` is called with bytes read."""
        return iterate_texts(
            self.kind,
            self.paths,
            self.fit.keys,
            faults,
            read,
            template=self.template,
            instruction=self.instruction,
            images=self.images,
        )


def check_inputs(config: JobConfig) -> dict[str, str]:
    """Read and check all texts that `config` names, line by line, with a progress display.

    Returns the environment variable that tells the ranks so. Raises DataError naming every line that cannot
    be used, or ConfigError naming what cannot be found or does not fit the model.
    """
    parts = _parts(config, tokenizer_that_fits(config))
    files = [file for part in parts if part is not None for file in as_files(part.paths) if file.is_file()]
    faults = Faults()
    with ReadingProgress("checking the data files", sum(file.stat().st_size for file in files)) as progress:
        checked = [None if part is None else _check(part, faults, progress.read) for part in parts]
    faults.check()
    for part, result in zip(parts, checked, strict=True):
        fingerprint, counts = result or ("", None)
        if part is not None and part.cache is not None and counts is not None:
            part.cache.save(fingerprint, counts)
    return {CHECKED: _join_digests(None if result is None else result[0] for result in checked)}


def _check(part: _TextSet[Any], faults: Faults, read: Callable[[int], None]) -> tuple[str, Ints | None]:
    """Fingerprint of the texts, and their token counts; None for cached ones, which need no check."""
    if part.cache is not None and part.cache.any():
        digest, unreadable = Fingerprint(), Faults()
        for text in part.read(unreadable, read):
            digest.add(text)
        if not len(unreadable) and part.cached_counts(digest.value()) is not None:
            return digest.value(), None
    digest, counts = Fingerprint(), []
    texts = part.read(faults, read)
    while batch := list(islice(texts, BATCH_SIZE)):
        counts.append(part.fit.check(batch, faults))
        for text, count in zip(batch, counts[-1], strict=True):
            if not part.fit.leaves_out or count <= part.fit.max_length:
                digest.add(text)
    return digest.value(), np.concatenate(counts) if counts else np.zeros(0, dtype=np.int64)


def load_inputs(config: JobConfig) -> JobInputs:
    """Read all inputs that `config` names, and check texts that the launcher has not.

    Raises DataError naming every line that cannot be used, or ConfigError naming what cannot be found or does not fit
    the model.
    """
    tokenizer = tokenizer_that_fits(config)
    corpus, prompts, heldout = _parts(config, tokenizer)
    faults = Faults()
    documents = None if corpus is None else list(corpus.read(faults))
    training = None if prompts is None else list(prompts.read(faults))
    evaluation = None if heldout is None else list(heldout.read(faults))
    faults.check()
    if prompts is not None and training is not None:
        training = prompts.drop_long(training)
    if heldout is not None and evaluation is not None:
        evaluation = heldout.drop_long(evaluation)
    dataset = None if documents is None else TextDataset(documents)
    inputs = JobInputs(
        tokenizer=tokenizer,
        corpus=dataset,
        token_counts=None if corpus is None or dataset is None else _spot_check(corpus, dataset),
        prompts=None if training is None else PromptDataset(training),
        heldout=None if evaluation is None or supervised(config) else PromptDataset(evaluation),
        validation=TextDataset(evaluation) if evaluation is not None and supervised(config) else None,
        reward=reward_of(config),
    )
    if inputs.fingerprint == os.environ.get(CHECKED):
        return inputs
    counts = None
    if corpus is not None and dataset is not None and inputs.token_counts is None:
        counts = corpus.fit.check(dataset, faults)
    for part, texts in ((prompts, training), (heldout, evaluation)):
        if part is not None:
            part.fit.check(texts or (), faults)
    faults.check()
    if corpus is None or dataset is None or counts is None or corpus.cache is None:
        return inputs
    corpus.cache.save(dataset.fingerprint, counts)
    return replace(inputs, token_counts=counts)


def _spot_check(part: _TextSet[Any], texts: TextDataset[Any]) -> Ints | None:
    """Cached token counts of `texts`; None if there are none, or if some texts, counted again, have others."""
    counts = part.cached_counts(texts.fingerprint)
    if counts is None:
        return None
    indices = np.unique(np.linspace(0, len(texts) - 1, _SPOT_CHECKS).astype(np.int64))
    try:
        if np.array_equal(
            token_counts([texts[index] for index in indices.tolist()], part.fit.tokenizer), counts[indices]
        ):
            return counts
    except Exception:  # the full count that follows raises it again, and names the text
        pass
    if part.cache is not None:
        part.cache.remove(texts.fingerprint)
    logger.warning(
        "the cached token counts of %s differ from those of its texts: all tokens are counted again", part.paths
    )
    return None


def _parts(
    config: JobConfig, tokenizer: Tokenizer
) -> tuple[_TextSet[Any] | None, _TextSet[Any] | None, _TextSet[Any] | None]:
    """Corpus, prompts and held-out texts, those of them that `config` names.

    Raises DataError for messages without a chat template.
    """
    if supervised(config):
        texts, held_out = _supervised_parts(config, tokenizer)
        return texts, None, held_out
    data, warmup, rl = config.actor_train.data_args, config.warmup, config.max_steps > 0
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
        if warmup.messages is not None:
            ChatTemplate(tokenizer)  # fails here once, not at every line
        kind = Document if warmup.messages is None else Conversation
        corpus = _TextSet(kind=kind, paths=warmup.file_name, fit=fit)
    if rl:
        assert data.file_name is not None  # check_runnable
        fit = Fit(
            tokenizer=tokenizer,
            max_length=config.prompt_length,
            setting="prompt_length",
            keys=(data.messages or data.prompt, data.response)[: 2 if config.has_reward else 1],
            leaves_out=data.long_prompts == "drop",
            reward_fault=_missing_reward(config),
        )
        trained = (
            fit if fit.leaves_out else replace(fit, **_limit(config, config.prompt_length, "prompt_length", answer=1))
        )
        prompts = _prompts(data, data.file_name, trained)
        if data.eval_file_name is not None and config.eval_samples:
            heldout = _prompts(data, data.eval_file_name, fit)
    return corpus, prompts, heldout


def _limit(config: JobConfig, length: int, key: str, answer: int = 0) -> dict[str, Any]:
    """`max_length` and `setting` of training texts: `length`, or less where the cap of a micro-batch is below it.

    A text and `answer` response tokens must fit into one micro-batch: under `oversize: error` a longer one would end
    the job in its first step.
    """
    role = config.actor_train
    passes, ranks = role.batching().train, _most_ranks_of_a_pack(config)
    cap = None if passes.max_tokens is None or ranks is None else passes.max_tokens * ranks
    if passes.oversize != "error" or cap is None or cap - answer >= length:
        return {"max_length": length, "setting": key}
    beside = "" if ranks == 1 else f" (on each of {ranks} ranks of a pack)"
    beside += f" ({answer} of its {cap:,} for the response)" if answer else ""
    return {"max_length": cap - answer, "setting": f"actor_train.{role.train_cap_key}{beside}"}


def _most_ranks_of_a_pack(config: JobConfig) -> int | None:
    """Ranks that have the cap of a pack each; None where they depend on a number of processes that is not known yet."""
    layout = config.actor_train.strategy_args.strategy_config
    if not layout.has_cp_per_pack:
        return 1
    if layout.max_context_parallel_size is not None or config.world_size is None:
        return layout.max_context_parallel_size
    return layout.max_cp_size(config.dp_size(config.world_size))


def _missing_reward(config: JobConfig) -> Callable[[Prompt], str]:
    """Returns the fault of a prompt without a reward; empty for others."""
    reward = reward_of(config)
    assert reward is not None, "an RL job has a reward"
    return lambda prompt: reward.unjudged(prompt.extra)


def read_prompts(
    config: JobConfig, tokenizer: Tokenizer, paths: Sequence[PathLike] | None, *, answers: bool = True
) -> list[Prompt]:
    """Prompts of `paths`, by default of the job's held-out file, else of its training prompts.

    With `answers` False lines need no answer. Raises DataError naming every line that cannot be used.
    """
    data = config.actor_train.data_args
    files = paths or data.eval_file_name or data.file_name
    if files is None:
        raise ConfigError("the run's configuration names no file of prompts: name one")
    fit = Fit(
        tokenizer=tokenizer,
        max_length=config.prompt_length,
        setting="prompt_length",
        keys=(data.messages or data.prompt, data.response)[: 2 if answers and config.has_reward else 1],
        leaves_out=data.long_prompts == "drop",
    )
    faults = Faults()
    texts = _prompts(data, files, fit)
    prompts = list(texts.read(faults))
    fit.check(prompts, faults)
    faults.check()
    return texts.drop_long(prompts)


def _prompts(data: DataArgs, paths: PathLike | Sequence[PathLike], fit: Fit) -> _TextSet[Prompt]:
    """The text set of `paths`. Raises DataError for chats without a chat template."""
    template = ChatTemplate(fit.tokenizer) if data.messages is not None or data.chat else None
    images = image_fields(data.images, fit.tokenizer)
    return _TextSet(kind=Prompt, paths=paths, fit=fit, template=template, instruction=_instruction(data), images=images)


def _instruction(data: DataArgs) -> Instruction | None:
    return Instruction(data.query, data.system) if data.chat else None


def prompt_of(text: str, config: JobConfig, tokenizer: Tokenizer) -> Prompt:
    """`text` as a prompt of the job; as a user's message where its prompts are chats."""
    data = config.actor_train.data_args
    if data.messages is None and not data.chat:
        return Prompt(text, "")
    return Prompt(ChatTemplate(tokenizer).prompt([{"role": "user", "content": text}]), "")


def _supervised_parts(config: JobConfig, tokenizer: Tokenizer) -> tuple[_TextSet[Any], _TextSet[Any] | None]:
    """Training and held-out texts of a job of task sft, dpo or kto."""
    data = config.actor_train.data_args
    assert data.file_name is not None  # check_runnable
    chat = data.messages is not None or data.chat
    template, instruction = ChatTemplate(tokenizer) if chat else None, _instruction(data)
    kind: type[Any] = Judged if config.task == "kto" else Pair
    answers = (data.response, data.label) if config.task == "kto" else (data.chosen, data.rejected)
    keys: tuple[str, ...] = (data.messages or data.prompt, *answers)
    if config.task == "sft":
        kind, keys = Conversation if chat else Document, (data.prompt, data.response)
        if data.messages is not None:
            keys = (data.messages,)
    held_out = Fit(tokenizer=tokenizer, max_length=config.sequence_length or 1, setting="sequence_length", keys=keys)
    fit = replace(held_out, **_limit(config, held_out.max_length, "sequence_length"))
    form = kind.__name__ + (" of messages" if chat else "")
    cache = TokenCountCache(Path(config.output_dir) / FOLDER, tokenizer, form)
    ways: dict[str, Any] = {"template": template, "instruction": instruction, "cache": cache}
    ways["images"] = image_fields(data.images, tokenizer)
    corpus = _TextSet(kind=kind, paths=data.file_name, fit=fit, **ways)
    if data.eval_file_name is None or not config.eval_samples:
        return corpus, None
    return corpus, replace(corpus, paths=data.eval_file_name, fit=held_out, cache=None)


def _join_digests(digests: Iterable[str | None]) -> str:
    return "/".join(digest or "-" for digest in digests)
