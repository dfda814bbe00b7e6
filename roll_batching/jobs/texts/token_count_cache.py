"""Token counts of texts, cached in files whose names hash everything that the counts depend on."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import zipfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from roll_batching.files import atomic_file
from roll_batching.jobs.texts.tokenizers import Tokenizer
from roll_batching.planning.arrays import Ints

logger = logging.getLogger(__name__)

FOLDER = "token_counts"
"""Folder of the cache, in the job's `output_dir`."""
_VERSION = 2
"""Raise it when texts are encoded otherwise here, or the files have another format."""


@dataclass(frozen=True)
class TokenCounts:
    """Tokens of texts, and how many of the texts train turns without a stop token."""

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
        """The counts of the texts with this fingerprint; None if they are not cached."""
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
