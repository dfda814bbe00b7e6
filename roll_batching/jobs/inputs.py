"""Reads and checks the inputs of a job before it starts: texts, tokenizer, reward function.

The launcher reads and checks all texts once (`check_inputs`). The ranks compare their texts with the checked ones, by
fingerprint, and check again if these differ; under torchrun, where no launcher of ours checks, they check everything.
Training texts are tokenised for the check; their token counts are cached, so that the next start skips it.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import numpy as np

from roll_batching.errors import ConfigError
from roll_batching.jobs.config import JobConfig
from roll_batching.jobs.observe.progress import ReadingProgress
from roll_batching.jobs.rewards.pool import RewardPool, reward_of
from roll_batching.jobs.text_sets import TextSet, prompts_of, text_sets_of, tokenizer_that_fits
from roll_batching.jobs.texts.chat import ChatTemplate
from roll_batching.jobs.texts.faults import Faults
from roll_batching.jobs.texts.fit import BATCH_SIZE, Fit, TokenCounts, join_counts, token_counts
from roll_batching.jobs.texts.records import PathLike, as_files
from roll_batching.jobs.texts.texts import Fingerprint, Prompt, PromptDataset, TextDataset
from roll_batching.jobs.texts.token_store import StoredTokens
from roll_batching.jobs.texts.tokenizers import Tokenizer
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


def check_inputs(config: JobConfig) -> dict[str, str]:
    """Reads and checks all texts that `config` names, line by line, with a progress display.

    Returns the environment variable that tells the ranks which texts are checked. Raises DataError naming every line
    that cannot be used, or ConfigError naming what cannot be found or does not fit the model.
    """
    parts = text_sets_of(config, tokenizer_that_fits(config))
    files = [file for part in parts if part is not None for file in as_files(part.paths) if file.is_file()]
    faults = Faults()
    with ReadingProgress("checking the data files", sum(file.stat().st_size for file in files)) as progress:
        checked = [None if part is None else _check(part, faults, progress.read) for part in parts]
    faults.check()
    for part, result in zip(parts, checked, strict=True):
        if part is not None and result is not None:
            fingerprint, counts = result
            part.log_missing_stops(counts)
            if part.cache is not None and not part.is_mapped:
                part.cache.save(fingerprint, counts)
    return {CHECKED: _join_digests(None if result is None else result[0] for result in checked)}


def _check(part: TextSet[Any], faults: Faults, read: Callable[[int], None]) -> tuple[str, TokenCounts]:
    """Reads and checks the texts of `part`, unless tokens or their counts are cached; returns (fingerprint, counts)."""
    before = len(faults)
    stored = part.open_tokens(faults, read)
    if stored is not None:
        if part.is_indexed:
            stored.check_vocabulary(part.fit.tokenizer.vocab_size)
        return stored.fingerprint, TokenCounts(stored.lengths, stored.without_stop)
    if len(faults) > before:
        return "", TokenCounts(np.zeros(0, dtype=np.int64))
    if part.cache is not None and part.cache.any():
        digest, unreadable = Fingerprint(), Faults()
        for text in part.read(unreadable, read):
            digest.add(text)
        cached = None if len(unreadable) else part.cached_counts(digest.value())
        if cached is not None:
            return digest.value(), cached
    digest, counts = Fingerprint(), []
    texts = part.read(faults, read)
    while batch := list(islice(texts, BATCH_SIZE)):
        counts.append(part.fit.check(batch, faults))
        for text, count in zip(batch, counts[-1].tokens, strict=True):
            if not part.fit.leaves_out or count <= part.fit.max_length:
                digest.add(text)
    return digest.value(), join_counts(counts)


def load_inputs(config: JobConfig) -> JobInputs:
    """Reads all inputs that `config` names, and checks the texts that the launcher has not checked.

    Raises DataError naming every line that cannot be used, or ConfigError naming what cannot be found or does not fit
    the model.
    """
    tokenizer = tokenizer_that_fits(config)
    corpus, prompts, heldout = text_sets_of(config, tokenizer)
    faults = Faults()
    documents = None if corpus is None else _read(corpus, faults)
    training = None if prompts is None else list(prompts.read(faults))
    evaluation: Any = None if heldout is None else _read(heldout, faults)
    faults.check()
    if prompts is not None and training is not None:
        training = prompts.drop_long(training)
    if heldout is not None and evaluation is not None:
        evaluation = heldout.drop_long(evaluation)
    dataset, counts = _as_dataset(documents), None
    if isinstance(dataset, StoredTokens):
        counts = TokenCounts(dataset.lengths, dataset.without_stop)
    elif corpus is not None and dataset is not None:
        counts = _spot_check(corpus, dataset)
    inputs = JobInputs(
        tokenizer=tokenizer,
        corpus=dataset,
        token_counts=None if counts is None else counts.tokens,
        prompts=None if training is None else PromptDataset(training),
        heldout=None if evaluation is None or config.is_supervised else PromptDataset(evaluation),
        validation=_as_dataset(evaluation) if config.is_supervised else None,
        reward=reward_of(config),
    )
    is_first = os.environ.get("RANK", "0") == "0"
    if is_first:
        for part, texts in ((corpus, documents), (prompts, training), (heldout, evaluation)):
            if part is not None and not isinstance(texts, StoredTokens):
                part.log_template_notices(texts or ())
    if inputs.fingerprint == os.environ.get(CHECKED):
        return inputs
    was_cached = counts is not None
    if corpus is not None and dataset is not None and counts is None:
        counts = corpus.fit.check(dataset, faults)
    stored = dataset if isinstance(dataset, StoredTokens) else None
    for part, texts in ((corpus, stored), (prompts, training), (heldout, evaluation)):
        if isinstance(texts, StoredTokens) and part is not None and part.is_indexed:
            texts.check_vocabulary(tokenizer.vocab_size)
        elif part is not None and texts is not None and not isinstance(texts, StoredTokens):
            part.fit.check(texts, faults)
    faults.check()
    if corpus is not None and counts is not None and is_first:
        corpus.log_missing_stops(counts)
    if corpus is None or dataset is None or counts is None or corpus.cache is None or was_cached:
        return inputs
    corpus.cache.save(dataset.fingerprint, counts)
    return replace(inputs, token_counts=counts.tokens)


def _read(part: TextSet[Any], faults: Faults) -> list[Any] | StoredTokens:
    """The texts of `part` in memory, or its tokens in files."""
    before = len(faults)
    stored = part.open_tokens(faults)
    return stored if stored is not None else [] if len(faults) > before else list(part.read(faults))


def _as_dataset(texts: list[Any] | StoredTokens | None) -> TextDataset[Any] | None:
    return texts if texts is None or isinstance(texts, StoredTokens) else TextDataset(texts)


def _spot_check(part: TextSet[Any], texts: TextDataset[Any]) -> TokenCounts | None:
    """The cached token counts of `texts`; None if there are none, or if some texts, counted again, differ from them."""
    counts = part.cached_counts(texts.fingerprint)
    if counts is None:
        return None
    indices = np.unique(np.linspace(0, len(texts) - 1, _SPOT_CHECKS).astype(np.int64))
    try:
        if np.array_equal(
            token_counts([texts[index] for index in indices.tolist()], part.fit.tokenizer), counts.tokens[indices]
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


def read_prompts(config: JobConfig, tokenizer: Tokenizer, paths: Sequence[PathLike] | None) -> list[Prompt]:
    """Prompts of `paths`, by default of the job's held-out file, else of its training prompts.

    Raises DataError naming every line that cannot be used.
    """
    data = config.actor_train.data_args
    files = paths or data.held_out_prompts(config.eval_samples) or data.prompts
    if files is None:
        raise ConfigError("the run's configuration names no file of prompts: name one")
    fit = Fit(
        tokenizer=tokenizer,
        max_length=config.prompt_length,
        setting="prompt_length",
        keys=(data.messages or data.prompt, data.response),
        leaves_out=data.long_prompts == "drop",
    )
    faults = Faults()
    texts = prompts_of(data, files, fit)
    prompts = list(texts.read(faults))
    fit.check(prompts, faults)
    faults.check()
    return texts.drop_long(prompts)


def prompt_of(text: str, config: JobConfig, tokenizer: Tokenizer) -> Prompt:
    """Makes a prompt of `text`; of a user's message if the job's prompts are chats."""
    data = config.actor_train.data_args
    if data.messages is None and not data.chat:
        return Prompt(text, "")
    return Prompt(ChatTemplate(tokenizer).prompt([{"role": "user", "content": text}], data.chat_template_kwargs), "")


def _join_digests(digests: Iterable[str | None]) -> str:
    return "/".join(digest or "-" for digest in digests)
