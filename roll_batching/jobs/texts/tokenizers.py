"""Tokenizers: the protocol that jobs use, a tokenizer of characters, and one of Hugging Face's."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from roll_batching.errors import DataError
from roll_batching.huggingface.directory import find_directory, stop_tokens


class UnknownCharacterError(DataError):
    """A text holds characters unknown to the tokenizer; `characters` holds all of them."""

    def __init__(self, message: str, characters: frozenset[str]) -> None:
        super().__init__(message)
        self.characters = characters


@runtime_checkable
class Tokenizer(Protocol):
    """The tokenizer interface of the jobs. `encode` never adds special tokens."""

    @property
    def eos_token_id(self) -> int:
        """The token that ends a response."""

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """All tokens that end a response, including `eos_token_id`."""

    @property
    def pad_token_id(self) -> int:
        """The padding token; may equal `eos_token_id`."""

    @property
    def vocab_size(self) -> int:
        """The largest token id plus 1."""

    @property
    def fingerprint(self) -> str:
        """Digest of everything that decides the tokens of texts and chats, library version included."""

    @property
    def parts(self) -> Mapping[str, str]:
        """Digests by name: `vocabulary` (the text of each token) and other parts; without the library version."""

    def encode(self, text: str) -> list[int]:
        """The tokens of `text`."""

    def decode(self, tokens: Iterable[int]) -> str:
        """The text of `tokens`, special tokens included."""


class CharTokenizer:
    """One token per character; its id is its index in the vocabulary.

    Args:
        vocabulary: the characters, each once. The end and pad tokens are among them.
        eos: the character that ends a response. Texts to encode may not contain it: append `eos_token_id`.
        pad: the padding character, by default `eos`; texts may not contain it either.

    Raises:
        DataError: for an empty vocabulary, a repeated character, or an end or pad token that is not in it.
    """

    def __init__(self, vocabulary: str, eos: str, pad: str | None = None) -> None:
        pad = eos if pad is None else pad
        self._id = {character: number for number, character in enumerate(vocabulary)}
        if len(self._id) != len(vocabulary):
            repeated = sorted({c for c in vocabulary if vocabulary.count(c) > 1})
            raise DataError(f"The vocabulary holds {', '.join(map(repr, repeated))} more than once: list it once.")
        for kind, token in (("end", eos), ("pad", pad)):
            if token not in self._id:
                raise DataError(f"The {kind} token {token!r} is not one character of the vocabulary: add it there.")
        self._vocabulary = vocabulary
        self._reserved = {pad: "fills gaps", eos: "ends a response"}
        self._plain = frozenset(vocabulary) - self._reserved.keys()
        self.eos_token_id: int = self._id[eos]
        self.pad_token_id: int = self._id[pad]

    @classmethod
    def from_file(cls, path: str | Path, eos: str, pad: str | None = None) -> CharTokenizer:
        """Read the vocabulary from a UTF-8 text file; trailing line ends are removed.

        Raises `DataError` for a file that cannot be read, and the errors of the constructor.
        """
        if Path(path).exists() and not Path(path).is_file():  # opening a pipe blocks
            raise DataError(f"The vocabulary file {path} cannot be read: it is not a regular file")
        try:
            text = Path(path).read_text(encoding="utf-8-sig")
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"The vocabulary file {path} cannot be read: {error}") from None
        return cls(text.rstrip("\r\n"), eos, pad)

    @property
    def vocab_size(self) -> int:
        """Number of characters in the vocabulary."""
        return len(self._vocabulary)

    @property
    def fingerprint(self) -> str:
        """Digest of the vocabulary and the reserved characters."""
        return digest_of("characters", self._vocabulary, self._reserved)

    @property
    def parts(self) -> Mapping[str, str]:
        """Digests of the vocabulary and of the reserved characters."""
        return {"vocabulary": digest_of(self._vocabulary), "end tokens": digest_of(self._reserved)}

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """The end token."""
        return (self.eos_token_id,)

    def encode(self, text: str) -> list[int]:
        """The tokens of `text`.

        Raises `UnknownCharacterError` naming the first unknown or reserved character, its position and the text.
        """
        if not self._plain.issuperset(text):
            raise self._unknown(text)
        return [self._id[character] for character in text]

    def _unknown(self, text: str) -> UnknownCharacterError:
        position, character = next((p, c) for p, c in enumerate(text) if c not in self._plain)
        use = self._reserved.get(character)
        reason = f"is reserved (it {use})" if use else "is not in the vocabulary"
        excerpt = ascii(text if len(text) <= 60 else f"{text[:57]}...")
        message = f"Character {ascii(character)} at position {position} of {excerpt} {reason}"
        return UnknownCharacterError(message, frozenset(text) - self._plain)

    def decode(self, tokens: Iterable[int]) -> str:
        """The text of `tokens`, end and pad characters included.

        Raises `DataError` for a token outside the vocabulary.
        """
        numbers = [int(token) for token in tokens]
        if bad := [token for token in numbers if not 0 <= token < self.vocab_size]:
            raise DataError(f"Tokens outside the vocabulary of {self.vocab_size}: {bad[:8]}.")
        return "".join(self._vocabulary[token] for token in numbers)


class HFTokenizer:
    """A Hugging Face tokenizer (`transformers`), by name or folder.

    Args:
        name_or_path: as for `AutoTokenizer.from_pretrained`.
        eos: text of the end token, by default the tokenizer's own.
        pad: text of the pad token, by default the tokenizer's own, else the end token.
        model: the model directory whose `generation_config.json` lists the tokens that end a response, by default the
            tokenizer's folder. With `eos` only that token ends one.

    Raises:
        DataError: when `transformers` is not installed, nothing can be loaded, or there is no such token.
    """

    def __init__(
        self, name_or_path: str | Path, *, eos: str | None = None, pad: str | None = None, model: str | None = None
    ) -> None:
        try:
            from transformers import AutoTokenizer
        except ImportError as error:
            raise DataError(
                f"Tokenizer {str(name_or_path)!r} needs the package transformers ({error}): "
                "pip install 'roll-batching[hf]'."
            ) from None
        folder = find_directory(str(name_or_path))
        try:
            self.tokenizer: Any = AutoTokenizer.from_pretrained(str(folder or name_or_path))
        except (OSError, ValueError) as error:
            raise DataError(
                f"No tokenizer could be loaded from {str(name_or_path)!r}: {error}. Name another in "
                "tokenizer.name_or_path."
            ) from None
        if len(self.tokenizer.get_vocab().keys() - self.tokenizer.get_added_vocab().keys()) < 2:
            # For some families transformers makes a tokenizer of special tokens only from a folder without its files.
            raise DataError(
                f"The tokenizer of {str(name_or_path)!r} has special tokens only and cannot encode text: put its "
                "files there (tokenizer.json, or vocab.json and merges.txt), or name another in tokenizer.name_or_path."
            )
        eos_id = self._token_id(eos, self.tokenizer.eos_token_id)
        if eos_id is None:
            raise DataError(f"Tokenizer {str(name_or_path)!r} has no end token: name one (eos_token).")
        self.name = str(name_or_path)
        self.eos_token_id: int = eos_id
        described = find_directory(model) if model is not None else folder
        stops = stop_tokens(described) if eos is None and described is not None else ()
        self.stop_token_ids: tuple[int, ...] = tuple(sorted({eos_id, *stops}))
        pad_id = self._token_id(pad, self.tokenizer.pad_token_id)
        self.pad_token_id: int = eos_id if pad_id is None else pad_id

    def _token_id(self, token: str | None, default: int | None) -> int | None:
        if token is None:
            return default
        known = self.tokenizer.get_vocab()
        if token not in known:
            raise DataError(f"The tokenizer has no token {token!r}: name one of its tokens.")
        return known[token]

    @property
    def vocab_size(self) -> int:
        """Number of tokens in the vocabulary, including added tokens."""
        return len(self.tokenizer)

    @cached_property
    def fingerprint(self) -> str:
        """Digest of rules (or, of a Python tokenizer, vocabulary), chat template, end token and library version."""
        import transformers

        tokenizer = self.tokenizer
        values = (type(tokenizer).__name__, transformers.__version__, tokenizer.chat_template, self.eos_token_id)
        return digest_of(*values, self._rules())

    def _rules(self) -> str:
        """The rules of a fast tokenizer as JSON; the vocabulary of a Python one."""
        rules = getattr(self.tokenizer, "backend_tokenizer", None)
        if rules is None:
            return json.dumps(sorted(self.tokenizer.get_vocab().items()), sort_keys=True)
        # `truncation` and `padding` change with the arguments of the last call.
        return json.dumps(json.loads(rules.to_str()) | {"truncation": None, "padding": None}, sort_keys=True)

    @cached_property
    def parts(self) -> Mapping[str, str]:
        """Digests of the vocabulary, the rules, the chat template and the end tokens."""
        return {
            "vocabulary": digest_of(sorted(self.tokenizer.get_vocab().items())),
            "rules": digest_of(self._rules()),
            "chat template": digest_of(self.tokenizer.chat_template),
            "end tokens": digest_of(self.eos_token_id, self.stop_token_ids),
        }

    def encode(self, text: str) -> list[int]:
        """The tokens of `text`, without special tokens around it."""
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def decode(self, tokens: Iterable[int]) -> str:
        """The text of `tokens`, special tokens included, spaces as they are."""
        numbers = [int(token) for token in tokens]
        return self.tokenizer.decode(numbers, skip_special_tokens=False, clean_up_tokenization_spaces=False)


def digest_of(*values: Any) -> str:
    """Digest of the `repr` of `values`."""
    return hashlib.sha256(repr(values).encode("utf-8", "surrogatepass")).hexdigest()


def encode_many(tokenizer: Tokenizer, texts: Sequence[str]) -> list[list[int]]:
    """`tokenizer.encode` of each text; a Hugging Face tokenizer encodes them together, on all cores."""
    if isinstance(tokenizer, HFTokenizer) and texts:
        return list(tokenizer.tokenizer(list(texts), add_special_tokens=False)["input_ids"])
    return [tokenizer.encode(text) for text in texts]
