"""Renders chats by the tokenizer's chat template: as a prompt, or as a conversation with its trained tokens.

A template reads further variables than the messages, such as tools; they come from the job and from records.
"""

from __future__ import annotations

import functools
import itertools
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from roll_batching.errors import ConfigError, DataError
from roll_batching.jobs.texts.tokenizers import HFTokenizer, Tokenizer

if TYPE_CHECKING:
    from jinja2 import nodes


TOOLS = "tools"
KWARGS = "chat_template_kwargs"
"""Key of a record's own variables, and of the job's."""
SETTINGS = f"actor_train.data_args.{KWARGS}"
_GENERATION = re.compile(r"\{%-?\s*(end)?generation\s*-?%\}")
_GIVEN = frozenset({"messages", "add_generation_prompt", "raise_exception", "strftime_now"})
"""Variables that transformers sets at every call; it also sets one for each special token (`bos_token`)."""


@functools.lru_cache(maxsize=16)
def variables_of(template: str) -> frozenset[str]:
    """Names that `template` reads and neither it nor transformers sets. Empty if it cannot be parsed."""
    import jinja2
    from jinja2 import meta, nodes

    environment = jinja2.Environment(extensions=["jinja2.ext.loopcontrols"])
    try:
        parsed = environment.parse(_GENERATION.sub("", template))
    except jinja2.TemplateError:
        return frozenset()  # rendering it names the fault
    # Jinja also reports names that the template itself sets inside a loop or a branch. Drop those whose first use is
    # an assignment, unless they are tested (`x is defined`) anywhere: such a name is an input with a default.
    first_use: dict[str, str] = {}
    for name in _names(parsed):
        first_use.setdefault(name.name, name.ctx)
    assigned = {name for name, use in first_use.items() if use == "store"}
    tested = {test.node.name for test in parsed.find_all(nodes.Test) if isinstance(test.node, nodes.Name)}
    names = meta.find_undeclared_variables(parsed) - (assigned - tested) - _GIVEN
    return frozenset(name for name in names if not name.endswith("_token"))


def _names(node: nodes.Node) -> Iterator[nodes.Name]:
    """Names in the order of evaluation: `{% set tools = tools or [] %}` reads the variable first."""
    from jinja2 import nodes

    children = list(node.iter_child_nodes())
    if isinstance(node, nodes.Assign | nodes.For):
        children[:2] = children[1::-1]  # the target comes before the value
    for child in children:
        yield from [child] if isinstance(child, nodes.Name) else _names(child)


@dataclass(frozen=True, kw_only=True)
class TemplateArguments:
    """Variables that a chat template gets: the job's, and those that a record holds."""

    tools: str | None = None
    """Key of a record's tools."""
    columns: Mapping[str, str] = field(default_factory=dict)
    """By variable, the key of a record with its value."""
    values: Mapping[str, Any] = field(default_factory=dict)
    """By variable, its value for all records."""

    def check(self, variables: frozenset[str]) -> None:
        """Raises ConfigError for a variable of the settings that is not among the template's `variables`."""
        for key, names in (("chat_template_columns", self.columns), (KWARGS, self.values)):
            for name in names:
                if name not in variables:
                    raise ConfigError(
                        f"actor_train.data_args.{key} sets {name!r}, which the tokenizer's chat template does not "
                        f"read. It reads: {', '.join(sorted(variables)) or 'the messages alone'}"
                    )

    def of(self, record: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the variables of a record. Raises DataError for tools that are no list of objects, and the like."""
        of_record = record.get(KWARGS)
        if of_record is not None and not isinstance(of_record, Mapping):
            raise DataError(f"{KWARGS!r} must be an object of variables of the chat template, got {_kind(of_record)}")
        columns = {name: record[key] for name, key in self.columns.items() if record.get(key) is not None}
        variables = {**self.values, **(of_record or {}), **columns}
        tools = None if self.tools is None else record.get(self.tools)
        return variables if tools is None or tools == [] else {**variables, TOOLS: _tools(tools, str(self.tools))}

    def notices(self, records: Iterable[Mapping[str, Any]], variables: frozenset[str]) -> list[str]:
        """Returns notices about keys that the template would read and does not get, or gets and does not read."""
        held, record_variables = set[str](), set[str]()  # keys with a value, and variables in the records' `KWARGS`
        for record in records:
            held |= {name for name, value in record.items() if value is not None}
            record_variables |= set(record.get(KWARGS) or ())
        sources = dict(self.columns) | ({} if self.tools is None else {TOOLS: self.tools})
        notices = []
        for name in sorted(held & variables - sources.keys() - self.values.keys() - record_variables):
            cure = f"tools: {TOOLS}" if name == TOOLS else f"chat_template_columns: {{{name}: {name}}}"
            text = f"records have {name!r}, which the chat template reads and does not get"
            notices.append(f"{text}: set actor_train.data_args.{cure}")
        for name, key in sources.items():
            if key in held and name not in variables:
                notices.append(f"records have {key!r}, and the chat template reads no {name}: it leaves them out")
            if key not in held and (name, key) != (TOOLS, TOOLS):
                notices.append(f"no record has {key!r}, which actor_train.data_args names for {name}")
        if unread := sorted(record_variables - variables):
            notices.append(f"{KWARGS} of records sets {', '.join(unread)}, which the chat template does not read")
        return notices


NO_ARGUMENTS = TemplateArguments()


def _tools(value: Any, key: str) -> list[Any]:
    """The tools of a record: a list of objects, or its JSON text."""
    try:
        tools = json.loads(value) if isinstance(value, str) else value
    except ValueError:
        tools = value
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise DataError(
            f"{key!r} must be a list of tools, each an object such as {{'type': 'function', 'function': {{...}}}}, or "
            f"its JSON text; got {_kind(value)} (actor_train.data_args.tools names the key; null: none)"
        )
    return tools


def _kind(value: Any) -> str:
    return f"{type(value).__name__} {str(value)[:40]!r}"


# ---- chat


Message = Mapping[str, Any]
"""`role`, `content`, and other keys that the template reads."""
ASSISTANT = "assistant"
_MARKER = re.compile(r"\{%-?\s*generation\s*-?%\}")
_NONE: Mapping[str, Any] = {}
_CALL: dict[str, Any] = {"id": "call00000", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
_FOLLOWERS: Mapping[bool, tuple[Message, Message]] = {
    False: ({"role": ASSISTANT, "content": "a"}, {"role": "user", "content": "b"}),
    True: (
        {"role": ASSISTANT, "content": "", "tool_calls": [_CALL]},
        {"role": "tool", "content": "b", "name": "f", "tool_call_id": _CALL["id"]},
    ),
}
"""A turn without and with a call of a tool, and the message that follows it."""


class ChatTemplate:
    """The chat template of a Hugging Face tokenizer.

    Raises `DataError` for another tokenizer, or one without a template.
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
        template = tokenizer.tokenizer.chat_template
        templates = list(template.values()) if isinstance(template, dict) else [template]  # named ones: `tool_use`
        self._has_markers = any(_MARKER.search(text) for text in templates)
        self.variables: frozenset[str] = frozenset().union(*map(variables_of, templates))
        """Names that the template reads, beside the messages."""
        self.reads_date = any("strftime_now" in text for text in templates)

    def prompt(self, messages: Sequence[Message], variables: Mapping[str, Any] = _NONE) -> str:
        """Renders a prompt for the assistant's next turn. Raises DataError if it spoke last, or the template fails."""
        if messages[-1]["role"] == ASSISTANT:
            raise DataError("the last message is the assistant's: end the prompt with a message of another role")
        return self._text(messages, variables, open_turn=True)

    def conversation(
        self, messages: Sequence[Message], variables: Mapping[str, Any] = _NONE
    ) -> tuple[list[int], list[bool]]:
        """Returns the tokens of a whole conversation, and a mask of the assistant's tokens, which are trained.

        Where the template marks the assistant's turns (`{% generation %}`), these are the turns. Otherwise a turn is
        the difference between the conversation that ends with it and the prompt before it, up to its last stop token.
        A stop token that opens the next message (GLM's `<|user|>`) belongs to the turn; a last turn gets it appended.

        Args:
            messages: of the conversation.
            variables: further variables of the template, such as `tools`.

        Raises:
            DataError: without a turn of the assistant; and, without markers, when the template's text or tokens of the
                first messages are not a prefix of those of the whole conversation.
        """
        if not any(message["role"] == ASSISTANT for message in messages):
            raise DataError("no message is the assistant's: there is no token to train")
        split = self._by_markers if self._has_markers else self._by_prefixes
        tokens, mask = split(messages, variables)
        # A stop token right after a turn belongs to the turn, unless the turn ends with a stop token itself.
        for index in [index for index in range(1, len(tokens)) if mask[index - 1] and not mask[index]]:
            mask[index] = tokens[index] in self._stops and tokens[index - 1] not in self._stops
        if mask[-1] and tokens[-1] not in self._stops:
            opening = self._openings[bool(messages[-1].get("tool_calls"))]
            return tokens + opening, mask + [True] * len(opening)
        return tokens, mask

    def text_between_turns(self, message: Message, variables: Mapping[str, Any] = _NONE) -> str:
        """Renders what stands between a text of the assistant and its next turn, with `message` in between.

        It begins with the token that ends a turn. Raises DataError where the template changes or drops that text.
        """
        marker = "the assistant's text"
        while marker in str(message["content"]):
            marker += "."  # its last occurrence is the assistant's
        before: list[Message] = [{"role": "user", "content": "a"}, {"role": ASSISTANT, "content": marker}, message]
        _, found, following = self._text(before, variables, open_turn=True).rpartition(marker)
        if not found:
            raise DataError(
                "the chat template does not show an earlier turn of the assistant, which several turns need"
            )
        return following

    def lacks_stops(self, messages: Sequence[Message], tokens: Sequence[int], mask: Sequence[bool]) -> bool:
        """Whether a turn of a `conversation` trains no stop token."""
        stops = [marked and token in self._stops for token, marked in zip(tokens, mask, strict=True)]
        # A template may mark a turn in several parts, and end one with two stop tokens: neither count alone will do.
        parts = itertools.groupby(range(len(stops)), key=lambda index: mask[index])
        ended_parts = sum(marked and any(stops[index] for index in indices) for marked, indices in parts)
        speakers = [role for role, _ in itertools.groupby(message["role"] for message in messages)]
        turns = sum(message["role"] == ASSISTANT for message in messages)
        return sum(stops) < turns or ended_parts < speakers.count(ASSISTANT)

    @property
    def _stops(self) -> tuple[int, ...]:
        return self._tokenizer.stop_token_ids

    @cached_property
    def _openings(self) -> dict[bool, list[int]]:
        """By whether a turn calls a tool, the stop token that opens the message after it; empty for none."""
        return {calls: self._opening(*followers) for calls, followers in _FOLLOWERS.items()}

    def _opening(self, turn: Message, follower: Message) -> list[int]:
        """The stop token with which the template opens `follower` after `turn`; empty for none."""
        before: list[Message] = [{"role": "user", "content": "a"}, turn]
        try:
            text, longer = self._text(before, _NONE), self._text([*before, follower], _NONE)
        except DataError:  # a template without tools
            return []
        following = self._tokenizer.encode(longer.removeprefix(text)) if longer.startswith(text) else []
        return [token for token in following[:1] if token in self._stops]

    def _by_markers(self, messages: Sequence[Message], variables: Mapping[str, Any]) -> tuple[list[int], list[bool]]:
        encoded = self._apply(messages, variables, tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
        mask = [bool(value) for value in encoded["assistant_masks"]]
        if not any(mask):
            raise DataError(
                "the chat template marks no token of it as the assistant's: put its text of assistant messages between "
                "{% generation %} and {% endgeneration %}"
            )
        return list(encoded["input_ids"]), mask

    def _by_prefixes(self, messages: Sequence[Message], variables: Mapping[str, Any]) -> tuple[list[int], list[bool]]:
        whole = self._text(messages, variables)
        tokens = self._tokenizer.encode(whole)
        mask = [False] * len(tokens)
        for number, message in enumerate(messages):
            if message["role"] != ASSISTANT:
                continue
            before = self._text(messages[:number], variables, open_turn=True)
            after = self._text(messages[: number + 1], variables)
            if not (whole.startswith(after) and after.startswith(before)):
                raise DataError(self._difference(messages[:number], variables, before, after))
            start, end = self._length(before, tokens, number), self._length(after, tokens, number)
            stops = [index for index in range(start, end) if tokens[index] in self._stops]
            end = stops[-1] + 1 if stops else end  # the template's text after it, such as a newline, is not trained
            mask[start:end] = [True] * (end - start)
        return tokens, mask

    def _difference(self, earlier: Sequence[Message], variables: Mapping[str, Any], before: str, after: str) -> str:
        """Why the text `after` a turn, or the prompt `before` it, is no prefix of the conversation's text."""
        number, text = len(earlier) + 1, self._text(earlier, variables)
        if before.startswith(text) and after.startswith(text) and not after.startswith(before):
            return (
                f"the chat template opens the turn of message {number} with {before[len(text) :]!r}, and the message "
                "does not begin so: give it the thoughts that the template expects (reasoning_content), or set "
                f"variables of the template, such as {{enable_thinking: false}}, in {SETTINGS} (it reads: "
                f"{', '.join(sorted(self.variables)) or 'none'})"
            )
        return (
            f"the chat template renders message {number}, or the messages before it, differently when more messages "
            "follow: mark the assistant's turns in the template ({% generation %}), or give conversations whose only "
            "assistant turn is the last"
        )

    def _length(self, beginning: str, tokens: list[int], number: int) -> int:
        """Number of tokens of `beginning`, which must be a prefix of `tokens`."""
        prefix = self._tokenizer.encode(beginning)
        if tokens[: len(prefix)] != prefix:
            raise DataError(
                f"a token spans the beginning or the end of message {number + 1}, so its tokens cannot be told from "
                "the others'. Mark the assistant's turns in the template ({% generation %})"
            )
        return len(prefix)

    def _text(self, messages: Sequence[Message], variables: Mapping[str, Any], *, open_turn: bool = False) -> str:
        text: str = self._apply(messages, variables, tokenize=False, add_generation_prompt=open_turn)
        return text

    def _apply(self, messages: Sequence[Message], variables: Mapping[str, Any], **options: Any) -> Any:
        """Applies the template, with arguments of calls as objects or, where it fails or prints them, as texts."""
        read = {name: value for name, value in variables.items() if name in self.variables}
        conversions = (_as_text,) if self._prints_arguments else (_as_object, _as_text)
        errors: list[str] = []
        for convert in conversions if any(map(_calls, messages)) else conversions[:1]:
            converted = [_with_arguments(message, convert) for message in messages]
            try:
                return self._tokenizer.tokenizer.apply_chat_template(converted, **read, **options)
            except Exception as error:  # a template is code, which may raise anything
                errors.append(f"{type(error).__name__}: {error}")
        raise DataError(f"the chat template fails on it ({'; with arguments of calls as texts: '.join(errors)})")

    @cached_property
    def _prints_arguments(self) -> bool:
        """Whether the template prints call arguments as they are: then they are passed as JSON text, not as objects."""
        messages = [{"role": "user", "content": "a"}, _FOLLOWERS[True][0]]
        try:
            text = self._tokenizer.tokenizer.apply_chat_template(messages, tokenize=False)
        except Exception:  # a template without tools, or one that joins texts
            return False
        return str(_CALL["function"]["arguments"]) in text


def _calls(message: Message) -> list[Any]:
    calls = message.get("tool_calls")
    return calls if isinstance(calls, list) else []


def _with_arguments(message: Message, convert: Callable[[Any], Any]) -> dict[str, Any]:
    """Converts the arguments of the calls in `message`.

    Most templates iterate over objects, or write them as JSON themselves; DeepSeek's join texts.
    """
    calls: list[Any] = []
    for call in _calls(message):
        function = call.get("function") if isinstance(call, dict) else None
        if isinstance(function, dict) and "arguments" in function:
            call = {**call, "function": {**function, "arguments": convert(function["arguments"])}}
        calls.append(call)
    return {**message, "tool_calls": calls} if calls else dict(message)


def _as_object(arguments: Any) -> Any:
    try:
        value = json.loads(arguments) if isinstance(arguments, str) else arguments
    except ValueError:
        return arguments
    return value if isinstance(value, dict) else arguments


def _as_text(arguments: Any) -> Any:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
