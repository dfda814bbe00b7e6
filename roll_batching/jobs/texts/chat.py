"""Chats through a tokenizer's own template: as a prompt to answer, or as a conversation to learn the answers of."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from roll_batching.errors import DataError
from roll_batching.jobs.texts.tokenizers import HFTokenizer, Tokenizer

Message = Mapping[str, Any]
"""`role` and `content`, and whatever else the template reads."""
ASSISTANT = "assistant"
_MARKER = re.compile(r"\{%-?\s*generation\s*-?%\}")


class ChatTemplate:
    """The chat template of a tokenizer of Hugging Face's.

    Raises:
        DataError: for a tokenizer of another kind, or without a template.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        if not isinstance(tokenizer, HFTokenizer):
            raise DataError("chats (messages, or chat: true) need a tokenizer with a chat template: tokenizer.type hf")
        if not tokenizer.tokenizer.chat_template:
            raise DataError(
                f"the tokenizer {tokenizer.name!r} has no chat template, which chats need: add chat_template.jinja "
                "to its folder, or write prompts as texts"
            )
        self._own = tokenizer
        self._marked = _MARKER.search(str(tokenizer.tokenizer.chat_template)) is not None

    def prompt(self, messages: Sequence[Message]) -> str:
        """The text that the assistant is to go on from. Raises DataError where it spoke last, or the template fails."""
        if messages[-1]["role"] == ASSISTANT:
            raise DataError("the last message is the assistant's own: a prompt ends with somebody else's")
        return self._text(messages, open_turn=True)

    def conversation(self, messages: Sequence[Message]) -> tuple[list[int], list[bool]]:
        """The tokens of a whole conversation, and which of them are the assistant's and learnt.

        The template says itself where it marks the assistant's turns (`{% generation %}`). Otherwise a turn is what
        the conversation up to and with it has beyond the prompt before it, up to its last stop token.

        Raises:
            DataError: without a turn of the assistant; and, where the template marks nothing, when what it makes of
                the beginning of a conversation is not, as text or as tokens, the beginning of what it makes of all.
        """
        if not any(message["role"] == ASSISTANT for message in messages):
            raise DataError("no message is the assistant's: there is nothing to learn")
        return self._by_marks(messages) if self._marked else self._by_prefixes(messages)

    def _by_marks(self, messages: Sequence[Message]) -> tuple[list[int], list[bool]]:
        found = self._applied(messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
        learnt = [bool(mark) for mark in found["assistant_masks"]]
        if not any(learnt):
            raise DataError("the chat template marks nothing of it as the assistant's ({% generation %})")
        return list(found["input_ids"]), learnt

    def _by_prefixes(self, messages: Sequence[Message]) -> tuple[list[int], list[bool]]:
        whole = self._text(messages)
        tokens = self._own.encode(whole)
        learnt = [False] * len(tokens)
        for number, message in enumerate(messages):
            if message["role"] != ASSISTANT:
                continue
            before, after = self._text(messages[:number], open_turn=True), self._text(messages[: number + 1])
            if not (whole.startswith(after) and after.startswith(before)):
                raise DataError(
                    f"the chat template writes message {number + 1}, or what stands before it, otherwise when "
                    "more messages follow: mark the assistant's turns in the template ({% generation %}), or give "
                    "conversations with one turn of the assistant's, the last"
                )
            start, end = self._length(before, tokens, number), self._length(after, tokens, number)
            stops = [at for at in range(start, end) if tokens[at] in self._own.stop_token_ids]
            end = stops[-1] + 1 if stops else end  # what a template writes after it, a line's end say, is its own
            learnt[start:end] = [True] * (end - start)
        return tokens, learnt

    def _length(self, beginning: str, tokens: list[int], number: int) -> int:
        """Tokens of `beginning`, which must be the first of `tokens`."""
        own = self._own.encode(beginning)
        if tokens[: len(own)] != own:
            raise DataError(
                f"the tokens of message {number + 1} are not those of its text alone: a token spans the place where it "
                "begins or ends. Mark the assistant's turns in the template ({% generation %})"
            )
        return len(own)

    def _text(self, messages: Sequence[Message], *, open_turn: bool = False) -> str:
        text: str = self._applied(messages, tokenize=False, add_generation_prompt=open_turn)
        return text

    def _applied(self, messages: Sequence[Message], **options: Any) -> Any:
        try:
            return self._own.tokenizer.apply_chat_template([dict(message) for message in messages], **options)
        except Exception as error:  # a template is code, which may raise anything
            raise DataError(f"the chat template fails on it ({type(error).__name__}: {error})") from None
