"""Whether texts fit: how many tokens they have, and whether the tokenizer knows them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from roll_batching.data.chat import ChatTemplate
from roll_batching.data.faults import Faults
from roll_batching.data.texts import Conversation, Document, Pair, Prompt, Text
from roll_batching.data.tokenizers import Tokenizer, UnknownCharacterError, encode_many
from roll_batching.errors import DataError

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
    """The configuration keys that give `max_length`."""
    keys: tuple[str, ...]
    """Keys of the texts in a line: two, one for conversations, three for pairs."""
    tag: str = ""
    """Key of a prompt's tag."""
    tags: frozenset[str] | None = None
    """The tags that prompts may have; None: any, or none."""

    def check(self, items: Sequence[Text], faults: Faults) -> None:
        """Notes in `faults` what does not fit, naming file, line, key and cure."""
        for start in range(0, len(items), AT_ONCE):
            some = items[start : start + AT_ONCE]
            single = [one for item in some for one in (item.documents if isinstance(item, Pair) else (item,))]
            self._check_some(single, faults)

    def _check_some(self, items: Sequence[Text], faults: Faults) -> None:
        if any(isinstance(item, Conversation) for item in items):
            for item in items:
                self._check_one(item, faults)
            return
        try:
            prompts = encode_many(self.tokenizer, [item.prompt for item in items])
            rest = encode_many(self.tokenizer, [item.response for item in items if isinstance(item, Document)])
        except Exception:  # one of them at least; which, and why, is seen one by one
            for item in items:
                self._check_one(item, faults)
            return
        for number, item in enumerate(items):
            self._check_lengths(item, len(prompts[number]), len(rest[number]) + 1 if rest else 0, faults)

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
        if self.tags is not None and isinstance(item, Prompt) and str(item.extra.get(self.tag, "")) not in self.tags:
            what = f"no reward is for its tag ({self.tag!r}: {item.extra.get(self.tag)!r})"
            faults.add(item.source, what, "Name the tag in a tag_included of `rewards`, or remove the line.")
        if not prompt:
            faults.add(item.source, f"the prompt has no tokens ({self.keys[0]!r})", "Remove the line.")
        elif prompt + rest > self.max_length:
            what = too_long(item, prompt + rest, self.max_length)
            faults.add(item.source, what, self._shorter(item), tokens=prompt + rest)

    def _shorter(self, item: Text) -> str:
        keys = self.keys if isinstance(item, Document) else self.keys[:1]
        return f"Shorten {' or '.join(map(repr, keys))}, remove the line, or raise {self.setting}."


def tokens_of(text: str, tokenizer: Tokenizer, key: str) -> list[int]:
    """The tokens of `text`. Raises DataError, naming `key`, for whatever the tokenizer fails with."""
    try:
        return tokenizer.encode(text)
    except UnknownCharacterError as error:
        raise UnknownCharacterError(f"{key}: {error}", error.characters) from None
    except Exception as error:
        raise DataError(f"{key}: the tokenizer fails on it ({type(error).__name__}: {error})") from error


def too_long(item: Text, tokens: int, limit: int) -> str:
    """What is said of a text with more tokens than allowed."""
    if isinstance(item, Prompt):
        return f"the prompt has {tokens:,} tokens, more than the {limit:,} allowed (prompt_length)"
    if isinstance(item, Conversation):
        return f"the conversation has {tokens:,} tokens, more than the {limit:,} allowed (sequence_length)"
    return f"the document has {tokens:,} tokens, end token included, more than the {limit:,} allowed (sequence_length)"
