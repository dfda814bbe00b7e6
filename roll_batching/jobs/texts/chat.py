"""Chats through the tokenizer's chat template: as a prompt, or as a conversation with its trained tokens."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from roll_batching.errors import DataError
from roll_batching.jobs.texts.tokenizers import HFTokenizer, Tokenizer

Message = Mapping[str, Any]
"""`role`, `content`, and other keys that the template reads."""
ASSISTANT = "assistant"
_MARKER = re.compile(r"\{%-?\s*generation\s*-?%\}")


class ChatTemplate:
    """The chat template of a Hugging Face tokenizer.

    Raises:
        DataError: for another tokenizer, or one without a template.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        if not isinstance(tokenizer, HFTokenizer):
            raise DataError("chats (messages, or chat: true) need a tokenizer with a chat template: tokenizer.type hf")
        if not tokenizer.tokenizer.chat_template:
            raise DataError(
                f"the tokenizer {tokenizer.name!r} has no chat template, which chats need: add chat_template.jinja "
                "to its folder, or write prompts as texts"
            )
        self._tokenizer = tokenizer
        self._has_markers = _MARKER.search(str(tokenizer.tokenizer.chat_template)) is not None

    def prompt(self, messages: Sequence[Message]) -> str:
        """The text before the assistant's next turn. Raises DataError if it spoke last, or the template fails."""
        if messages[-1]["role"] == ASSISTANT:
            raise DataError("the last message is the assistant's: a prompt ends with a message of another role")
        return self._text(messages, open_turn=True)

    def conversation(self, messages: Sequence[Message]) -> tuple[list[int], list[bool]]:
        """The tokens of a whole conversation, and a mask of the assistant's, which are trained.

        Where the template marks the assistant's turns (`{% generation %}`), these are the turns. Otherwise a turn is
        the difference between the conversation that ends with it and the prompt before it, up to its last stop token.

        Raises:
            DataError: without a turn of the assistant; and, without markers, when the template's text or tokens of the
                first messages are not a prefix of those of the whole conversation.
        """
        if not any(message["role"] == ASSISTANT for message in messages):
            raise DataError("no message is the assistant's: there is no token to train")
        return self._by_markers(messages) if self._has_markers else self._by_prefixes(messages)

    def _by_markers(self, messages: Sequence[Message]) -> tuple[list[int], list[bool]]:
        encoded = self._apply(messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
        mask = [bool(value) for value in encoded["assistant_masks"]]
        if not any(mask):
            raise DataError("the chat template marks no token of it as the assistant's ({% generation %})")
        return list(encoded["input_ids"]), mask

    def _by_prefixes(self, messages: Sequence[Message]) -> tuple[list[int], list[bool]]:
        whole = self._text(messages)
        tokens = self._tokenizer.encode(whole)
        mask = [False] * len(tokens)
        for number, message in enumerate(messages):
            if message["role"] != ASSISTANT:
                continue
            before, after = self._text(messages[:number], open_turn=True), self._text(messages[: number + 1])
            if not (whole.startswith(after) and after.startswith(before)):
                raise DataError(
                    f"the chat template renders message {number + 1}, or the messages before it, differently when "
                    "more messages follow: mark the assistant's turns in the template ({% generation %}), or give "
                    "conversations whose only assistant turn is the last"
                )
            start, end = self._length(before, tokens, number), self._length(after, tokens, number)
            stops = [at for at in range(start, end) if tokens[at] in self._tokenizer.stop_token_ids]
            end = stops[-1] + 1 if stops else end  # the template's text after it, such as a newline, is not trained
            mask[start:end] = [True] * (end - start)
        return tokens, mask

    def _length(self, beginning: str, tokens: list[int], number: int) -> int:
        """Number of tokens of `beginning`, which must be a prefix of `tokens`."""
        prefix = self._tokenizer.encode(beginning)
        if tokens[: len(prefix)] != prefix:
            raise DataError(
                f"a token spans the beginning or the end of message {number + 1}, so its tokens cannot be told from "
                "the others'. Mark the assistant's turns in the template ({% generation %})"
            )
        return len(prefix)

    def _text(self, messages: Sequence[Message], *, open_turn: bool = False) -> str:
        text: str = self._apply(messages, tokenize=False, add_generation_prompt=open_turn)
        return text

    def _apply(self, messages: Sequence[Message], **options: Any) -> Any:
        try:
            return self._tokenizer.tokenizer.apply_chat_template([dict(message) for message in messages], **options)
        except Exception as error:  # a template is code, which may raise anything
            raise DataError(f"the chat template fails on it ({type(error).__name__}: {error})") from None
