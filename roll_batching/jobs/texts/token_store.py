"""Memory-mapped datasets of token ids: Megatron's `.bin` and `.idx`, and the tokens of texts, kept between starts."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from roll_batching.errors import DataError
from roll_batching.files import atomic_file, cause
from roll_batching.jobs.texts.texts import TextDataset
from roll_batching.jobs.texts.token_ids import TokenIds, out_of_vocabulary
from roll_batching.planning.arrays import Ints

logger = logging.getLogger(__name__)

_CHUNK, _SAMPLED_BLOCKS, _BLOCK_BYTES = 2**24, 64, 2**16


class StoredTokens(TextDataset[TokenIds]):
    """A memory-mapped dataset of token ids, in place of a `TextDataset`.

    Args:
        ids: of all samples, end to end; of an untrained token the id's complement `~id`.
        bounds: first token of each sample and the end of the last, int64[n + 1].
        place: names the file in errors.
        fingerprint, record_fingerprint: as of a `TextDataset`.
        without_stop: samples that train turns without a stop token.
        first_trained: whether the mask says it for the first token; otherwise it is never trained.
        documents: number of each sample's document in the file, int64[n]; by default 1, 2, 3, ...
    """

    def __init__(
        self,
        ids: np.ndarray,
        bounds: Ints,
        place: str,
        *,
        fingerprint: str,
        record_fingerprint: str = "",
        without_stop: int = 0,
        first_trained: bool = True,
        documents: Ints | None = None,
    ) -> None:
        self._documents = documents
        self._ids, self._bounds, self._place, self._first_trained = ids, bounds, place, first_trained
        self.fingerprint, self.record_fingerprint = fingerprint, record_fingerprint or fingerprint
        self.without_stop = without_stop

    @property
    def lengths(self) -> Ints:
        """Tokens of each sample, int64[n]."""
        return np.diff(self._bounds)

    def __len__(self) -> int:
        return len(self._bounds) - 1

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(len(self)))]
        index = range(len(self))[index]
        raw = self._ids[self._bounds[index] : self._bounds[index + 1]].astype(np.int64)
        trained = raw >= 0
        trained[:1] &= self._first_trained
        return TokenIds(np.where(raw >= 0, raw, ~raw), trained, source=self._source(index))

    def _source(self, index: int) -> str:
        return f"{self._place}:{index + 1 if self._documents is None else self._documents[index]}"

    def check_vocabulary(self, vocab_size: int) -> None:
        """Reads all ids. Raises DataError, naming the sample, for one outside of the vocabulary."""
        for start in range(0, len(self._ids), _CHUNK):
            chunk = self._ids[start : start + _CHUNK]
            if int(chunk.max()) >= vocab_size or int(chunk.min()) < 0:
                first = start + int(np.argmax((chunk < 0) | (chunk >= vocab_size)))
                sample = self._source(int(np.searchsorted(self._bounds, first, side="right")) - 1)
                text = out_of_vocabulary(int(self._ids[first]), vocab_size)
                raise DataError(f"{sample}: {text}. Name the tokenizer that the file was made with")


# ---- Megatron's .bin and .idx


def is_indexed(path: str | Path) -> bool:
    """Whether `path` is the prefix of a `.bin` and an `.idx` file of Megatron's."""
    return all(Path(f"{path}{suffix}").is_file() for suffix in (".bin", ".idx"))


def open_indexed(paths: Sequence[str | Path], max_length: int) -> StoredTokens:
    """Opens Megatron's files as one dataset: a document is a sample, whose tokens are all trained.

    A longer document than `max_length` is cut into pieces of about equal length, with a notice. Raises DataError.
    """
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    if len(paths) != 1:
        raise DataError(f"{len(paths)} files are given, and one prefix of .bin and .idx is read: merge them")
    prefix = str(paths[0])
    try:
        dataset = IndexedDataset(prefix)
        lengths, documents = dataset.sequence_lengths.astype(np.int64), dataset.document_indices
        # Not the dataset's own map of the tokens: it is unmapped with the dataset, under arrays that still read it.
        ids = np.memmap(f"{prefix}.bin", dtype=dataset.index.dtype, mode="r")  # fails for a part of a token
        if len(ids) != lengths.sum():
            raise ValueError(f".idx describes {lengths.sum():,} tokens of {ids.dtype}, and .bin has {len(ids):,}")
    except Exception as error:  # asserts, and errors of numpy's
        error = error if str(error) else ValueError("the documents of .idx do not hold all its sequences")  # Megatron's
        raise DataError(f"{prefix}.bin and .idx cannot be read ({error}): write them again, or copy them") from None
    if ids.dtype.kind not in "iu":
        raise DataError(f"{prefix}.bin holds {ids.dtype}, and token ids are integers: make it with preprocess_data.py")
    bounds = np.concatenate([[0], np.cumsum(lengths)])[documents]
    numbers = np.flatnonzero(np.diff(bounds)) + 1  # an empty document is no sample
    bounds = np.unique(bounds)
    sizes = np.diff(bounds)
    if (sizes < 2).any() or not len(sizes):
        what = f"document {numbers[sizes < 2][0]:,} has a single token" if len(sizes) else "it has no document"
        raise DataError(f"{prefix}.idx: {what}, which trains nothing: write the files without it")
    pieces = -(-sizes // max_length)
    if (pieces > 1).any() and os.environ.get("RANK", "0") == "0":
        text = "%s: %d of %d documents have more than %d tokens, and are cut into %d pieces"
        logger.warning(text, prefix, (pieces > 1).sum(), len(sizes), max_length, pieces[pieces > 1].sum())
    offsets = np.arange(pieces.sum()) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    starts = np.repeat(bounds[:-1], pieces) + np.repeat(sizes, pieces) * offsets // np.repeat(pieces, pieces)
    digest = hashlib.sha256(np.append(starts, bounds[-1:]).tobytes() + content_digest(Path(f"{prefix}.bin")).encode())
    names: dict[str, Any] = {"fingerprint": digest.hexdigest(), "documents": np.repeat(numbers, pieces)}
    return StoredTokens(ids, np.append(starts, bounds[-1]), prefix, first_trained=False, **names)


# ---- tokens of an earlier start


def content_digest(file: Path) -> str:
    """Digest of a file's size and of 64 blocks of 64 KiB, from its beginning to its end."""
    size, digest = file.stat().st_size, hashlib.sha256()
    digest.update(str(size).encode())
    with file.open("rb") as stream:
        for start in np.unique(np.linspace(0, max(size - _BLOCK_BYTES, 0), _SAMPLED_BLOCKS).astype(np.int64)).tolist():
            stream.seek(start)
            digest.update(stream.read(_BLOCK_BYTES))
    return digest.hexdigest()


def file_digest(path: Path) -> str:
    """Digest of a file, or of the files of a folder: names, times of change, sizes and sampled contents."""
    files = sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]
    return repr([(str(file), file.stat().st_mtime_ns, content_digest(file)) for file in files])


class TokenCache:
    """The tokens of one set of texts in a folder; other texts, tokenizers or settings have files of other names.

    Args:
        folder: folder of the files, which is made.
        key: everything that decides the tokens.
        place: names the data in errors.
    """

    def __init__(self, folder: Path, key: str, place: str) -> None:
        name = hashlib.sha256(f"1 {key}".encode()).hexdigest()[:32]
        self._ids, self._index, self._place = folder / f"{name}.tokens", folder / f"{name}.npz", place

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Context in which no other process writes these files. Raises DataError where they cannot be written."""
        folder = self._ids.parent
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with self._ids.with_suffix(".lock").open("w") as file:
                fcntl.flock(file, fcntl.LOCK_EX)  # the kernel releases it with the process
                yield
        except OSError as error:  # also of the block: a full disk
            if error.filename is not None and folder not in Path(error.filename).parents:
                raise  # of a file that the block reads
            text = f"actor_train.data_args.token_cache: {folder} cannot be written ({cause(error)})"
            raise DataError(f"{text}: name a folder with free space, in which files can be locked") from None

    def load(self) -> StoredTokens | None:
        """Opens the tokens; None if they are not there, with a notice if they are broken."""
        try:
            with np.load(self._index, allow_pickle=False) as index:
                values = {name: index[name] for name in index.files}
            bounds = values.pop("bounds")
            ids = np.memmap(self._ids, dtype=np.int32, mode="r", shape=(int(bounds[-1]),))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
            logger.warning("%s cannot be read (%s): all texts are tokenised again", self._index, error)
            return None
        return StoredTokens(ids, bounds, self._place, **{name: value.item() for name, value in values.items()})

    @contextlib.contextmanager
    def writer(self) -> Iterator[TokenWriter]:
        """Context of a `TokenWriter`, whose files are kept if the block succeeds and it was given an index."""
        for partial in self._ids.parent.glob(f".partial-*-{self._ids.stem}.*"):  # of a process that was killed
            partial.unlink(missing_ok=True)
        self._index.unlink(missing_ok=True)
        with atomic_file(self._ids) as path, path.open("wb") as file:
            writer = TokenWriter(file)
            yield writer
        if writer.index:  # last: tokens without it are not used
            with atomic_file(self._index) as path, path.open("wb") as file:
                np.savez(file, bounds=np.cumsum([0, *writer.lengths], dtype=np.int64), **writer.index)


class TokenWriter:
    """Writes samples to the file of a `TokenCache`."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.lengths: list[int] = []
        self.index: dict[str, Any] = {}
        """Further arguments of `StoredTokens`."""

    def add(self, tokens: Sequence[int], trained: Sequence[bool]) -> None:
        """Append a sample."""
        ids, mask = np.asarray(tokens, dtype=np.int32), np.asarray(trained, dtype=bool)
        self.lengths.append(len(ids))
        self._file.write(np.where(mask, ids, ~ids).tobytes())
