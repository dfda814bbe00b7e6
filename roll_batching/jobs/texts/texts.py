"""Training texts: prompts for RL, documents and conversations for SFT, pairs for DPO, judged answers for KTO."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Generic, TypeVar, overload

from roll_batching.errors import DataError
from roll_batching.jobs.texts.chat import ASSISTANT, NO_ARGUMENTS, ChatTemplate, Message, TemplateArguments
from roll_batching.jobs.texts.faults import Faults
from roll_batching.jobs.texts.image_references import MARKER, ImageError, ImageFields, ImageReference
from roll_batching.jobs.texts.records import PathLike, Paths, Record, iterate_records, value_at
from roll_batching.jobs.texts.token_ids import TokenIds, read_token_ids


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt for rollouts, with the answer that its reward compares with."""

    prompt: str
    answer: Any = None
    """The line's answer; None for a line without an answer."""
    line: dict[str, Any] = field(default_factory=dict)
    """The prompt's line of the data file."""
    source: str = "memory"
    """Origin, as `file:line`."""
    images: tuple[ImageReference, ...] = ()
    """Images of the prompt, in the order of their places in it."""


@dataclass(frozen=True, slots=True)
class Document:
    """A supervised sample: the loss covers the response, not the prompt."""

    prompt: str
    response: str
    line: dict[str, Any] = field(default_factory=dict)
    source: str = "memory"
    images: tuple[ImageReference, ...] = ()


@dataclass(frozen=True, slots=True)
class Conversation:
    """A supervised sample of several turns: the loss covers the assistant's turns."""

    messages: tuple[Message, ...]
    line: dict[str, Any] = field(default_factory=dict)
    source: str = "memory"
    images: tuple[ImageReference, ...] = ()
    variables: Mapping[str, Any] = field(default_factory=dict)
    """Variables of the chat template other than the messages, such as `tools`."""

    @property
    def prompt(self) -> str:
        """The messages as JSON, for fingerprints and errors."""
        return json.dumps(self.messages, ensure_ascii=False)


@dataclass(frozen=True, slots=True)
class Pair:
    """A better and a worse answer to one prompt: a text, or the messages of a chat."""

    prompt: str
    """The text, or the messages as JSON."""
    chosen: str
    rejected: str
    chat: bool = False
    """Whether the prompt is a list of messages, and the answers are the assistant's next message."""
    line: dict[str, Any] = field(default_factory=dict)
    source: str = "memory"
    variables: Mapping[str, Any] = field(default_factory=dict)
    """Variables of the chat template, as of a conversation."""


@dataclass(frozen=True, slots=True)
class Judged:
    """A single answer to a prompt, and whether it is desirable."""

    prompt: str
    """The text, or the messages as JSON."""
    response: str
    desirable: bool
    chat: bool = False
    """Whether the prompt is a list of messages, and the answer is the assistant's next message."""
    line: dict[str, Any] = field(default_factory=dict)
    source: str = "memory"
    variables: Mapping[str, Any] = field(default_factory=dict)
    """Variables of the chat template, as of a conversation."""


Text = Prompt | Document | Conversation | Pair | Judged | TokenIds
T = TypeVar("T", bound=Text)


def documents_of(item: Text) -> list[Any]:
    """Splits a pair or judged answer into the prompt with each answer, chosen first; returns other texts alone."""
    if not isinstance(item, Pair | Judged):
        return [item]
    answers = (item.chosen, item.rejected) if isinstance(item, Pair) else (item.response,)
    if not item.chat:
        return [Document(item.prompt, answer, source=item.source) for answer in answers]
    turns = [(*json.loads(item.prompt), {"role": ASSISTANT, "content": answer}) for answer in answers]
    return [Conversation(messages, source=item.source, variables=item.variables) for messages in turns]


def second_text(item: Text) -> str:
    """Returns the text after the prompt: answer, response, or both of a pair as JSON; empty for a conversation."""
    if isinstance(item, Conversation):
        return ""
    if isinstance(item, Pair):
        return json.dumps([item.chosen, item.rejected])
    if isinstance(item, Judged):
        return json.dumps([item.response, item.desirable])
    if isinstance(item, Prompt):
        return item.answer if isinstance(item.answer, str) else json.dumps(item.answer, default=repr)
    return item.response


class Fingerprint:
    """Incremental digest of texts, their template variables and their order, without other keys and file names."""

    def __init__(self) -> None:
        self._digest, self._lines = hashlib.sha256(), hashlib.sha256()

    def add(self, item: Text) -> None:
        """Hash the item's texts, template variables and images, each after its length."""
        images = () if isinstance(item, Pair | Judged) else item.images
        # The text of a prompt or document is already rendered with its variables.
        variables = {} if isinstance(item, Prompt | Document) else item.variables
        extra_texts = [json.dumps(variables, default=repr)] if variables else []
        for text in (item.prompt, second_text(item), *extra_texts, *(image.digest() for image in images)):
            raw = text.encode("utf-8", "surrogatepass")
            self._digest.update(len(raw).to_bytes(8, "little") + raw)

    def value(self) -> str:
        """The digest so far."""
        return self._digest.hexdigest()

    def add_line(self, item: Text) -> None:
        """Hash the item's whole line, which rewards read."""
        self._lines.update(json.dumps(item.line, sort_keys=True, default=repr).encode() + b"\n")

    def value_with_lines(self, value: str) -> str:
        """The digest `value` of texts, joined with that of the lines so far."""
        return hashlib.sha256((value + self._lines.hexdigest()).encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class Instruction:
    """Keys of a line whose texts become the turns of a chat, as in instruction data.

    Source: ROLL, `roll/pipeline/sft/sft_pipeline.py`, `build_conversation`.
    """

    query: str | None = None
    """Key of text that is appended to the prompt in the user's turn."""
    system: str | None = None

    @property
    def keys(self) -> tuple[str, ...]:
        """The keys that are set."""
        return tuple(key for key in (self.query, self.system) if key is not None)

    def chat(self, record: Record, keys: Sequence[str], *, answered: bool) -> Record:
        """Replaces the first text of `record`, which was read with `keys` and then `self.keys`, by messages as JSON.

        The messages end before the assistant's turn; if `answered`, they include it, the record's second text. The
        result is empty if the user's turn is.
        """
        (prompt, *answers), chat_texts = record.texts[: len(keys)], record.texts[len(keys) :]
        texts = dict(zip(self.keys, chat_texts, strict=True))
        query, system = texts.get(self.query or "", ""), texts.get(self.system or "", "")
        turns = [("system", system), ("user", "\n".join(filter(None, (prompt, query))))]
        if answered:
            turns.append((ASSISTANT, answers.pop(0)))
        messages = [{"role": role, "content": text} for role, text in turns if text or role == ASSISTANT]
        first = json.dumps(messages, ensure_ascii=False) if prompt or query else ""
        return replace(record, texts=(first, *answers))


def iterate_texts(
    kind: type[T],
    paths: Paths,
    keys: Sequence[str],
    faults: Faults,
    on_bytes_read: Callable[[int], None] = lambda size: None,
    *,
    template: ChatTemplate | None = None,
    instruction: Instruction | None = None,
    images: ImageFields | None = None,
    arguments: TemplateArguments = NO_ARGUMENTS,
) -> Iterator[T]:
    """Yields the texts of data files as items of `kind`, in order.

    | kind         | first key | second key                  | third key           |
    |--------------|-----------|-----------------------------|---------------------|
    | Prompt       | prompt    | answer (any type), may lack |                     |
    | Document     | prompt    | response                    |                     |
    | Conversation | messages  |                             |                     |
    | Pair         | prompt    | chosen answer               | rejected answer     |
    | Judged       | prompt    | answer                      | verdict (a boolean) |
    | TokenIds     | token ids |                             |                     |

    The key of a prompt's answer may be a path, such as `reward_model.ground_truth`.

    Args:
        kind, keys: see the table; `paths` and `on_bytes_read` as in `iterate_records`.
        faults: receives unusable lines, such as an empty prompt; they are skipped.
        template: the first key holds messages; they become a prompt's or document's text, and stay messages elsewhere.
        instruction: the first key holds the text of the user's turn, a conversation's second key the assistant's.
        images: prompts, documents and conversations have images.
        arguments: variables of the chat template other than messages.
    """
    chat = instruction is None and (kind is Conversation or template is not None)
    chat_keys = () if instruction is None else instruction.keys
    make: Any = kind
    if kind is TokenIds:
        for record in iterate_records(paths, (), faults, on_bytes_read):
            try:
                sample: Any = read_token_ids(record.line, keys[0], record.source)
            except DataError as error:
                faults.add(record.source, str(error), "Remove the line, or correct it.")
            else:
                yield sample
        return
    label = answer = ""
    if kind is Judged:
        *keys, label = keys
    elif kind is Prompt:
        keys, answer = keys[:1], "".join(keys[1:])
    for record in iterate_records(paths, (*keys, *chat_keys), faults, on_bytes_read, chat=chat, images=images):
        if instruction is not None:
            record = instruction.chat(record, keys, answered=kind is Conversation)
        if not record.texts[0]:
            faults.add(record.source, f"the prompt is empty ({keys[0]!r})", "Remove the line, or give it a prompt.")
            continue
        try:
            if images is not None:
                record = _place_images(record, images, chat=chat or instruction is not None, answered=kind is Document)
            variables = arguments.of(record.line) if kind is Conversation or template is not None else {}
        except ImageError as error:
            faults.add(record.source, f"{keys[0]}: {error.what}", error.cure)
            continue
        except DataError as error:
            faults.add(record.source, str(error), "Remove the line, or correct it.")
            continue
        first, line, image_field = record.texts[0], record.line, {"images": record.images} if record.images else {}
        if kind is Conversation:
            yield make(tuple(json.loads(first)), line, record.source, **image_field, variables=variables)
        elif kind is Pair or kind is Judged:
            if _check_answers(record, keys, label, faults):
                verdict = (line[label],) if label else ()
                yield make(*record.texts, *verdict, template is not None, line, record.source, variables)
        else:
            try:
                first = first if template is None else template.prompt(json.loads(first), variables)
            except DataError as error:
                faults.add(record.source, f"{keys[0]}: {error}", "Remove the line, or correct it.")
                continue
            second = value_at(line, answer) if kind is Prompt else record.texts[1]
            yield make(first, second, line, record.source, **image_field)


def _place_images(record: Record, images: ImageFields, *, chat: bool, answered: bool) -> Record:
    """Puts the images of `record` into the order of their places in its first text, and writes them there.

    `answered`: the last text is a response, which must hold no image. Raises ImageError.
    """
    if not chat:
        if answered and MARKER in record.texts[-1]:
            raise ImageError(
                f"its response holds {MARKER}, and images belong to prompts", "Remove it from the response."
            )
        return replace(record, texts=(images.write(record.texts[0], record.images), *record.texts[1:]))
    messages, used = images.place(json.loads(record.texts[0]), record.images)
    return replace(record, texts=(json.dumps(messages, ensure_ascii=False), *record.texts[1:]), images=used)


def _check_answers(record: Record, keys: Sequence[str], label: str, faults: Faults) -> bool:
    """Whether the answers of a pair differ, or an answer has a verdict under `label`; else adds a fault."""
    if not label:
        if record.texts[1] != record.texts[2]:
            return True
        cure = "Remove the line: equal answers give no gradient."
        faults.add(record.source, f"{keys[1]!r} and {keys[2]!r} are the same text", cure)
        return False
    verdict = record.line.get(label)
    if isinstance(verdict, bool):
        return True
    what = f"is {verdict!r}" if label in record.line else "is missing"
    faults.add(record.source, f"{label!r} {what}", "Write true for a desirable answer, false for another one.")
    return False


class TextDataset(Sequence[T], Generic[T]):
    """Texts in a fixed order, with a fingerprint that a resumed run compares."""

    def __init__(self, items: Iterable[T]) -> None:
        self._items: tuple[T, ...] = tuple(items)
        if not self._items:
            raise DataError("A dataset needs at least one text.")
        for number, item in enumerate(self._items):
            if not item.prompt:
                place = f"item {number}" if item.source == "memory" else item.source
                raise DataError(f"{place}: the prompt is empty: give it text, or leave the item out.")

    def __len__(self) -> int:
        return len(self._items)

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[T]: ...
    def __getitem__(self, index: int | slice) -> T | Sequence[T]:
        return self._items[index]

    @cached_property
    def fingerprint(self) -> str:
        """Digest of the texts and their order, without other keys and file names."""
        digest = Fingerprint()
        for item in self._items:
            digest.add(item)
        return digest.value()

    @cached_property
    def record_fingerprint(self) -> str:
        """Digest of the texts, their order, and their whole lines, which rewards read."""
        digest = Fingerprint()
        for item in self._items:
            digest.add_line(item)
        return digest.value_with_lines(self.fingerprint)


class PromptDataset(TextDataset[Prompt]):
    """Prompts with answers.

    Raises `DataError` without any prompt, or for an empty one.
    """

    @classmethod
    def from_jsonl(
        cls,
        paths: PathLike | Sequence[PathLike],
        *,
        prompt_key: str = "prompt",
        answer_key: str = "answer",
    ) -> PromptDataset:
        """Read one or several files with a prompt and an answer per line.

        Raises `DataError` naming all faults with file and line; see `iterate_texts`.
        """
        return cls(_read(Prompt, paths, (prompt_key, answer_key)))


class DocumentDataset(TextDataset[Document]):
    """Supervised documents.

    Raises `DataError` without any document, or for an empty prompt.
    """

    @classmethod
    def from_jsonl(
        cls,
        paths: PathLike | Sequence[PathLike],
        *,
        prompt_key: str = "prompt",
        response_key: str = "response",
    ) -> DocumentDataset:
        """Read one or several files with a prompt and a response per line.

        Raises `DataError` naming all faults with file and line; see `iterate_texts`.
        """
        return cls(_read(Document, paths, (prompt_key, response_key)))


def _read(kind: type[T], paths: PathLike | Sequence[PathLike], keys: tuple[str, str]) -> list[T]:
    faults = Faults()
    items = list(iterate_texts(kind, paths, keys, faults))
    faults.check()
    return items
