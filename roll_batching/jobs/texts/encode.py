"""Encodes texts as batches; errors name the text's file and line."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from roll_batching.errors import DataError
from roll_batching.jobs.texts.chat import ChatTemplate
from roll_batching.jobs.texts.fit import UNKNOWN, tokens_of, too_long
from roll_batching.jobs.texts.image_references import ImageError
from roll_batching.jobs.texts.image_tokenizer import ImageTokenizer, with_images
from roll_batching.jobs.texts.texts import Conversation, Document, Judged, Pair, Prompt, documents_of
from roll_batching.jobs.texts.token_ids import TokenIds
from roll_batching.jobs.texts.tokenizers import Tokenizer, encode_many
from roll_batching.samples.batch import SampleBatch
from roll_batching.samples.fields import FieldSpec


def encode_prompts(prompts: Sequence[Prompt], tokenizer: Tokenizer, *, max_length: int, ids: Any = None) -> SampleBatch:
    """Encodes prompts as a batch with `input_ids` (token, int64), in order; `with_images` adds fields of images.

    Args:
        prompts: at least one.
        tokenizer: encodes text.
        max_length: longest prompt in tokens.
        ids: one per prompt; by default 0, 1, 2, ...

    Raises:
        DataError: naming file and line: a prompt longer than `max_length` or without tokens, a character
            that the tokenizer does not know.
    """
    input_ids = [
        _expand(_encode(prompt.prompt, tokenizer, prompt.source, "the prompt"), prompt, tokenizer) for prompt in prompts
    ]
    for prompt, tokens in zip(prompts, input_ids, strict=True):
        if not tokens:
            raise DataError(f"{prompt.source}: the prompt has no tokens: give it text that this tokenizer encodes.")
        if len(tokens) > max_length:
            fault = too_long(prompt, len(tokens), max_length, "prompt_length")
            raise DataError(f"{prompt.source}: {fault}. Shorten it.")
    return SampleBatch.from_lists({"input_ids": input_ids}, {"input_ids": _token_field(tokenizer)}, ids)


def encode_documents(
    documents: Sequence[Document | Conversation | TokenIds], tokenizer: Tokenizer, *, max_length: int, ids: Any = None
) -> SampleBatch:
    """Encodes documents as prompt, response and end token; conversations through the chat template.

    Fields: `input_ids` (token, int64) and `response_mask` (token, bool: true on trained tokens, the response and the
    end token; in a conversation the assistant's turns; of token ids those that their record trains). With an
    `ImageTokenizer` also the fields of images.

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
    template = ChatTemplate(tokenizer) if isinstance(documents[0], Conversation) else None
    for document in documents:
        tokens, mask = _encode_with_mask(document, tokenizer, template)
        if len(tokens) > max_length:
            fault = too_long(document, len(tokens), max_length, "sequence_length")
            raise DataError(f"{document.source}: {fault}. Shorten it.")
        input_ids.append(tokens)
        masks.append(torch.tensor(mask))
    schema = {"input_ids": _token_field(tokenizer), "response_mask": FieldSpec("token", False)}
    batch = SampleBatch.from_lists({"input_ids": input_ids, "response_mask": masks}, schema, ids)
    return with_images(batch, documents, tokenizer)


def encode_pairs(pairs: Sequence[Pair], tokenizer: Tokenizer, *, max_length: int, ids: Any = None) -> SampleBatch:
    """Encodes each pair as two samples: the prompt with the chosen answer, then with the rejected answer.

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
    """Encodes judged answers as `encode_documents`, with `response_mask` true on the answers only.

    It adds the field `desirable` (sample, bool).
    """
    batch = _encode_answers(items, tokenizer, max_length, ids)
    verdicts = torch.tensor([item.desirable for item in items])
    return batch.with_fields({"desirable": verdicts}, {"desirable": FieldSpec("sample")})


def _encode_answers(items: Sequence[Pair | Judged], tokenizer: Tokenizer, max_length: int, ids: Any) -> SampleBatch:
    """Encodes prompt and answers of `items` as documents; in chats `response_mask` is true on the last turn only."""
    documents = [document for item in items for document in documents_of(item)]
    batch = encode_documents(documents, tokenizer, max_length=max_length, ids=ids)
    if not any(item.chat for item in items):
        return batch
    mask = torch.cat([_last_turn(mask) for mask in batch.to_lists("response_mask")])
    return batch.without("response_mask").with_fields(
        {"response_mask": mask}, {"response_mask": FieldSpec("token", False)}
    )


def _last_turn(mask: torch.Tensor) -> torch.Tensor:
    """Returns `mask`, bool[L], with only its last run of true values."""
    positions = mask.nonzero().flatten()
    gaps = (positions[1:] != positions[:-1] + 1).nonzero().flatten()
    first = int(gaps[-1]) + 1 if gaps.numel() else 0
    last_run = torch.zeros_like(mask)
    last_run[positions[first:]] = True
    return last_run


def _encode_with_mask(
    document: Document | Conversation | TokenIds, tokenizer: Tokenizer, template: ChatTemplate | None
) -> tuple[list[int], list[bool]]:
    """Returns the tokens of a document, and a mask of the trained tokens."""
    if isinstance(document, TokenIds):
        try:
            return document.checked_ids(tokenizer.vocab_size), document.trained.tolist()
        except DataError as error:
            raise DataError(f"{document.source}: {error}.") from None
    if isinstance(document, Conversation):
        assert template is not None
        try:
            tokens, mask = template.conversation(document.messages, document.variables)
        except DataError as error:
            raise DataError(f"{document.source}: {error}") from None
        return _expand_with_mask(tokens, mask, document, tokenizer)
    prompt = _expand(_encode(document.prompt, tokenizer, document.source, "the prompt"), document, tokenizer)
    response = [*_encode(document.response, tokenizer, document.source, "the response"), tokenizer.eos_token_id]
    if not prompt:
        raise DataError(f"{document.source}: the prompt has no tokens: give it text that this tokenizer encodes.")
    if isinstance(tokenizer, ImageTokenizer):
        tokenizer.expand(response, ())  # raises if the response holds tokens of images
    return prompt + response, [False] * len(prompt) + [True] * len(response)


def encode_many_with_masks(
    texts: Sequence[Any], tokenizer: Tokenizer
) -> list[tuple[Sequence[int], Sequence[bool], bool]]:
    """Encodes supervised texts without images as `encode_documents` does, on all cores where the tokenizer can.

    Returns the tokens of each, the mask of trained tokens, and whether a turn lacks its stop token. Errors of the
    tokenizer or chat template do not name the text.
    """
    if isinstance(texts[0], TokenIds):
        return [(item.checked_ids(tokenizer.vocab_size), item.trained.tolist(), False) for item in texts]
    if isinstance(texts[0], Conversation):
        template = ChatTemplate(tokenizer)
        encoded = [template.conversation(item.messages, item.variables) for item in texts]
        lacks = [template.lacks_stops(item.messages, *both) for item, both in zip(texts, encoded, strict=True)]
        return [(*both, lacking) for both, lacking in zip(encoded, lacks, strict=True)]
    prompts = encode_many(tokenizer, [item.prompt for item in texts])
    responses = encode_many(tokenizer, [item.response for item in texts])
    if not all(prompts):
        raise DataError("a prompt has no tokens")
    return [
        ([*prompt, *response, tokenizer.eos_token_id], [False] * len(prompt) + [True] * (len(response) + 1), False)
        for prompt, response in zip(prompts, responses, strict=True)
    ]


def _expand(tokens: list[int], item: Prompt | Document | Conversation, tokenizer: Tokenizer) -> list[int]:
    """Repeats the image tokens in `tokens` of `item`: one token for each merged patch of its images."""
    if not isinstance(tokenizer, ImageTokenizer):
        return tokens
    try:
        return tokenizer.expand(tokens, tokenizer.processor.count_tokens(item.images))
    except ImageError as error:
        raise DataError(f"{item.source}: {error.what}. {error.cure}") from None
    except DataError as error:
        raise DataError(f"{item.source}: {error}") from None


def _expand_with_mask(
    tokens: list[int], mask: list[bool], item: Conversation, tokenizer: Tokenizer
) -> tuple[list[int], list[bool]]:
    """`_expand` with the mask of trained tokens; tokens of images are never trained."""
    if not isinstance(tokenizer, ImageTokenizer):
        return tokens, mask
    expanded = _expand(tokens, item, tokenizer)
    trained = iter([marked for token, marked in zip(tokens, mask, strict=True) if token != tokenizer.image_token_id])
    return expanded, [token != tokenizer.image_token_id and next(trained) for token in expanded]


def _token_field(tokenizer: Tokenizer) -> FieldSpec:
    return FieldSpec("token", tokenizer.pad_token_id)


def _encode(text: str, tokenizer: Tokenizer, source: str, part: str) -> list[int]:
    try:
        return tokens_of(text, tokenizer, part)
    except DataError as error:
        raise DataError(f"{source}: {error}. {UNKNOWN}") from None
