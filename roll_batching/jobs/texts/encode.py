"""Texts to batches: the one place where a text that does not fit is named by file and line."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from roll_batching.errors import DataError
from roll_batching.jobs.texts.chat import ChatTemplate
from roll_batching.jobs.texts.fit import UNKNOWN, tokens_of, too_long
from roll_batching.jobs.texts.texts import Conversation, Document, Pair, Prompt
from roll_batching.jobs.texts.tokenizers import Tokenizer
from roll_batching.samples.batch import SampleBatch
from roll_batching.samples.fields import FieldSpec


def encode_prompts(prompts: Sequence[Prompt], tokenizer: Tokenizer, *, max_length: int, ids: Any = None) -> SampleBatch:
    """Prompts as a batch with `input_ids` (token, int64), in order.

    Args:
        prompts: at least one.
        tokenizer: turns text into tokens.
        max_length: longest prompt in tokens.
        ids: one per prompt; by default 0, 1, 2, ...

    Raises:
        DataError: naming file and line: a prompt longer than `max_length` or without tokens, a character
            that the tokenizer does not know.
    """
    rows = [_encode(prompt.prompt, tokenizer, prompt.source, "the prompt") for prompt in prompts]
    for prompt, row in zip(prompts, rows, strict=True):
        if not row:
            raise DataError(f"{prompt.source}: the prompt has no tokens.")
        if len(row) > max_length:
            raise DataError(f"{prompt.source}: {too_long(prompt, len(row), max_length, 'prompt_length')}. Shorten it.")
    return SampleBatch.from_lists({"input_ids": rows}, {"input_ids": _tokens(tokenizer)}, ids)


def encode_documents(
    documents: Sequence[Document | Conversation], tokenizer: Tokenizer, *, max_length: int, ids: Any = None
) -> SampleBatch:
    """Documents as a batch: prompt, response, end token; of a conversation what the chat template makes of it.

    Fields: `input_ids` (token, int64) and `response_mask` (token, bool: true on what is learnt, the response and the
    end token; in a conversation the assistant's turns).

    Args:
        documents: at least one.
        tokenizer: turns text into tokens.
        max_length: longest document in tokens, end token included.
        ids: one per document; by default 0, 1, 2, ...

    Raises:
        DataError: naming file and line: a document longer than `max_length`, a prompt without tokens, a
            character that the tokenizer does not know, a conversation that its template cannot take.
    """
    rows, masks = [], []
    for document in documents:
        row, mask = _learnt(document, tokenizer)
        if len(row) > max_length:
            fault = too_long(document, len(row), max_length, "sequence_length")
            raise DataError(f"{document.source}: {fault}. Shorten it.")
        rows.append(row)
        masks.append(torch.tensor(mask))
    schema = {"input_ids": _tokens(tokenizer), "response_mask": FieldSpec("token", False)}
    return SampleBatch.from_lists({"input_ids": rows, "response_mask": masks}, schema, ids)


def encode_pairs(pairs: Sequence[Pair], tokenizer: Tokenizer, *, max_length: int, ids: Any = None) -> SampleBatch:
    """Pairs as a batch of twice as many samples: of each the chosen answer, then the rejected one, after the prompt.

    Fields: those of `encode_documents`, true on the answers alone; `pair` (sample, int64: the pair's id) and `chosen`
    (sample, bool). The ids of the samples are twice the pair's, and one more.

    Args:
        pairs: at least one.
        tokenizer: turns text into tokens.
        max_length: longest prompt and answer in tokens, end token included.
        ids: one per pair; by default 0, 1, 2, ...

    Raises:
        DataError: as `encode_documents`.
    """
    numbers = torch.arange(len(pairs)) if ids is None else torch.as_tensor(ids, dtype=torch.int64)
    both = torch.stack([2 * numbers, 2 * numbers + 1], 1).flatten()
    documents: list[Document | Conversation] = [one for pair in pairs for one in pair.documents]
    batch = encode_documents(documents, tokenizer, max_length=max_length, ids=both)
    if any(pair.chat for pair in pairs):
        mask = torch.cat([_last_turn(row) for row in batch.to_lists("response_mask")])
        batch = batch.without("response_mask").with_fields(
            {"response_mask": mask}, {"response_mask": FieldSpec("token", False)}
        )
    sample = FieldSpec("sample")
    fields = {"pair": both // 2, "chosen": both % 2 == 0}
    return batch.with_fields(fields, {"pair": sample, "chosen": sample})


def _last_turn(mask: torch.Tensor) -> torch.Tensor:
    """bool[L]: the last run of what is true in `mask`, bool[L]."""
    places = mask.nonzero().flatten()
    gaps = (places[1:] != places[:-1] + 1).nonzero().flatten()
    first = int(gaps[-1]) + 1 if gaps.numel() else 0
    kept = torch.zeros_like(mask)
    kept[places[first:]] = True
    return kept


def _learnt(document: Document | Conversation, tokenizer: Tokenizer) -> tuple[list[int], list[bool]]:
    """The tokens of a document, and which of them are learnt."""
    if isinstance(document, Conversation):
        try:
            return ChatTemplate(tokenizer).conversation(document.messages)
        except DataError as error:
            raise DataError(f"{document.source}: {error}") from None
    prompt = _encode(document.prompt, tokenizer, document.source, "the prompt")
    response = [*_encode(document.response, tokenizer, document.source, "the response"), tokenizer.eos_token_id]
    if not prompt:
        raise DataError(f"{document.source}: the prompt has no tokens.")
    return prompt + response, [False] * len(prompt) + [True] * len(response)


def _tokens(tokenizer: Tokenizer) -> FieldSpec:
    return FieldSpec("token", tokenizer.pad_token_id)


def _encode(text: str, tokenizer: Tokenizer, source: str, what: str) -> list[int]:
    try:
        return tokens_of(text, tokenizer, what)
    except DataError as error:
        raise DataError(f"{source}: {error}. {UNKNOWN}") from None
