"""Model state in and out of a strategy: checkpoints, Hugging Face directories, weights of another strategy."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from roll_batching.distributed import Facts
from roll_batching.errors import CheckpointError, LayoutError
from roll_batching.settings import RoleSettings
from roll_batching.strategy.offload import KINDS, OffloadMixin
from roll_batching.strategy.weights import (
    Transfer,
    check_same_parameters,
    copy_parameters,
    gather_parameters,
    has_same_stages,
)

if TYPE_CHECKING:
    from roll_batching.strategy.full_tensors import TensorStream
    from roll_batching.strategy.resharding import Resharding


class ModelIOMixin(OffloadMixin):
    """Methods of a strategy that read or write its model. Their implementations are imported on first use."""

    config: RoleSettings | None
    has_own_weights = True
    """False: the model is another strategy's."""
    _resharding: Resharding | None = None
    """The transfer plan of the last `copy_weights_from`, reused while both models stay the same."""

    # ---- checkpoints

    def save(self, path: str | Path, *, optimizer: bool = True, manifest: bool = True) -> None:
        """Writes a checkpoint to the folder `path`. Collective.

        It has the weights and, with an optimizer, its state, the schedule's position and the number of skipped steps.
        The folder appears once it is complete; an earlier checkpoint of that name is replaced.

        Args:
            path: on a file system that all ranks share.
            optimizer: False: weights alone.
            manifest: False: no digests of the files.

        Raises:
            RankError: on all ranks: `path` holds something else, the optimizer has state that is not saved (named),
                psutil is missing, or a rank could not write.
        """
        from roll_batching.strategy.checkpoint import save_state

        self._offload.require(KINDS if optimizer else KINDS[:1], "save")
        save_state(self.state if optimizer else replace(self.state, training=None), path, manifest=manifest)

    def load(self, path: str | Path, *, optimizer: bool = True, verify: bool = True) -> None:
        """Loads a checkpoint of `save`, of this or another parallel layout. Collective.

        Learning rate, weight decay and the like stay as configured: the schedule goes on from the saved position.

        Args:
            path: the checkpoint's folder.
            optimizer: False: weights alone, as in a strategy without an optimizer.
            verify: compare the files with their digests.

        Raises:
            RankError: on all ranks, before anything is changed: there is no such checkpoint, its files were changed,
                it is of another model (both named), or has no optimizer state.
        """
        from roll_batching.strategy.checkpoint import load_state

        self._offload.require(KINDS if optimizer else KINDS[:1], "load")
        self.state = load_state(self.state, path, optimizer=optimizer, verify=verify)

    # ---- Hugging Face directories

    def export(
        self, path: str | Path, *, replaces: Callable[[Path], bool] = lambda path: False, with_head: bool = False
    ) -> None:
        """Writes the model as a Hugging Face directory, like the one of `model_args.model_name_or_path`. Collective.

        LoRA adapters are added to the weights. `with_head`: tied embeddings are also written as the output head.

        As with `save`, `path` appears once it is complete; an existing folder is replaced where `replaces(path)` is
        true.

        Raises:
            RankError: on all ranks: `path` exists, the model came from no such directory, or a rank could not write.
        """
        from roll_batching.strategy.export import export_model

        export_model(self.state, self._source_directory("export"), path, replaces=replaces, with_head=with_head)

    def export_adapters(self, path: str | Path, *, replaces: Callable[[Path], bool] = lambda path: False) -> None:
        """Writes the LoRA adapters as a directory in PEFT's format. Collective.

        As with `save`, `path` appears once it is complete; an existing folder is replaced where `replaces(path)` is
        true.

        Raises `RankError` on all ranks: `path` exists, the model has no adapters or came from no model directory, or a
        rank could not write.
        """
        from roll_batching.strategy.partial_training import export_adapters

        export_adapters(self.state, self._source_directory("export_adapters"), path, replaces=replaces)

    def tensor_stream(self) -> TensorStream:
        """Full tensors under Hugging Face names, in buckets, on rank 0. Collective.

        Raises `RankError` on all ranks, where the model came from no model directory.
        """
        from roll_batching.strategy.full_tensors import TensorStream

        return TensorStream(self.state, self._source_directory("tensor_stream"))

    def _source_directory(self, what: str) -> str:
        with self._consensus(what):
            source = self._require_config().model_args.model_name_or_path
            if self.state.value_head:
                raise CheckpointError("a model with a value head cannot be written as a model directory: use save")
            if source is None:
                raise CheckpointError(
                    "this model started from model_args.architecture: only one that came from a model directory "
                    "(model_name_or_path) can be written as one; use save"
                )
        return source

    # ---- weights of another strategy

    def gather_parameters(self) -> None:
        """All-gathers the parameters on every rank, before you read those of `chunks` yourself. Collective."""
        self._offload.require(["parameters"], "gather_parameters")
        gather_parameters(self.state.chunks)

    def copy_weights_from(self, other: ModelIOMixin) -> Transfer:
        """Copies the parameters of a strategy with the same model in any parallel layout. Collective.

        Between two layouts they travel in buckets (`strategy.resharding`); returns bytes and seconds.

        Raises `RankError` on all ranks (one rank: `LayoutError`), when the models differ.
        """
        self._offload.require(["parameters"], "copy_weights_from")
        with self.state.layout.team.agree("copy_weights_from") as facts:
            source, target = other.state, self.state
            other._offload.require(["parameters"], "the strategy that copy_weights_from reads")
            facts.equal("the layout that weights come from", source.layout.dims)
            # Then a rank has the same shards of both, and copies them without communication.
            same_layout = source.layout.dims == target.layout.dims and has_same_stages(source, target)
            if same_layout:
                check_same_parameters(source, target)
        if same_layout:
            copy_parameters(source.chunks, target.chunks)
            return Transfer()
        from roll_batching.strategy.resharding import Resharding

        gather_parameters(source.chunks)
        gather_parameters(target.chunks)
        resharding = self._resharding
        # Its pieces are views of both models' parameters: a rebuilt model needs a new one.
        if (
            resharding is None
            or resharding.source.chunks is not source.chunks
            or resharding.target.chunks is not target.chunks
        ):
            resharding = self._resharding = Resharding(source, target, target.layout.host_group)
        return resharding.copy()

    # ---- shared by all methods

    def _require_config(self) -> RoleSettings:
        if self.config is None:
            raise LayoutError("this strategy has no RoleSettings to build a model of; from_parts takes one that exists")
        return self.config

    def _consensus(self, what: str) -> contextlib.AbstractContextManager[Facts]:
        """`Team.agree` for an operation that computes with the weights: they must be on the device."""
        self._offload.require(["parameters"], what)
        return self.state.layout.team.agree(what)
