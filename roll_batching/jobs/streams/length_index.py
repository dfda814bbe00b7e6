"""Measures the lengths of all samples of a dataset once, and caches them in a file."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np

from roll_batching.errors import DataError
from roll_batching.files import atomic_file
from roll_batching.planning.arrays import Ints

logger = logging.getLogger(__name__)

OnError = Literal["raise", "skip"]
_CHECKED_SAMPLES = 16
"""Samples that are measured again before a cache file is used."""


class IndexedDataset(Protocol):
    """A map-style dataset."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


def length_of(sample: Any, key: str) -> int:
    """Number of tokens of a sequence: the length of `sample[key]`, or of `sample` if it is not a mapping.

    Raises DataError if that has no length.
    """
    try:
        if isinstance(sample, Mapping):
            return len(sample[key])
        if not (isinstance(sample, Sequence) and sample and isinstance(sample[0], Mapping)):
            return len(sample)
    except (KeyError, TypeError):
        known = f"keys {', '.join(map(str, sample))}" if isinstance(sample, Mapping) else type(sample).__name__
        raise DataError(f"it has no length under {key!r} ({known}): name the key of its tokens (length_key)") from None
    raise DataError("it is several sequences, which stay together: give their lengths, one row per sample")


def fingerprint_of(dataset: Any) -> str | None:
    """The dataset's `fingerprint` or (Hugging Face's `datasets`) `_fingerprint`, or None."""
    fingerprint = getattr(dataset, "fingerprint", None) or getattr(dataset, "_fingerprint", None)
    return fingerprint if isinstance(fingerprint, str) else None


def read_sample(dataset: IndexedDataset, index: int) -> Any:
    """Reads the sample `index`. Any exception of the dataset becomes a DataError that names the sample."""
    try:
        return dataset[index]
    except Exception as error:
        raise DataError(f"Sample {index} cannot be read ({type(error).__name__}: {error}).") from error


def load_or_measure_lengths(
    dataset: IndexedDataset, measure: Callable[[Any], int], *, cache: Path | None = None, on_error: OnError = "raise"
) -> Ints:
    """Returns the lengths of all samples, int64[n]; under "skip", 0 for a sample that cannot be read.

    Lengths come from the file `cache` if it fits this dataset: in fingerprint, number of samples, and the lengths of
    some samples, measured again. Otherwise they are measured, and written there.

    Raises DataError, naming the sample, if a sample cannot be read or has no tokens.
    """
    cached = _read_cache(dataset, measure, cache) if cache is not None else None
    if cached is not None:
        return cached
    lengths = np.zeros(len(dataset), dtype=np.int64)
    for index in range(len(dataset)):
        try:
            lengths[index] = _measure(dataset, measure, index)
        except DataError as error:
            if on_error == "raise":
                raise
            logger.warning("%s It is left out.", error)
    if cache is not None:
        with atomic_file(cache) as partial, partial.open("wb") as file:
            np.savez(file, lengths=lengths, dataset=np.array(fingerprint_of(dataset) or ""))
    return lengths


def _measure(dataset: IndexedDataset, measure: Callable[[Any], int], index: int) -> int:
    sample = read_sample(dataset, index)
    try:
        length = measure(sample)
    except DataError as error:
        raise DataError(f"Sample {index}: {error}.") from None
    if length < 1:
        raise DataError(f"Sample {index} has no tokens (length {length}): leave it out.")
    return length


def _read_cache(dataset: IndexedDataset, measure: Callable[[Any], int], cache: Path) -> Ints | None:
    """The lengths in the file; None if it does not exist or belongs to another dataset."""
    if not cache.exists():
        return None
    try:
        with np.load(cache, allow_pickle=False) as file:
            lengths, dataset_of = file["lengths"], str(file["dataset"])
    except (OSError, ValueError, KeyError) as error:
        logger.warning("%s cannot be read (%s): lengths are measured again", cache, error)
        return None
    if len(lengths) != len(dataset) or dataset_of != (fingerprint_of(dataset) or ""):
        logger.warning("%s is of another dataset: lengths are measured again", cache)
        return None
    for index in np.unique(np.linspace(0, len(lengths) - 1, _CHECKED_SAMPLES).astype(np.int64)).tolist():
        if lengths[index] and _measure(dataset, measure, index) != lengths[index]:
            logger.warning("%s has another length for sample %d: lengths are measured again", cache, index)
            return None
    return np.asarray(lengths, dtype=np.int64)
