"""How many tokens texts have: counted once, and kept in a file that is named after all they depend on."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import zipfile
from pathlib import Path

import numpy as np

from roll_batching.files import atomic_file
from roll_batching.jobs.texts.tokenizers import Tokenizer
from roll_batching.planning.arrays import Ints

logger = logging.getLogger(__name__)

FOLDER = "token_counts"
"""Where a job keeps them, in its `output_dir`."""
_FORM = 1
"""Another number whenever texts become other tokens here, or files another form."""


class KeptCounts:
    """The token counts of texts of one kind, by one tokenizer: other texts or another tokenizer have other names.

    Args:
        folder: where the files are; it need not exist.
        tokenizer: that counts.
        kind: of the texts, and whether they are chats: the same letters are other tokens then.
    """

    def __init__(self, folder: Path, tokenizer: Tokenizer, kind: str) -> None:
        self.folder = folder
        self._of = hashlib.sha256(repr((_FORM, kind, tokenizer.fingerprint)).encode()).hexdigest()[:16]

    def any(self) -> bool:
        """Whether there are any, of whatever texts."""
        return any(self.folder.glob(f"{self._of}-*.npz"))

    def of(self, fingerprint: str) -> Ints | None:
        """What `token_counts` gave of the texts with this fingerprint; None where nobody kept it."""
        try:
            with np.load(self._file(fingerprint), allow_pickle=False) as file:
                return np.asarray(file["counts"], dtype=np.int64)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
            logger.warning("%s cannot be read (%s): tokens are counted again", self._file(fingerprint), error)
            return None

    def keep(self, fingerprint: str, counts: Ints) -> None:
        """Keeps them; where that fails a notice says that they will be counted again."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with atomic_file(self._file(fingerprint)) as partial, partial.open("wb") as file:
                np.savez(file, counts=counts)
        except OSError as error:
            logger.warning("token counts cannot be kept in %s (%s): the next start counts again", self.folder, error)

    def forget(self, fingerprint: str) -> None:
        """Removes what is kept of these texts."""
        with contextlib.suppress(OSError):
            self._file(fingerprint).unlink(missing_ok=True)

    def _file(self, fingerprint: str) -> Path:
        return self.folder / f"{self._of}-{fingerprint[:32]}.npz"
