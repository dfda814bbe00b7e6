"""What a job reads before it starts: texts, tokenizer, reward function.

All texts are read and checked once, by whoever starts the processes (`check_inputs`). The processes compare what they
read with what was checked, by fingerprint, and check only what differs: under another launcher, everything. Texts to
learn from are tokenised to be checked; how many tokens they have is kept, so that the next start need not.
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
from roll_batching.jobs.texts.fit import AT_ONCE, Fit, token_counts
from roll_batching.jobs.texts.jsonl import PathLike, as_files
from roll_batching.jobs.texts.kept_counts import FOLDER, KeptCounts
from roll_batching.jobs.texts.texts import (
    Conversation,
    Document,
    Fingerprint,
    Instruction,
    Pair,
    Prompt,
    PromptDataset,
    T,
    TextDataset,
    iterate_texts,
)
from roll_batching.jobs.texts.tokenizers import CharTokenizer, HFTokenizer, Tokenizer
from roll_batching.planning.arrays import Ints

logger = logging.getLogger(__name__)

_LOOKED_AT = 16
"""Texts that are tokenised before kept counts are believed."""
CHECKED = "ROLL_BATCHING_CHECKED"
"""Variable by which the processes hear which texts were checked: their fingerprint."""


@dataclass(frozen=True, kw_only=True)
class JobInputs:
    """Everything from outside, read and checked. A part that the job does not need is None."""

    tokenizer: Tokenizer
    corpus: TextDataset[Any] | None
    """Documents or conversations of the warm-up; what a job of task sft or dpo (pairs) learns from."""
    validation: TextDataset[Any] | None
    """sft and dpo: what is held out."""
    token_counts: Ints | None
    """sft and dpo: of what is learnt from, as `data.fit.token_counts` has them; None where nobody kept them."""
    prompts: PromptDataset | None
    """Training prompts of the RL phase."""
    heldout: PromptDataset | None
    """Prompts to evaluate with."""
    reward: RewardPool | None
    """Not yet started."""

    @property
    def fingerprint(self) -> str:
        """Digest of all texts: ranks that read different files have different ones."""
        parts = (self.corpus, self.prompts, self.heldout or self.validation)
        return _joined(None if part is None else part.fingerprint for part in parts)


@dataclass(frozen=True, kw_only=True)
class _Texts(Generic[T]):
    """One of the sets of texts that a job reads."""

    kind: type[T]
    paths: PathLike | Sequence[PathLike]
    fit: Fit
    template: ChatTemplate | None = None
    """What makes prompts of messages."""
    instruction: Instruction | None = None
    """What makes messages of texts."""
    kept: KeptCounts | None = None
    """Their token counts from earlier starts, where they are kept."""

    def known(self, fingerprint: str) -> Ints | None:
        """Token counts of the texts with this fingerprint, of which an earlier start has seen that all fit."""
        counts = None if self.kept is None else self.kept.of(fingerprint)
        return None if counts is None or int(counts.max(initial=0)) > self.fit.max_length else counts

    def short_enough(self, texts: list[T]) -> list[T]:
        """Those of `texts` that are not left out. Raises DataError where that is none."""
        if not self.fit.leaves_out:
            return texts
        try:
            counts = token_counts(texts, self.fit.tokenizer)
        except Exception:  # the check that follows says of which text
            return texts
        kept = [text for text, fits in zip(texts, counts <= self.fit.max_length, strict=True) if fits]
        if not kept:
            raise DataError(
                f"every prompt of {self.paths} has more than {self.fit.max_length:,} tokens, and long_prompts: drop "
                f"leaves nothing: raise {self.fit.setting}"
            )
        if len(kept) < len(texts) and os.environ.get("RANK", "0") == "0":
            logger.warning(
                "%d of %d prompts of %s have more than %s tokens (%s), up to %s, and are left out: long_prompts is "
                "drop",
                *(len(texts) - len(kept), len(texts), self.paths),
                *(f"{self.fit.max_length:,}", self.fit.setting, f"{int(counts.max()):,}"),
            )
        return kept

    def read(self, faults: Faults, read: Callable[[int], None] = lambda size: None) -> Iterator[T]:
        """The texts, one by one."""
        return iterate_texts(
            self.kind, self.paths, self.fit.keys, faults, read, template=self.template, instruction=self.instruction
        )


def check_inputs(job: JobConfig) -> dict[str, str]:
    """Reads all texts that `job` names, line by line, and shows how far it is.

    Returns the variable that tells the processes that this was done. Raises DataError naming every line that cannot
    be used, or ConfigError naming what cannot be found or does not fit the model.
    """
    parts = _parts(job, _tokenizer_that_fits(job))
    given = [part for part in parts if part is not None]
    files = [file for part in given for file in as_files(part.paths) if file.is_file()]
    faults = Faults()
    with ReadingProgress("checking the data files", sum(file.stat().st_size for file in files)) as progress:
        checked = [None if part is None else _checked(part, faults, progress.read) for part in parts]
    faults.check()
    for part, found in zip(parts, checked, strict=True):
        fingerprint, counts = found or ("", None)
        if part is not None and part.kept is not None and counts is not None:
            part.kept.keep(fingerprint, counts)
    return {CHECKED: _joined(None if found is None else found[0] for found in checked)}


def _checked(part: _Texts[Any], faults: Faults, read: Callable[[int], None]) -> tuple[str, Ints | None]:
    """Fingerprint of the texts, and their token counts; None where these were known, so that nothing was tokenised."""
    if part.kept is not None and part.kept.any():
        digest, unreadable = Fingerprint(), Faults()
        for text in part.read(unreadable, read):
            digest.add(text)
        if not len(unreadable) and part.known(digest.value()) is not None:
            return digest.value(), None
    digest, counts = Fingerprint(), []
    texts = part.read(faults, read)
    while some := list(islice(texts, AT_ONCE)):
        counts.append(part.fit.check(some, faults))
        for text, count in zip(some, counts[-1], strict=True):
            if not part.fit.leaves_out or count <= part.fit.max_length:
                digest.add(text)
    return digest.value(), np.concatenate(counts) if counts else np.zeros(0, dtype=np.int64)


def load_inputs(job: JobConfig) -> JobInputs:
    """Read what `job` names, and check what the launcher has not.

    Raises DataError naming every line that cannot be used, or ConfigError naming what cannot be found or does not fit
    the model.
    """
    tokenizer = _tokenizer_that_fits(job)
    corpus, prompts, heldout = _parts(job, tokenizer)
    faults = Faults()
    documents = None if corpus is None else list(corpus.read(faults))
    training = None if prompts is None else list(prompts.read(faults))
    evaluation = None if heldout is None else list(heldout.read(faults))
    faults.check()
    if prompts is not None and training is not None:
        training = prompts.short_enough(training)
    if heldout is not None and evaluation is not None:
        evaluation = heldout.short_enough(evaluation)
    learnt = None if documents is None else TextDataset(documents)
    inputs = JobInputs(
        tokenizer=tokenizer,
        corpus=learnt,
        token_counts=None if corpus is None or learnt is None else _looked_at(corpus, learnt),
        prompts=None if training is None else PromptDataset(training),
        heldout=None if evaluation is None or supervised(job) else PromptDataset(evaluation),
        validation=TextDataset(evaluation) if evaluation is not None and supervised(job) else None,
        reward=reward_of(job),
    )
    if inputs.fingerprint == os.environ.get(CHECKED):
        return inputs
    counts = None
    if corpus is not None and learnt is not None and inputs.token_counts is None:
        counts = corpus.fit.check(learnt, faults)
    for one, texts in ((prompts, training), (heldout, evaluation)):
        if one is not None:
            one.fit.check(texts or (), faults)
    faults.check()
    if corpus is None or learnt is None or counts is None or corpus.kept is None:
        return inputs
    corpus.kept.keep(learnt.fingerprint, counts)
    return replace(inputs, token_counts=counts)


def _looked_at(part: _Texts[Any], texts: TextDataset[Any]) -> Ints | None:
    """Token counts of `texts` that are kept; None where there are none, or those of a few texts are others."""
    counts = part.known(texts.fingerprint)
    if counts is None:
        return None
    some = np.unique(np.linspace(0, len(texts) - 1, _LOOKED_AT).astype(np.int64))
    try:
        if np.array_equal(token_counts([texts[place] for place in some.tolist()], part.fit.tokenizer), counts[some]):
            return counts
    except Exception:  # whatever the tokenizer raises now: whoever counts all of them says of which text
        pass
    if part.kept is not None:
        part.kept.forget(texts.fingerprint)
    logger.warning("the kept token counts of %s are others than now: all tokens are counted again", part.paths)
    return None


def _parts(job: JobConfig, tokenizer: Tokenizer) -> tuple[_Texts[Any] | None, _Texts[Any] | None, _Texts[Any] | None]:
    """Corpus, prompts and what is held out, those of them that `job` reads.

    Raises DataError for messages without a chat template.
    """
    if supervised(job):
        learnt, held_out = _supervised_parts(job, tokenizer)
        return learnt, None, held_out
    data, warmup, rl = job.actor_train.data_args, job.warmup, job.max_steps > 0
    corpus = prompts = heldout = None
    if warmup is not None:
        fit = Fit(
            tokenizer=tokenizer,
            **_longest(
                job,
                job.sequence_length or 1,
                "sequence_length (prompt_length + response_length where it is not given)",
            ),
            keys=(warmup.prompt, warmup.response) if warmup.messages is None else (warmup.messages,),
        )
        if warmup.messages is not None:
            ChatTemplate(tokenizer)  # said now, not of every line
        kind = Document if warmup.messages is None else Conversation
        corpus = _Texts(kind=kind, paths=warmup.file_name, fit=fit)
    if rl:
        assert data.file_name is not None  # check_runnable
        fit = Fit(
            tokenizer=tokenizer,
            max_length=job.prompt_length,
            setting="prompt_length",
            keys=(data.messages or data.prompt, data.response),
            leaves_out=data.long_prompts == "drop",
            unjudged=_unjudged(job),
        )
        trained = fit if fit.leaves_out else replace(fit, **_longest(job, job.prompt_length, "prompt_length", answer=1))
        prompts = _prompts(data, data.file_name, trained)
        if data.eval_file_name is not None and job.eval_samples:
            heldout = _prompts(data, data.eval_file_name, fit)
    return corpus, prompts, heldout


def _longest(job: JobConfig, length: int, key: str, answer: int = 0) -> dict[str, Any]:
    """`max_length` and `setting` of texts to train on: `length`, or less where one micro-batch takes no more.

    A text and the `answer` tokens that follow at least fill a micro-batch; under `oversize: error` a longer one would
    end the job in its first step.
    """
    role = job.actor_train
    passes = role.batching().train
    if passes.oversize != "error" or passes.max_tokens is None or passes.max_tokens - answer >= length:
        return {"max_length": length, "setting": key}
    beside = f" ({answer} of its {passes.max_tokens:,} for the response)" if answer else ""
    return {"max_length": passes.max_tokens - answer, "setting": f"actor_train.{role.train_cap_key}{beside}"}


def _unjudged(job: JobConfig) -> Callable[[Prompt], str]:
    """What is said of a prompt that no reward judges."""
    reward = reward_of(job)
    assert reward is not None, "an RL job has a reward"
    return lambda prompt: reward.unjudged(prompt.extra)


def read_prompts(
    job: JobConfig, tokenizer: Tokenizer, paths: Sequence[PathLike] | None, *, answers: bool = True
) -> list[Prompt]:
    """Prompts of `paths`, in the job's keys; of its held-out file, else of its prompts, where none are given.

    Lines need no answer where `answers` is False. Raises DataError naming every line that cannot be used.
    """
    data = job.actor_train.data_args
    found = paths or data.eval_file_name or data.file_name
    if found is None:
        raise ConfigError("the run's configuration names no file of prompts: name one")
    keys = (data.messages or data.prompt, data.response)[: 2 if answers else 1]
    fit = Fit(
        tokenizer=tokenizer,
        max_length=job.prompt_length,
        setting="prompt_length",
        keys=keys,
        leaves_out=data.long_prompts == "drop",
    )
    faults = Faults()
    texts = _prompts(data, found, fit)
    prompts = list(texts.read(faults))
    fit.check(prompts, faults)
    faults.check()
    return texts.short_enough(prompts)


def _prompts(data: DataArgs, paths: PathLike | Sequence[PathLike], fit: Fit) -> _Texts[Prompt]:
    """Prompts of `paths`. Raises DataError for chats without a chat template."""
    template = ChatTemplate(fit.tokenizer) if data.messages is not None or data.chat else None
    return _Texts(kind=Prompt, paths=paths, fit=fit, template=template, instruction=_instruction(data))


def _instruction(data: DataArgs) -> Instruction | None:
    return Instruction(data.query, data.system) if data.chat else None


def prompt_of(text: str, job: JobConfig, tokenizer: Tokenizer) -> Prompt:
    """`text` as one of the job's prompts: what a user says, where its prompts are chats."""
    data = job.actor_train.data_args
    if data.messages is None and not data.chat:
        return Prompt(text, "")
    return Prompt(ChatTemplate(tokenizer).prompt([{"role": "user", "content": text}]), "")


def _supervised_parts(job: JobConfig, tokenizer: Tokenizer) -> tuple[_Texts[Any], _Texts[Any] | None]:
    """What a job of task sft or dpo learns from, and what it holds out."""
    data = job.actor_train.data_args
    assert data.file_name is not None  # check_runnable
    chat = data.messages is not None or data.chat
    template, instruction = ChatTemplate(tokenizer) if chat else None, _instruction(data)
    kind: type[Any] = Pair
    keys: tuple[str, ...] = (data.messages or data.prompt, data.chosen, data.rejected)
    if job.task == "sft":
        kind, keys = Conversation if chat else Document, (data.prompt, data.response)
        if data.messages is not None:
            keys = (data.messages,)
    held_out = Fit(tokenizer=tokenizer, max_length=job.sequence_length or 1, setting="sequence_length", keys=keys)
    fit = replace(held_out, **_longest(job, held_out.max_length, "sequence_length"))
    form = f"{kind.__name__} of messages" if chat else kind.__name__
    kept = KeptCounts(Path(job.output_dir) / FOLDER, tokenizer, form)
    corpus = _Texts(kind=kind, paths=data.file_name, fit=fit, template=template, instruction=instruction, kept=kept)
    if data.eval_file_name is None or not job.eval_samples:
        return corpus, None
    return corpus, replace(corpus, paths=data.eval_file_name, fit=held_out, kept=None)


def _joined(digests: Iterable[str | None]) -> str:
    return "/".join(digest or "-" for digest in digests)


def load_tokenizer(job: JobConfig) -> Tokenizer:
    """The tokenizer that `job.tokenizer` describes. Raises DataError or ConfigError when it cannot be made."""
    wanted = job.tokenizer
    if wanted.type == "hf":
        if wanted.name_or_path is None:
            raise ConfigError("tokenizer.name_or_path is missing, and actor_train names no model to take it from")
        model = job.actor_train.model_args.model_name_or_path
        return HFTokenizer(wanted.name_or_path, eos=wanted.eos_token, pad=wanted.pad_token, model=model)
    if wanted.eos_token is None:
        raise ConfigError("tokenizer.eos_token is missing: a char tokenizer needs a character that ends responses")
    if wanted.vocabulary_file is not None:
        return CharTokenizer.from_file(wanted.vocabulary_file, wanted.eos_token, wanted.pad_token)
    return CharTokenizer(wanted.vocabulary or "", wanted.eos_token, wanted.pad_token)


def _tokenizer_that_fits(job: JobConfig) -> Tokenizer:
    tokenizer = load_tokenizer(job)
    model = job.actor_train.model_args.architecture
    if model is not None and tokenizer.vocab_size > model.vocab_size:
        raise ConfigError(
            f"the tokenizer has {tokenizer.vocab_size} tokens, the model a vocab_size of {model.vocab_size}: "
            "raise actor_train.model_args.architecture.vocab_size"
        )
    return tokenizer
