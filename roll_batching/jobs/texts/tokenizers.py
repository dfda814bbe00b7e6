"""Text to tokens and back: one small protocol, a tokenizer of characters, and Hugging Face's."""

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
    """A text holds characters that the tokenizer cannot turn into tokens: all of them are in `characters`."""

    def __init__(self, message: str, characters: frozenset[str]) -> None:
        super().__init__(message)
        self.characters = characters


@runtime_checkable
class Tokenizer(Protocol):
    """What the jobs need of a tokenizer. Special tokens are never added by `encode`."""

    @property
    def eos_token_id(self) -> int:
        """The token that ends a response."""

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """All tokens that end a response, `eos_token_id` among them."""

    @property
    def pad_token_id(self) -> int:
        """The token that fills gaps; may equal `eos_token_id`."""

    @property
    def vocab_size(self) -> int:
        """One more than the largest token."""

    @property
    def fingerprint(self) -> str:
        """Digest of all that says which tokens texts and chats become."""

    @property
    def parts(self) -> Mapping[str, str]:
        """Digests of the `vocabulary`, which text each token is, and of the rest, by name; of any library's version."""

    def encode(self, text: str) -> list[int]:
        """The tokens of `text`."""

    def decode(self, tokens: Iterable[int]) -> str:
        """The text of `tokens`, special tokens included."""


class CharTokenizer:
    """One token per character; a character's id is its place in the vocabulary.

    Args:
        vocabulary: the characters, each once. The end and pad tokens are among them.
        eos: the character that ends a response. Texts to encode may not contain it: append `eos_token_id`.
        pad: the character that fills gaps, by default `eos`; refused in texts as well.

    Raises:
        DataError: for an empty vocabulary, a repeated character, or an end or pad token that is not in it.
    """

    def __init__(self, vocabulary: str, eos: str, pad: str | None = None) -> None:
        pad = eos if pad is None else pad
        self._id = {character: number for number, character in enumerate(vocabulary)}
        if len(self._id) != len(vocabulary):
            repeated = sorted({c for c in vocabulary if vocabulary.count(c) > 1})
            raise DataError(f"The vocabulary holds {', '.join(map(repr, repeated))} more than once.")
        for what, token in (("end", eos), ("pad", pad)):
            if token not in self._id:
                raise DataError(f"The {what} token {token!r} is not one character of the vocabulary.")
        self._vocabulary = vocabulary
        self._reserved = {pad: "fills gaps", eos: "ends a response"}
        self._plain = frozenset(vocabulary) - self._reserved.keys()
        self.eos_token_id: int = self._id[eos]
        self.pad_token_id: int = self._id[pad]

    @classmethod
    def from_file(cls, path: str | Path, eos: str, pad: str | None = None) -> CharTokenizer:
        """Read the vocabulary from a UTF-8 text file; line ends at its end do not count.

        Raises:
            DataError: for a file that cannot be read, and all of the constructor.
        """
        if Path(path).exists() and not Path(path).is_file():  # a pipe would be waited for
            raise DataError(f"The vocabulary file {path} cannot be read: it is no regular file")
        try:
            text = Path(path).read_text(encoding="utf-8-sig")
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"The vocabulary file {path} cannot be read: {error}") from None
        return cls(text.rstrip("\r\n"), eos, pad)

    @property
    def vocab_size(self) -> int:
        """Characters of the vocabulary."""
        return len(self._vocabulary)

    @property
    def fingerprint(self) -> str:
        """Digest of the vocabulary and the reserved characters."""
        return _digest("characters", self._vocabulary, self._reserved)

    @property
    def parts(self) -> Mapping[str, str]:
        """Digests of the vocabulary and of the reserved characters."""
        return {"vocabulary": _digest(self._vocabulary), "end tokens": _digest(self._reserved)}

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """The end token."""
        return (self.eos_token_id,)

    def encode(self, text: str) -> list[int]:
        """The tokens of `text`.

        Raises:
            UnknownCharacterError: naming the first that is unknown or reserved, its position and the text.
        """
        if not self._plain.issuperset(text):
            raise self._unknown(text)
        return [self._id[character] for character in text]

    def _unknown(self, text: str) -> UnknownCharacterError:
        position, character = next((p, c) for p, c in enumerate(text) if c not in self._plain)
        why = self._reserved.get(character)
        why = f"is reserved (it {why})" if why else "is not in the vocabulary"
        shown = ascii(text if len(text) <= 60 else f"{text[:57]}...")
        message = f"Character {ascii(character)} at position {position} of {shown} {why}"
        return UnknownCharacterError(message, frozenset(text) - self._plain)

    def decode(self, tokens: Iterable[int]) -> str:
        """The text of `tokens`, end and pad characters included.

        Raises:
            DataError: for a token outside the vocabulary.
        """
        numbers = [int(token) for token in tokens]
        if bad := [token for token in numbers if not 0 <= token < self.vocab_size]:
            raise DataError(f"Tokens outside the vocabulary of {self.vocab_size}: {bad[:8]}.")
        return "".join(self._vocabulary[token] for token in numbers)


class HFTokenizer:
    """A tokenizer of Hugging Face's `transformers`, by name or folder.

    Args:
        name_or_path: as for `AutoTokenizer.from_pretrained`.
        eos: text of the end token, by default the tokenizer's own.
        pad: text of the pad token, by default the tokenizer's own, else the end token.
        model: the model directory whose `generation_config.json` says which tokens end a response, by default the
            tokenizer's folder. With `eos` that token alone does.

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
            raise DataError(f"No tokenizer could be loaded from {str(name_or_path)!r}: {error}") from None
        if len(self.tokenizer.get_vocab().keys() - self.tokenizer.get_added_vocab().keys()) < 2:
            # What transformers makes of a folder without these files, for some families: the end token and no other.
            raise DataError(
                f"The tokenizer of {str(name_or_path)!r} holds special tokens alone, and no text has tokens: put its "
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
            raise DataError(f"The tokenizer has no token {token!r}.")
        return known[token]

    @property
    def vocab_size(self) -> int:
        """Tokens of the vocabulary, added ones included."""
        return len(self.tokenizer)

    @cached_property
    def fingerprint(self) -> str:
        """Digest of its rules (of a tokenizer in Python: its vocabulary), its chat template and its library."""
        import transformers

        one = self.tokenizer
        named = (type(one).__name__, transformers.__version__, one.chat_template, self.eos_token_id)
        return _digest(*named, self._rules())

    def _rules(self) -> str:
        """From texts to tokens, as JSON; of a tokenizer in Python: its vocabulary."""
        rules = getattr(self.tokenizer, "backend_tokenizer", None)
        if rules is None:
            return json.dumps(sorted(self.tokenizer.get_vocab().items()), sort_keys=True)
        # These two change with its calls.
        return json.dumps(json.loads(rules.to_str()) | {"truncation": None, "padding": None}, sort_keys=True)

    @cached_property
    def parts(self) -> Mapping[str, str]:
        """Digests of the vocabulary, the rules, the chat template and the end tokens."""
        return {
            "vocabulary": _digest(sorted(self.tokenizer.get_vocab().items())),
            "rules": _digest(self._rules()),
            "chat template": _digest(self.tokenizer.chat_template),
            "end tokens": _digest(self.eos_token_id, self.stop_token_ids),
        }

    def encode(self, text: str) -> list[int]:
        """The tokens of `text`, without special tokens around it."""
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def decode(self, tokens: Iterable[int]) -> str:
        """The text of `tokens`, special tokens included, spaces as they are."""
        numbers = [int(token) for token in tokens]
        return self.tokenizer.decode(numbers, skip_special_tokens=False, clean_up_tokenization_spaces=False)


def _digest(*words: Any) -> str:
    return hashlib.sha256(repr(words).encode("utf-8", "surrogatepass")).hexdigest()


def encode_many(tokenizer: Tokenizer, texts: Sequence[str]) -> list[list[int]]:
    """`tokenizer.encode` of each text; Hugging Face's are encoded together, on all cores."""
    if isinstance(tokenizer, HFTokenizer) and texts:
        return list(tokenizer.tokenizer(list(texts), add_special_tokens=False)["input_ids"])
    return [tokenizer.encode(text) for text in texts]
