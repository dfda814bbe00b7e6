"""Texts to learn from: prompts with answers for RL, documents (prompt and response) for SFT."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Generic, TypeVar, overload

from roll_batching.data.jsonl import PathLike, read_records
from roll_batching.errors import DataError


@dataclass(frozen=True)
class Prompt:
    """What a rollout starts from, and what its reward compares with."""

    prompt: str
    answer: str
    extra: dict[str, Any] = field(default_factory=dict)
    """All other keys of the line, as they were."""
    source: str = "memory"
    """Where it comes from, as `file:line`."""


@dataclass(frozen=True)
class Document:
    """A supervised sample: the prompt bears no loss, the response is learnt."""

    prompt: str
    response: str
    extra: dict[str, Any] = field(default_factory=dict)
    source: str = "memory"


T = TypeVar("T", bound=Prompt | Document)


class TextDataset(Sequence[T], Generic[T]):
    """Texts in a fixed order, with a fingerprint by which a resumed run recognises them."""

    def __init__(self, items: Iterable[T]) -> None:
        self._items: tuple[T, ...] = tuple(items)
        if not self._items:
            raise DataError("A dataset needs at least one text.")
        for number, item in enumerate(self._items):
            if not item.prompt:
                place = f"item {number}" if item.source == "memory" else item.source
                raise DataError(f"{place}: the prompt is empty.")

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
        """Digest of the texts and their order; other keys and the files' names do not count."""
        digest = hashlib.sha256()
        for item in self._items:
            other = item.answer if isinstance(item, Prompt) else item.response
            for text in (item.prompt, other):
                raw = text.encode("utf-8", "surrogatepass")
                digest.update(len(raw).to_bytes(8, "little") + raw)
        return digest.hexdigest()


class PromptDataset(TextDataset[Prompt]):
    """Prompts with answers.

    Raises:
        DataError: without any prompt, or for an empty one.
    """

    @classmethod
    def from_jsonl(
        cls,
        paths: PathLike | Sequence[PathLike],
        *,
        prompt_key: str = "prompt",
        answer_key: str = "answer",
    ) -> PromptDataset:
        """Read one or several files with a prompt and an answer per line; other keys go to `extra`.

        Raises:
            DataError: naming file and line; see `jsonl.read_records`.
        """
        records = read_records(paths, (prompt_key, answer_key))
        return cls(Prompt(r.texts[0], r.texts[1], r.extra, r.source) for r in records)


class DocumentDataset(TextDataset[Document]):
    """Supervised documents.

    Raises:
        DataError: without any document, or for an empty prompt.
    """

    @classmethod
    def from_jsonl(
        cls,
        paths: PathLike | Sequence[PathLike],
        *,
        prompt_key: str = "prompt",
        response_key: str = "response",
    ) -> DocumentDataset:
        """Read one or several files with a prompt and a response per line; other keys go to `extra`.

        Raises:
            DataError: naming file and line; see `jsonl.read_records`.
        """
        records = read_records(paths, (prompt_key, response_key))
        return cls(Document(r.texts[0], r.texts[1], r.extra, r.source) for r in records)
