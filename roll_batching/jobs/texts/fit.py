"""Whether texts fit: how many tokens they have, and whether the tokenizer knows them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from roll_batching.errors import DataError
from roll_batching.jobs.texts.chat import ChatTemplate
from roll_batching.jobs.texts.faults import Faults
from roll_batching.jobs.texts.texts import Conversation, Document, Pair, Prompt, Text
from roll_batching.jobs.texts.tokenizers import Tokenizer, UnknownCharacterError, encode_many
from roll_batching.planning.arrays import Ints

AT_ONCE = 1024
"""Texts that are encoded together."""
UNKNOWN = "Take such characters out of the text, or add them to tokenizer.vocabulary (and raise vocab_size)."


@dataclass(frozen=True, kw_only=True)
class Fit:
    """What the texts of a file must fit: prompts alone, or documents with response and end token."""

    tokenizer: Tokenizer
    max_length: int
    """Tokens."""
    setting: str
    """The configuration key that gives `max_length`, and in parentheses what there is to know of it."""
    keys: tuple[str, ...]
    """Keys of the texts in a line: two, one for conversations, three for pairs."""
    leaves_out: bool = False
    """Texts with more tokens are left out, and no fault."""
    unjudged: Callable[[Prompt], str] = lambda prompt: ""
    """What is said of a prompt that no reward judges; nothing of others."""

    def check(self, items: Sequence[Text], faults: Faults) -> Ints:
        """Notes in `faults` what does not fit, naming file, line, key and cure.

        Returns `token_counts` of `items`; without meaning where there are faults.
        """
        counts = [self._check_some(items[start : start + AT_ONCE], faults) for start in range(0, len(items), AT_ONCE)]
        return np.concatenate(counts) if counts else np.zeros(0, dtype=np.int64)

    def _check_some(self, items: Sequence[Text], faults: Faults) -> Ints:
        single = _single(items)
        try:
            counts = _counted(single, self.tokenizer)
        except Exception:  # one of them at least; which, and why, is seen one by one
            for item in single:
                self._check_one(item, faults)
            return np.zeros(len(items), dtype=np.int64)
        for item, (prompt, rest) in zip(single, counts.tolist(), strict=True):
            self._check_lengths(item, prompt, rest, faults)
        return _of_items(counts, items)

    def _check_one(self, item: Text, faults: Faults) -> None:
        try:
            if isinstance(item, Conversation):
                prompt, rest = len(ChatTemplate(self.tokenizer).conversation(item.messages)[0]), 0
                self._check_lengths(item, prompt, rest, faults)
                return
            prompt, rest = len(tokens_of(item.prompt, self.tokenizer, self.keys[0])), 0
            if isinstance(item, Document):
                rest = len(tokens_of(item.response, self.tokenizer, self.keys[1])) + 1
        except UnknownCharacterError as error:
            faults.add(item.source, str(error), UNKNOWN, characters=error.characters)
        except DataError as error:
            faults.add(item.source, str(error), "Remove the line, or write it anew.")
        else:
            self._check_lengths(item, prompt, rest, faults)

    def _check_lengths(self, item: Text, prompt: int, rest: int, faults: Faults) -> None:
        if isinstance(item, Prompt) and (what := self.unjudged(item)):
            faults.add(item.source, what, "Name the tag in a tag_included of `rewards`, or remove the line.")
        if not prompt:
            faults.add(item.source, f"the prompt has no tokens ({self.keys[0]!r})", "Remove the line.")
        elif prompt + rest > self.max_length and not self.leaves_out:
            what = too_long(item, prompt + rest, self.max_length, self.setting.partition(" (")[0])
            faults.add(item.source, what, self._shorter(item), tokens=prompt + rest)

    def _shorter(self, item: Text) -> str:
        keys = self.keys if isinstance(item, Document) else self.keys[:1]
        return f"Shorten {' or '.join(map(repr, keys))}, remove the line, or raise {self.setting}."


def token_counts(items: Sequence[Text], tokenizer: Tokenizer) -> Ints:
    """int64[n]: the tokens of each text, end token included; int64[n, 2]: of the two answers of each pair.

    Raises what the tokenizer or a chat template raises, without naming the text.
    """
    counts = [
        _of_items(_counted(_single(some), tokenizer), some)
        for some in (items[start : start + AT_ONCE] for start in range(0, len(items), AT_ONCE))
    ]
    return np.concatenate(counts) if counts else np.zeros(0, dtype=np.int64)


def _single(items: Sequence[Text]) -> list[Any]:
    """Each text, of a pair two."""
    return [one for item in items for one in (item.documents if isinstance(item, Pair) else (item,))]


def _of_items(counts: Ints, items: Sequence[Text]) -> Ints:
    """From int64[m, 2] of single texts to what `token_counts` gives."""
    whole = counts.sum(axis=1)
    return whole.reshape(-1, 2) if isinstance(items[0], Pair) else whole


def _counted(items: Sequence[Any], tokenizer: Tokenizer) -> Ints:
    """int64[n, 2]: tokens of the prompt, and of what follows it; of a conversation all of them, and 0."""
    if isinstance(items[0], Conversation):
        template = ChatTemplate(tokenizer)
        return np.array([(len(template.conversation(item.messages)[0]), 0) for item in items], dtype=np.int64)
    prompts = [len(tokens) for tokens in encode_many(tokenizer, [item.prompt for item in items])]
    rest = [0] * len(items)
    if isinstance(items[0], Document):
        rest = [len(tokens) + 1 for tokens in encode_many(tokenizer, [item.response for item in items])]
    return np.array([prompts, rest], dtype=np.int64).T


def tokens_of(text: str, tokenizer: Tokenizer, key: str) -> list[int]:
    """The tokens of `text`. Raises DataError, naming `key`, for whatever the tokenizer fails with."""
    try:
        return tokenizer.encode(text)
    except UnknownCharacterError as error:
        raise UnknownCharacterError(f"{key}: {error}", error.characters) from None
    except Exception as error:
        raise DataError(f"{key}: the tokenizer fails on it ({type(error).__name__}: {error})") from error


def too_long(item: Text, tokens: int, limit: int, key: str) -> str:
    """The fault of a text with more tokens than `limit`, which the configuration key `key` gives."""
    what = "prompt" if isinstance(item, Prompt) else "conversation" if isinstance(item, Conversation) else "document"
    ending = ", end token included" if what == "document" else ""
    return f"the {what} has {tokens:,} tokens{ending}, more than the {limit:,} allowed ({key})"
