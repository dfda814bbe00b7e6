"""Encodes texts as batches; errors name the text's file and line."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from roll_batching.errors import DataError
from roll_batching.jobs.texts.chat import ChatTemplate
from roll_batching.jobs.texts.fit import UNKNOWN, tokens_of, too_long
from roll_batching.jobs.texts.texts import Conversation, Document, Judged, Pair, Prompt
from roll_batching.jobs.texts.tokenizers import Tokenizer
from roll_batching.samples.batch import SampleBatch
from roll_batching.samples.fields import FieldSpec


def encode_prompts(prompts: Sequence[Prompt], tokenizer: Tokenizer, *, max_length: int, ids: Any = None) -> SampleBatch:
    """Prompts as a batch with `input_ids` (token, int64), in order.

    Args:
        prompts: at least one.
        tokenizer: encodes text.
        max_length: longest prompt in tokens.
        ids: one per prompt; by default 0, 1, 2, ...

    Raises:
        DataError: naming file and line: a prompt longer than `max_length` or without tokens, a character
            that the tokenizer does not know.
    """
    input_ids = [_encode(prompt.prompt, tokenizer, prompt.source, "the prompt") for prompt in prompts]
    for prompt, tokens in zip(prompts, input_ids, strict=True):
        if not tokens:
            raise DataError(f"{prompt.source}: the prompt has no tokens.")
        if len(tokens) > max_length:
            fault = too_long(prompt, len(tokens), max_length, "prompt_length")
            raise DataError(f"{prompt.source}: {fault}. Shorten it.")
    return SampleBatch.from_lists({"input_ids": input_ids}, {"input_ids": _token_field(tokenizer)}, ids)


def encode_documents(
    documents: Sequence[Document | Conversation], tokenizer: Tokenizer, *, max_length: int, ids: Any = None
) -> SampleBatch:
    """Documents as a batch of prompt, response and end token; conversations through the chat template.

    Fields: `input_ids` (token, int64) and `response_mask` (token, bool: true on trained tokens, the response and the
    end token; in a conversation the assistant's turns).

    Args:
        documents: at least one.
        tokenizer: encodes text.
        max_length: longest document in tokens, end token included.
        ids: one per document; by default 0, 1, 2, ...

    Raises:
        DataError: naming file and line: a document longer than `max_length`, a prompt without tokens, a
            character that the tokenizer does not know, a conversation that the chat template refuses.
    """
    input_ids, masks = [], []
    for document in documents:
        tokens, mask = _encode_with_mask(document, tokenizer)
        if len(tokens) > max_length:
            fault = too_long(document, len(tokens), max_length, "sequence_length")
            raise DataError(f"{document.source}: {fault}. Shorten it.")
        input_ids.append(tokens)
        masks.append(torch.tensor(mask))
    schema = {"input_ids": _token_field(tokenizer), "response_mask": FieldSpec("token", False)}
    return SampleBatch.from_lists({"input_ids": input_ids, "response_mask": masks}, schema, ids)


def encode_pairs(pairs: Sequence[Pair], tokenizer: Tokenizer, *, max_length: int, ids: Any = None) -> SampleBatch:
    """Pairs as a batch of two samples each: the prompt with the chosen answer, then with the rejected one.

    Fields: those of `encode_documents`, with `response_mask` true on the answers only; `pair` (sample, int64: id of
    the pair) and `chosen` (sample, bool). The sample ids of pair p are 2p and 2p + 1.

    Args:
        pairs: at least one.
        tokenizer: encodes text.
        max_length: longest prompt and answer in tokens, end token included.
        ids: one per pair; by default 0, 1, 2, ...

    Raises:
        DataError: as `encode_documents`.
    """
    pair_ids = torch.arange(len(pairs)) if ids is None else torch.as_tensor(ids, dtype=torch.int64)
    sample_ids = torch.stack([2 * pair_ids, 2 * pair_ids + 1], 1).flatten()
    batch = _encode_answers(pairs, tokenizer, max_length, sample_ids)
    sample = FieldSpec("sample")
    fields = {"pair": sample_ids // 2, "chosen": sample_ids % 2 == 0}
    return batch.with_fields(fields, {"pair": sample, "chosen": sample})


def encode_judged(items: Sequence[Judged], tokenizer: Tokenizer, *, max_length: int, ids: Any = None) -> SampleBatch:
    """Judged answers as a batch: as `encode_documents`, with `response_mask` true on the answers only.

    Fields beside those: `desirable` (sample, bool).
    """
    batch = _encode_answers(items, tokenizer, max_length, ids)
    verdicts = torch.tensor([item.desirable for item in items])
    return batch.with_fields({"desirable": verdicts}, {"desirable": FieldSpec("sample")})


def _encode_answers(items: Sequence[Pair | Judged], tokenizer: Tokenizer, max_length: int, ids: Any) -> SampleBatch:
    """The documents of `items`; in chats only the last turn counts."""
    documents: list[Document | Conversation] = [document for item in items for document in item.documents]
    batch = encode_documents(documents, tokenizer, max_length=max_length, ids=ids)
    if not any(item.chat for item in items):
        return batch
    mask = torch.cat([_last_turn(mask) for mask in batch.to_lists("response_mask")])
    return batch.without("response_mask").with_fields(
        {"response_mask": mask}, {"response_mask": FieldSpec("token", False)}
    )


def _last_turn(mask: torch.Tensor) -> torch.Tensor:
    """`mask`, bool[L], with only its last run of true values."""
    places = mask.nonzero().flatten()
    gaps = (places[1:] != places[:-1] + 1).nonzero().flatten()
    first = int(gaps[-1]) + 1 if gaps.numel() else 0
    last = torch.zeros_like(mask)
    last[places[first:]] = True
    return last


def _encode_with_mask(document: Document | Conversation, tokenizer: Tokenizer) -> tuple[list[int], list[bool]]:
    """The tokens of a document, and a mask of the trained ones."""
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


def _token_field(tokenizer: Tokenizer) -> FieldSpec:
    return FieldSpec("token", tokenizer.pad_token_id)


def _encode(text: str, tokenizer: Tokenizer, source: str, part: str) -> list[int]:
    try:
        return tokens_of(text, tokenizer, part)
    except DataError as error:
        raise DataError(f"{source}: {error}. {UNKNOWN}") from None
