"""A strategy's state in checkpoints: written, and taken over in this or another layout."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from roll_batching.strategy.offload import KINDS, MovableStates


class SavesState(MovableStates):
    """A strategy that writes checkpoints and reads them. What that takes is imported with the first of them."""

    def save(self, path: str | Path, *, optimizer: bool = True, manifest: bool = True) -> None:
        """Writes weights, and with an optimizer its state, schedule position and skipped steps, to the folder `path`.

        Collective; `path` is on a file system that all ranks see. It appears when it is whole and not before; a
        checkpoint that was there is replaced. `optimizer=False`: weights alone; `manifest=False`: no digests of files.

        Raises:
            RankError: on all ranks: `path` holds something else, the optimizer keeps its state in a way that is
                not saved (named), psutil is missing, or a rank could not write.
        """
        from roll_batching.strategy.checkpoint import save_state

        self._host.require(KINDS if optimizer else KINDS[:1], "save")
        save_state(self.state if optimizer else replace(self.state, training=None), path, manifest=manifest)

    def load(self, path: str | Path, *, optimizer: bool = True, verify: bool = True) -> None:
        """Takes over what `save` wrote, in this or another parallel layout. Collective.

        Learning rate, decay and the like stay as configured: the schedule goes on from the saved position. With
        `optimizer=False`, and without an optimizer, only weights are read. `verify` compares files with their digests.

        Raises:
            RankError: on all ranks, before anything is changed: there is no such checkpoint, its files are not as
                they were written, it is of another model (both named), or holds no optimizer.
        """
        from roll_batching.strategy.checkpoint import load_state

        self._host.require(KINDS if optimizer else KINDS[:1], "load")
        self.state = load_state(self.state, path, optimizer=optimizer, verify=verify)
