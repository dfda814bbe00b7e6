"""Counts the tokens of texts, caches the counts in files, and checks that texts fit and can be encoded."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from roll_batching.errors import DataError
from roll_batching.files import atomic_file
from roll_batching.jobs.texts.chat import ChatTemplate
from roll_batching.jobs.texts.faults import Faults
from roll_batching.jobs.texts.image_references import ImageError, ImageReference
from roll_batching.jobs.texts.image_tokenizer import ImageTokenizer
from roll_batching.jobs.texts.texts import Conversation, Document, Pair, Prompt, Text, documents_of
from roll_batching.jobs.texts.token_ids import TokenIds
from roll_batching.jobs.texts.tokenizers import Tokenizer, UnknownCharacterError, encode_many
from roll_batching.planning.arrays import Ints

logger = logging.getLogger(__name__)

FOLDER = "token_counts"
"""Folder of the cache, in the job's `output_dir`."""
_VERSION = 2
"""Increase it when the encoding of texts here or the format of the files changes: old files are then not used."""


@dataclass(frozen=True)
class TokenCounts:
    """Numbers of tokens of texts, and how many of the texts train turns without a stop token."""

    tokens: Ints
    """int64[n], end tokens included; of pairs int64[n, 2]."""
    without_stop: int = 0


class TokenCountCache:
    """Token counts of texts of one kind by one tokenizer; other texts or tokenizers have files of other names.

    Args:
        folder: folder of the files; it need not exist.
        tokenizer: counts the tokens.
        kind: kind of the texts, and whether they are chats, which have other tokens.
    """

    def __init__(self, folder: Path, tokenizer: Tokenizer, kind: str) -> None:
        self.folder = folder
        self._prefix = hashlib.sha256(repr((_VERSION, kind, tokenizer.fingerprint)).encode()).hexdigest()[:16]

    def any(self) -> bool:
        """Whether counts of any texts are cached."""
        return any(self.folder.glob(f"{self._prefix}-*.npz"))

    def load(self, fingerprint: str) -> TokenCounts | None:
        """Reads the counts of the texts with this fingerprint; None if they are not cached."""
        try:
            with np.load(self._file(fingerprint), allow_pickle=False) as file:
                return TokenCounts(np.asarray(file["counts"], dtype=np.int64), int(file["without_stop"]))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
            logger.warning("%s cannot be read (%s): tokens are counted again", self._file(fingerprint), error)
            return None

    def save(self, fingerprint: str, counts: TokenCounts) -> None:
        """Write the counts to the cache; a write error is only logged."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with atomic_file(self._file(fingerprint)) as partial, partial.open("wb") as file:
                np.savez(file, counts=counts.tokens, without_stop=counts.without_stop)
        except OSError as error:
            logger.warning("token counts cannot be cached in %s (%s): the next start counts again", self.folder, error)

    def remove(self, fingerprint: str) -> None:
        """Remove the counts of these texts."""
        with contextlib.suppress(OSError):
            self._file(fingerprint).unlink(missing_ok=True)

    def _file(self, fingerprint: str) -> Path:
        return self.folder / f"{self._prefix}-{fingerprint[:32]}.npz"


# ---- fit


BATCH_SIZE = 1024
"""Texts that are encoded together."""
UNKNOWN = "Take such characters out of the text, or add them to tokenizer.vocabulary (and raise vocab_size)."


@dataclass(frozen=True, kw_only=True)
class Fit:
    """Limits of the texts of a file: of prompts, or of documents with response and end token."""

    tokenizer: Tokenizer
    max_length: int
    """Most tokens of a text."""
    setting: str
    """The configuration key that sets `max_length`, with a remark in parentheses."""
    keys: tuple[str, ...]
    """Keys of the texts in a line: two, one for conversations, three for pairs."""
    leaves_out: bool = False
    """Whether longer texts are left out; otherwise they are faults."""
    reward_fault: Callable[[Prompt], str] = lambda prompt: ""
    """Returns the fault of a prompt without a reward; empty for others."""

    def check(self, items: Sequence[Text], faults: Faults) -> TokenCounts:
        """Adds the faults of `items` to `faults`, with file, line, key and cure.

        Returns the token counts of `items`, which are meaningless if there are faults.
        """
        counts = [
            self._check_batch(items[start : start + BATCH_SIZE], faults) for start in range(0, len(items), BATCH_SIZE)
        ]
        return join_counts(counts)

    def _check_batch(self, items: Sequence[Text], faults: Faults) -> TokenCounts:
        samples = [document for item in items for document in documents_of(item)]
        try:
            counts = _count_tokens(samples, self.tokenizer)
        except Exception:  # of at least one text: check one by one to name it
            for item in samples:
                self._check_one(item, faults)
            return TokenCounts(np.zeros(len(items), dtype=np.int64))
        for item, (prompt, rest, _) in zip(samples, counts.tolist(), strict=True):
            self._check_lengths(item, prompt, rest, faults)
        return _merge_pairs(counts, items)

    def _check_one(self, item: Prompt | Document | Conversation | TokenIds, faults: Faults) -> None:
        rest = 0
        try:
            if isinstance(item, Conversation):
                tokens = ChatTemplate(self.tokenizer).conversation(item.messages, item.variables)[0]
            elif isinstance(item, TokenIds):
                tokens = item.checked_ids(self.tokenizer.vocab_size)
            else:
                tokens = tokens_of(item.prompt, self.tokenizer, self.keys[0])
            (prompt,) = _expanded_lengths([tokens], [item.images], self.tokenizer)
            if isinstance(item, Document):
                tokens = tokens_of(item.response, self.tokenizer, self.keys[1])
                rest = _expanded_lengths([tokens], [()], self.tokenizer)[0] + 1
        except UnknownCharacterError as error:
            faults.add(item.source, str(error), UNKNOWN, characters=error.characters)
        except ImageError as error:
            faults.add(item.source, error.what, error.cure)
        except DataError as error:
            faults.add(item.source, str(error), "Remove the line, or correct it.")
        else:
            self._check_lengths(item, prompt, rest, faults)

    def _check_lengths(self, item: Text, prompt: int, rest: int, faults: Faults) -> None:
        if isinstance(item, Prompt) and (fault := self.reward_fault(item)):
            faults.add(item.source, fault, "Name the tag in a tag_included of `rewards`, or remove the line.")
        if not prompt:
            faults.add(item.source, f"the prompt has no tokens ({self.keys[0]!r})", "Remove the line.")
        elif prompt + rest > self.max_length and not self.leaves_out:
            fault = too_long(item, prompt + rest, self.max_length, self.setting.partition(" (")[0])
            keys = self.keys if isinstance(item, Document) else self.keys[:1]
            cure = f"Shorten {' or '.join(map(repr, keys))}, remove the line, or raise {self.setting}."
            faults.add(item.source, fault, cure, tokens=prompt + rest)


def token_counts(items: Sequence[Text], tokenizer: Tokenizer) -> Ints:
    """Counts the tokens of each text, end token included: int64[n]; of pairs, of both answers: int64[n, 2].

    Raises the errors of the tokenizer or chat template, which do not name the text.
    """
    batches = (items[start : start + BATCH_SIZE] for start in range(0, len(items), BATCH_SIZE))
    documents = ((batch, [document for item in batch for document in documents_of(item)]) for batch in batches)
    return join_counts([_merge_pairs(_count_tokens(split, tokenizer), batch) for batch, split in documents]).tokens


def join_counts(counts: Sequence[TokenCounts]) -> TokenCounts:
    """Joins the counts of several lists of texts."""
    tokens = np.concatenate([part.tokens for part in counts]) if counts else np.zeros(0, dtype=np.int64)
    return TokenCounts(tokens, sum(part.without_stop for part in counts))


def _merge_pairs(counts: Ints, items: Sequence[Text]) -> TokenCounts:
    """Turns the result of `_count_tokens`, int64[m, 3] by document, into the counts of `items`."""
    totals, lacks = counts[:, :2].sum(axis=1), counts[:, 2]
    if not isinstance(items[0], Pair):
        return TokenCounts(totals, int(lacks.sum()))
    return TokenCounts(totals.reshape(-1, 2), int(lacks.reshape(-1, 2).max(axis=1).sum()))


def _count_tokens(items: Sequence[Any], tokenizer: Tokenizer) -> Ints:
    """Counts tokens of prompt and response, and whether a turn lacks its stop token: int64[n, 3].

    A conversation or sample of token ids counts as a prompt, with 0 for the response.
    """
    if isinstance(items[0], TokenIds):
        lengths = [len(item.checked_ids(tokenizer.vocab_size)) for item in items]
        return np.array([lengths, [0] * len(items), [0] * len(items)], dtype=np.int64).T
    if isinstance(items[0], Conversation):
        template = ChatTemplate(tokenizer)
        conversations = [template.conversation(item.messages, item.variables) for item in items]
        lacks = [template.lacks_stops(item.messages, *both) for item, both in zip(items, conversations, strict=True)]
        lengths = _expanded_lengths([both[0] for both in conversations], [item.images for item in items], tokenizer)
        return np.array([lengths, [0] * len(items), lacks], dtype=np.int64).T
    prompts = _expanded_lengths(
        encode_many(tokenizer, [item.prompt for item in items]), [item.images for item in items], tokenizer
    )
    rest = [0] * len(items)
    if isinstance(items[0], Document):
        responses = encode_many(tokenizer, [item.response for item in items])
        rest = [count + 1 for count in _expanded_lengths(responses, [()] * len(items), tokenizer)]
    return np.array([prompts, rest, [0] * len(items)], dtype=np.int64).T


def _expanded_lengths(
    sequences: Sequence[Sequence[int]], images: Sequence[Sequence[ImageReference]], tokenizer: Tokenizer
) -> list[int]:
    """Counts the tokens of each sequence with the tokens of its `images`, which are read whole."""
    if not isinstance(tokenizer, ImageTokenizer):
        return [len(tokens) for tokens in sequences]
    counts = iter(tokenizer.processor.count_tokens([image for of_text in images for image in of_text], decode=True))
    return [
        len(tokenizer.expand(tokens, [next(counts) for _ in of_text]))
        for tokens, of_text in zip(sequences, images, strict=True)
    ]


def tokens_of(text: str, tokenizer: Tokenizer, key: str) -> list[int]:
    """Encodes `text`. Any exception of the tokenizer becomes a DataError that names `key`."""
    try:
        return tokenizer.encode(text)
    except UnknownCharacterError as error:
        raise UnknownCharacterError(f"{key}: {error}", error.characters) from None
    except Exception as error:
        raise DataError(f"{key}: the tokenizer fails on this text ({type(error).__name__}: {error})") from error


def too_long(item: Text, tokens: int, limit: int, key: str) -> str:
    """The fault of a text with more tokens than `limit`, which the configuration key `key` gives."""
    kinds = {Prompt: "prompt", Conversation: "conversation", TokenIds: "sample"}
    kind = kinds.get(type(item), "document")
    ending = ", end token included" if kind == "document" else ""
    return f"the {kind} has {tokens:,} tokens{ending}, more than the {limit:,} allowed ({key})"
