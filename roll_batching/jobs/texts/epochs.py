"""Draws batches from a dataset epoch after epoch, with a position that can be saved and restored."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Generic

import numpy as np

from roll_batching.errors import DataError
from roll_batching.jobs.texts.texts import Prompt, T, TextDataset

_ORDER_STREAM = 1
"""Marks the random numbers of this purpose; see `jobs.seeds`."""


def epoch_order(count: int, seed: int, epoch: int) -> np.ndarray:
    """The order of an epoch: a random permutation of `0..count-1` (int64), a pure function."""
    return np.random.default_rng([_ORDER_STREAM, seed, epoch]).permutation(count).astype(np.int64, copy=False)


class EpochStream(Iterator[list[T]], Generic[T]):
    """Infinite iterator over batches of one size: each epoch in another random order, each item once per epoch.

    A batch may hold the end of one epoch and the beginning of the next, so that nothing is dropped. All
    ranks that build it with the same arguments draw the same batches.

    Raises `DataError` for a batch size below 1 or a negative seed.
    """

    def __init__(self, dataset: TextDataset[T], batch_size: int, *, seed: int = 0, shuffle: bool = True) -> None:
        if batch_size < 1:
            raise DataError(f"A batch holds at least one item; batch_size is {batch_size}.")
        if seed < 0:
            raise DataError(f"A seed is not negative; got {seed}.")
        self.dataset: TextDataset[T] = dataset
        self.batch_size = batch_size
        self._seed = seed
        self._shuffle = shuffle
        self._epoch = 0
        self._position = 0
        self._order = self._order_of(0)

    def _order_of(self, epoch: int) -> np.ndarray:
        count = len(self.dataset)
        return epoch_order(count, self._seed, epoch) if self._shuffle else np.arange(count)

    @property
    def epoch(self) -> int:
        """The epoch that the next item belongs to, from 0."""
        return self._epoch

    def __next__(self) -> list[T]:
        return [self.dataset[int(index)] for index in self.next_indices()]

    def next_indices(self) -> np.ndarray:
        """Draw the next batch as indices into the dataset: int64 `[batch_size]`."""
        parts = []
        missing = self.batch_size
        while missing:
            part = self._order[self._position : self._position + missing]
            parts.append(part)
            missing -= part.size
            self._position += part.size
            if self._position == len(self.dataset):
                self._epoch, self._position = self._epoch + 1, 0
                self._order = self._order_of(self._epoch)
        return np.concatenate(parts)

    def state_dict(self) -> dict[str, Any]:
        """The position as plain data; a stream that loads it continues with the next batch."""
        return {
            "epoch": self._epoch,
            "position": self._position,
            "seed": self._seed,
            "shuffle": self._shuffle,
            "fingerprint": self.dataset.fingerprint,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to a saved position. The batch size may differ from the one it was saved with.

        Raises `DataError` when the state belongs to other texts, another seed or order, or is incomplete.
        """
        current = self.state_dict()
        if missing := sorted(current.keys() - state.keys()):
            raise DataError(f"The saved data position lacks {', '.join(missing)}: load a whole one.")
        for key, difference, cure in (
            ("fingerprint", "other texts", "resume with the same data"),
            ("seed", "another seed", f"set seed: {state['seed']}"),
            ("shuffle", "another order", f"set shuffle to {state['shuffle']}"),
        ):
            if state[key] != current[key]:
                raise DataError(
                    f"The saved data position belongs to {difference} ({key} {state[key]}, here {current[key]}): "
                    f"{cure}, or start a new run under another exp_name"
                )
        epoch, position = int(state["epoch"]), int(state["position"])
        if epoch < 0 or not 0 <= position < len(self.dataset):
            raise DataError(
                f"The saved data position is impossible: epoch {epoch}, position {position}. Resume from another "
                "checkpoint."
            )
        self._epoch, self._position = epoch, position
        self._order = self._order_of(epoch)


class PromptStream(EpochStream[Prompt]):
    """An `EpochStream` of prompts for rollouts."""


class MixedStream(Iterator[list[T]], Generic[T]):
    """Draws batches with a fixed number of items of each domain, which has its own `EpochStream`.

    Items of one domain are spread evenly over the batch, so that every part of it has about the same mixture.

    Args:
        domains: by name, the items of the domain.
        counts: by name, the number of its items in a batch, at least 1.
        seed: of the orders.
    """

    def __init__(self, domains: Mapping[str, TextDataset[T]], counts: Mapping[str, int], *, seed: int = 0) -> None:
        self._streams = {name: EpochStream(domains[name], count, seed=seed) for name, count in counts.items()}
        # Each domain's items are put at equal distances in [0, 1]; sorting all by place mixes the domains.
        places = [(np.arange(count) + 0.5) / count for count in counts.values()]
        self._spread = np.argsort(np.concatenate(places), kind="stable").tolist()

    def __next__(self) -> list[T]:
        drawn = [item for stream in self._streams.values() for item in next(stream)]
        return [drawn[index] for index in self._spread]

    def state_dict(self) -> dict[str, Any]:
        """The position of every domain."""
        return {"domains": {name: stream.state_dict() for name, stream in self._streams.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes to a saved position. The numbers of items in a batch may have changed since.

        Raises `DataError` when the position belongs to other domains, texts or seeds.
        """
        saved = state.get("domains", {})
        if saved.keys() != self._streams.keys():
            raise DataError(
                f"The saved data position has the domains {', '.join(saved) or '(none)'}, here there are "
                f"{', '.join(self._streams)}: resume with the same domain_interleave_probs, or start a new run"
            )
        for name, stream in self._streams.items():
            stream.load_state_dict(saved[name])
