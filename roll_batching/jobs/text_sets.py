"""The sets of texts that a job reads: their files, keys, limits and chat template."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic

from roll_batching.errors import DataError
from roll_batching.jobs.config import DataArgs, JobConfig
from roll_batching.jobs.rewards.pool import reward_of
from roll_batching.jobs.texts.chat import ChatTemplate
from roll_batching.jobs.texts.faults import Faults
from roll_batching.jobs.texts.fit import Fit, token_counts
from roll_batching.jobs.texts.image_references import ImageFields
from roll_batching.jobs.texts.image_tokenizer import image_fields
from roll_batching.jobs.texts.jsonl import PathLike
from roll_batching.jobs.texts.template_arguments import NO_ARGUMENTS, TemplateArguments
from roll_batching.jobs.texts.texts import Conversation, Document, Instruction, Judged, Pair, Prompt, T, iterate_texts
from roll_batching.jobs.texts.token_count_cache import FOLDER, TokenCountCache, TokenCounts
from roll_batching.jobs.texts.tokenizers import Tokenizer

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class TextSet(Generic[T]):
    """One of the sets of texts that a job reads, and its limits."""

    kind: type[T]
    paths: PathLike | Sequence[PathLike]
    fit: Fit
    template: ChatTemplate | None = None
    """Chat template, for prompts from messages."""
    instruction: Instruction | None = None
    """Keys of a chat's texts, for messages from texts."""
    images: ImageFields | None = None
    arguments: TemplateArguments = NO_ARGUMENTS
    """What the chat template gets beside messages."""
    cache: TokenCountCache | None = None
    """Token counts of earlier starts."""

    def cached_counts(self, fingerprint: str) -> TokenCounts | None:
        """Cached token counts of the texts with this fingerprint, if all of them fit."""
        counts = None if self.cache is None else self.cache.load(fingerprint)
        return None if counts is None or int(counts.tokens.max(initial=0)) > self.fit.max_length else counts

    def log_template_notices(self, texts: Iterable[T]) -> None:
        """Logs which keys of `texts` and the chat template miss each other."""
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
            arguments=self.arguments,
        )


def text_sets_of(
    config: JobConfig, tokenizer: Tokenizer
) -> tuple[TextSet[Any] | None, TextSet[Any] | None, TextSet[Any] | None]:
    """Corpus, prompts and held-out texts, those of them that `config` names.

    Raises DataError for messages without a chat template.
    """
    if config.is_supervised:
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
        kind, ways = (Document, {}) if warmup.messages is None else (Conversation, _template_of(data, tokenizer))
        corpus = TextSet(kind=kind, paths=warmup.file_name, fit=fit, **ways)
    if rl:
        assert data.file_name is not None  # check_runnable
        fit = Fit(
            tokenizer=tokenizer,
            max_length=config.prompt_length,
            setting="prompt_length",
            keys=(data.messages or data.prompt, data.response),
            leaves_out=data.long_prompts == "drop",
            reward_fault=_missing_reward(config),
        )
        trained = (
            fit if fit.leaves_out else replace(fit, **_limit(config, config.prompt_length, "prompt_length", answer=1))
        )
        prompts = prompts_of(data, data.file_name, trained)
        if data.eval_file_name is not None and config.eval_samples:
            heldout = prompts_of(data, data.eval_file_name, fit)
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
    return lambda prompt: reward.unjudged(prompt.line)


def prompts_of(data: DataArgs, paths: PathLike | Sequence[PathLike], fit: Fit) -> TextSet[Prompt]:
    """The text set of `paths`. Raises DataError for chats without a chat template."""
    ways = _template_of(data, fit.tokenizer) if data.messages is not None or data.chat else {}
    images = image_fields(data.images, fit.tokenizer)
    return TextSet(kind=Prompt, paths=paths, fit=fit, instruction=_instruction(data), images=images, **ways)


def _template_of(data: DataArgs, tokenizer: Tokenizer) -> dict[str, Any]:
    """The chat template of a text set, and what it gets beside messages.

    Raises DataError without a template, ConfigError for settings of variables that it does not read.
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
    held_out = Fit(tokenizer=tokenizer, max_length=config.sequence_length or 1, setting="sequence_length", keys=keys)
    fit = replace(held_out, **_limit(config, held_out.max_length, "sequence_length"))
    form = kind.__name__ + (" of messages" if chat else "")
    cache = TokenCountCache(Path(config.output_dir) / FOLDER, tokenizer, form)
    ways = _template_of(data, tokenizer) if chat else {}
    ways |= {"instruction": _instruction(data), "cache": cache, "images": image_fields(data.images, tokenizer)}
    corpus = TextSet(kind=kind, paths=data.file_name, fit=fit, **ways)
    if data.eval_file_name is None or not config.eval_samples:
        return corpus, None
    return corpus, replace(corpus, paths=data.eval_file_name, fit=held_out, cache=None)
