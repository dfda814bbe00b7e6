"""Samples of token ids, read from columns of records."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from roll_batching.errors import DataError
from roll_batching.planning.arrays import Ints

_UNTRAINED = -100
"""Label of a token that is not trained, as in transformers."""
_SAY_TRAINED = ("labels", "loss_mask", "completion_mask", "assistant_masks")
"""Columns that say which tokens are trained; the last two are TRL's."""


@dataclass(frozen=True, slots=True, eq=False)
class TokenIds:
    """A supervised sample of token ids, which are read as they are."""

    input_ids: np.ndarray
    """Of any integer dtype, [L]."""
    trained: NDArray[np.bool_]
    """Whether the loss covers a token, bool[L]."""
    line: dict[str, Any] = field(default_factory=dict)
    """The record without its token columns."""
    source: str = "memory"
    images: tuple[()] = ()
    variables: Mapping[str, Any] = field(default_factory=dict)

    @property
    def prompt(self) -> str:
        """The ids in hexadecimal, for fingerprints."""
        return self.input_ids.astype("<i4").tobytes().hex()

    @property
    def response(self) -> str:
        """The mask in hexadecimal, for fingerprints."""
        return self.trained.tobytes().hex()

    def checked_ids(self, vocab_size: int) -> list[int]:
        """The ids as a list. Raises DataError for an id outside of the vocabulary."""
        bad = (self.input_ids < 0) | (self.input_ids >= vocab_size)
        if bad.any():
            raise DataError(out_of_vocabulary(int(self.input_ids[bad][0]), vocab_size))
        return self.input_ids.tolist()


def out_of_vocabulary(token: int, vocab_size: int) -> str:
    """The fault of a token id that the tokenizer does not have."""
    return f"the token id {token:,} is not one of the tokenizer's {vocab_size:,}, so another tokenizer made it"


def read_token_ids(line: Mapping[str, Any], key: str, source: str) -> TokenIds:
    """Makes a sample of a record: ids under `key`, trained tokens by its `labels` and masks, else all.

    Raises DataError for columns that hold no integers, differ in length, or have labels that are other tokens, padding,
    or several documents.
    """
    ids, columns = _integers(line, key), {key, "attention_mask", "position_ids", *_SAY_TRAINED}
    trained = np.ones(len(ids), dtype=bool)
    if line.get("attention_mask") is not None and not _integers(line, "attention_mask").all():
        raise DataError(f"'attention_mask' has zeros, so {key!r} are padded: write each record without padding")
    positions = np.arange(len(ids))
    if line.get("position_ids") is not None and not np.array_equal(_integers(line, "position_ids"), positions):
        raise DataError(f"'position_ids' do not count from 0 to the end of {key!r}: write each document as a record")
    for name in _SAY_TRAINED:
        if name not in line:
            continue
        values = _integers(line, name)
        if len(values) != len(ids):
            raise DataError(f"{name!r} has {len(values):,} values for {len(ids):,} tokens of {key!r}")
        if name == "labels" and (values != ids)[values != _UNTRAINED].any():
            raise DataError(f"'labels' are other tokens than {key!r}: a label is its token, or {_UNTRAINED}, unshifted")
        if name != "labels" and ((values < 0) | (values > 1)).any():
            raise DataError(f"{name!r} has values other than 0 (not trained) and 1")
        trained &= values != (_UNTRAINED if name == "labels" else 0)
    if not trained[1:].any():
        raise DataError(f"no token of {key!r} is trained (the first has none before it)")
    return TokenIds(ids, trained, {name: line[name] for name in line if name not in columns}, source)


def _integers(line: Mapping[str, Any], key: str) -> Ints:
    try:
        values = np.asarray(line[key])
    except KeyError:
        raise DataError(f"key {key!r} is missing; the line has {', '.join(line)[:80] or 'no keys'}") from None
    except ValueError:  # rows of different lengths
        values = np.zeros((0, 0))
    if values.ndim != 1 or not len(values) or values.dtype.kind not in "iub":
        raise DataError(f"{key!r} must be a list of integers, at least one")
    return values.astype(np.int64)
