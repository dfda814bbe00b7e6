"""Runs a host's Megatron model under our strategy: plans and packs its samples, and calls its loss function on packs.

The hosts keep their models, optimizers, schedules and checkpoints. Their passes over micro-batches are replaced by
`HostModel.run`: one plan for the batch of all ranks, packs instead of padded rows, receive shapes from the plan, and
one call of the host's function per micro-batch.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist

from roll_batching.distributed import consensus
from roll_batching.distributed.consensus import exchange
from roll_batching.errors import IntegrationError, LayoutError
from roll_batching.integrations.host_rows import HostRows, RecordedLoss
from roll_batching.losses.host import HostLoss
from roll_batching.megatron_patches import cpu_platform
from roll_batching.modeling.head import gpt_of
from roll_batching.packing.pack_layout import IntArray
from roll_batching.planning import BatchingSpec, Plan, RolePlanner
from roll_batching.samples import LengthTable, SampleBatch, collect, distribute, gather_lengths
from roll_batching.settings import BatchingConfig
from roll_batching.strategy import MegatronInferStrategy, MegatronTrainStrategy
from roll_batching.strategy.compatibility import transfers_may_overlap
from roll_batching.strategy.model_state import StepSettings
from roll_batching.strategy.pack_features import sharing_obstacle

logger = logging.getLogger(__name__)

_RANK_SHIFT = 40
"""Sample ids are data-parallel rank x 2 ** 40 + row, unique over all ranks."""


class HostModel:
    """A host's Megatron model, whose passes run on planned packs.

    Args:
        chunks: the host's model chunks of this stage, in DDP if it trains.
        host: the host's name, for messages.
        max_tokens: cap of a micro-batch in training, in tokens before context parallelism divides them.
        max_tokens_forward: cap in passes without gradient; None: the same.
        trains: whether gradients are computed; False for reference models.
        vocab_size: real vocabulary, where the head has padded columns.
        apply_loss_scale: False keeps Megatron's mean over micro-batches and ranks.
        max_cp_size: above 1, each pack has its own context-parallel size up to this one, over data-parallel ranks; then
            `max_tokens` is the cap of the largest pack, and a rank's is its `max_cp_size`-th part.

    Raises:
        LayoutError: on all ranks, with everything about the model that cannot work.
    """

    def __init__(
        self,
        chunks: Sequence[Any],
        host: str,
        *,
        max_tokens: int,
        max_tokens_forward: int | None = None,
        trains: bool = True,
        vocab_size: int | None = None,
        apply_loss_scale: bool = True,
        max_cp_size: int = 1,
    ) -> None:
        settings = StepSettings(apply_loss_scale=apply_loss_scale, max_cp_size=max_cp_size)
        if max_cp_size > 1 and not apply_loss_scale:
            raise LayoutError(
                f"max_cp_size={max_cp_size} gives ranks different numbers of micro-batches, and without "
                "apply_loss_scale the loss is a mean over them: set apply_loss_scale to true, or max_cp_size to 1"
            )
        device = next(gpt_of(chunks[0]).parameters()).device
        if device.type == "cpu":
            cpu_platform.install()
        _disable_conflicting_settings(chunks, device)
        batching = BatchingConfig(
            train=BatchingSpec(mode="packed", max_tokens=max_tokens // max_cp_size),
            infer=BatchingSpec(mode="packed", max_tokens=(max_tokens_forward or max_tokens) // max_cp_size),
            # Sharing lowers the number of micro-batches, by which Megatron's mean divides the loss.
            share_prefixes="auto" if apply_loss_scale else False,
        )
        self._host = host
        self._strategy: MegatronInferStrategy
        if trains:
            self._strategy = MegatronTrainStrategy.from_parts(
                chunks, None, batching, vocab_size=vocab_size, settings=settings
            )
        else:
            self._strategy = MegatronInferStrategy.from_model(
                chunks, batching, vocab_size=vocab_size, settings=settings
            )
        if dist.get_rank() == 0:
            obstacle = sharing_obstacle(self._strategy.state)
            logger.warning(
                "roll-batching: %s's passes over micro-batches are planned packs now, of at most %d tokens in training "
                "and %d without gradient%s; prefixes that samples share are computed %s",
                host,
                max_tokens,
                max_tokens_forward or max_tokens,
                f", on up to {max_cp_size} ranks each" if max_cp_size > 1 else "",
                "once"
                if obstacle is None and apply_loss_scale
                else f"by each, as {obstacle or 'apply_loss_scale is false'}",
            )

    def run(
        self,
        read: Callable[[], SampleBatch],
        rows: HostRows,
        function: Callable[[Any, torch.Tensor, torch.Tensor | None], tuple[torch.Tensor, Any]],
        *,
        backward: bool,
        mask: str | None = None,
        max_tokens: int | None = None,
        form: Literal["padded", "jagged"] = "padded",
        width: int | None = None,
        entropy: bool = False,
        by_sample: bool = False,
        temperatures: Any = 1.0,
    ) -> list[tuple[IntArray, Any]]:
        """Runs one pass over this rank's samples; with `backward` adds their gradients. Collective.

        Args:
            read: returns the samples with their `input_ids`, in the order of the host's rows; they stay on this rank.
                An error of it on one rank is raised on all.
            rows: the host's batch, row for row as in `read()`.
            function: called per micro-batch with the rows of its samples instead of ids; see `HostLoss`. With a
                context-parallel size per pack, also once with all rows of this rank, without gradient, for the results.
            backward: add gradients to the model's buffers.
            mask: the field with 1 at each token whose log-prob is needed, given the tokens before it; None: all tokens.
            max_tokens: cap of a micro-batch in this pass; None: the model's.
            form: as in `HostLoss`, like `width`, `entropy` and `by_sample`.
            temperatures: divide the logits; one, or one per sample: where they differ, samples share no prefixes.

        Returns:
            (row numbers, the function's result) of each call; empty before the last pipeline stage.

        Raises:
            RankError: on all ranks, before the model runs, for wrong samples on any.
            LossError: on all ranks, where loss or gradient are not finite, or the function raised.
        """
        if backward and not isinstance(self._strategy, MegatronTrainStrategy):
            raise IntegrationError(f"{self._host} asks for gradients of a model that it does not train")
        local, table = self._gather(read, temperatures, width)
        planner = self._planner(backward, max_tokens)
        rows = replace(rows, ids=local.ids.numpy())

        def make_loss(rows: HostRows, kind: type[HostLoss] = HostLoss) -> Any:
            return kind(
                lambda ids, *values: function(rows.select_ids(ids), *values),
                form=form,
                width=width,
                entropy=entropy,
                masks=(mask or "all_tokens",),
                by_sample=by_sample,
            )

        loss = make_loss(rows)
        if self._strategy.settings.max_cp_size > 1:
            plan = planner.plan(table)
            outputs = self._compute_blocks(local, plan, loss, rows, make_loss if backward else None)
            self._collect_results(loss, outputs, None if backward else planner.infer.max_tokens)
        else:
            self._compute_at_home(local, planner.plan(table, home_rank=table.location), loss, backward)
        return [(ids - self._first_id, result) for ids, result in loss.results]

    def _planner(self, backward: bool, max_tokens: int | None) -> RolePlanner:
        """The planner of a pass, whose largest micro-batch has up to `max_tokens`; None: as many as the model's."""
        strategy = self._strategy
        constraints = strategy.constraints(forward=not backward)
        if max_tokens is not None:
            constraints = replace(constraints, max_tokens=max_tokens // strategy.settings.max_cp_size)
        return replace(strategy.planner, train=constraints, infer=constraints)

    def _compute_at_home(self, local: SampleBatch, plan: Plan, loss: HostLoss, backward: bool) -> None:
        """Runs `plan`, in which every rank computes its own samples. Collective."""
        if backward:
            assert isinstance(self._strategy, MegatronTrainStrategy)
            self._strategy.forward_backward(local, plan, loss, require_finite=True)
        else:
            self._strategy.evaluate(local, plan, loss)

    def _collect_results(self, loss: HostLoss, outputs: SampleBatch | None, cap: int | None) -> None:
        """Calls `loss` for the results of this rank's samples, with at most `cap` tokens at once. Collective.

        Without a cap there is one call: so that every rank has metrics, and equally many.
        """
        with consensus(self._strategy.layout.host_group, f"{self._host}'s results"):
            if outputs is not None and len(outputs):
                most = len(outputs) if cap is None else max(1, cap // outputs.max_length)
                for rows in np.split(np.arange(len(outputs)), range(most, len(outputs), most)):
                    loss.call_with_outputs(outputs.select(rows), self._strategy.device)

    @property
    def _first_id(self) -> int:
        """Id of this rank's first sample."""
        return self._strategy.layout.dp_rank << _RANK_SHIFT

    def _gather(
        self, read: Callable[[], SampleBatch], temperatures: Any, width: int | None
    ) -> tuple[SampleBatch, LengthTable]:
        """This rank's samples with ids and temperatures, and the table of all ranks' samples. Collective."""
        strategy = self._strategy
        group, what = strategy.layout.host_group, f"{self._host}'s samples"
        with consensus(group, what) as facts:
            if strategy.settings.max_cp_size > 1:
                facts.equal("the width of rows", width, "Pad the rows of all ranks to one width")
            local = read().to("cpu")
            values = self._temperatures(temperatures, len(local))
            local = local.with_ids(torch.arange(len(local)) + self._first_id).with_fields(
                {"temperature": values, "all_tokens": torch.ones(local.num_tokens, dtype=torch.bool)},
                {"temperature": "sample", "all_tokens": "token"},
            )
        everywhere = set().union(*exchange(group, what, lambda: set(values.tolist())))
        # Samples that share positions have one temperature.
        is_one = len(everywhere) < 2
        strategy.temperature = everywhere.pop() if len(everywhere) == 1 else 1.0
        strategy.temperature_field = None if is_one else "temperature"
        return local, strategy.gather_table(local) if is_one else gather_lengths(local, strategy.layout.dp_group)

    def _compute_blocks(
        self, local: SampleBatch, plan: Plan, loss: HostLoss, rows: HostRows, make_loss: Callable[..., Any] | None
    ) -> SampleBatch | None:
        """Log-probs and entropies of `local`, from packs that blocks of ranks compute; with `make_loss` trains.

        None before the last pipeline stage.
        """
        strategy, layout = self._strategy, self._strategy.layout
        placed = distribute(local, plan, layout.dp_group)
        if make_loss is None:
            computed = strategy.forward(placed, plan, loss.needs, loss.masks)
        else:
            assert isinstance(strategy, MegatronTrainStrategy)
            recorded = make_loss(rows.gather_for_plan(plan, layout), RecordedLoss)
            strategy.forward_backward(placed, plan, recorded, require_finite=True)
            computed = recorded.outputs(strategy.dtype)
        return collect(computed, plan, layout.dp_group, like=local) if layout.is_last_stage else None

    def _temperatures(self, temperatures: Any, samples: int) -> torch.Tensor:
        """[samples] fp32, from one number or one for each sample."""
        values = torch.as_tensor(temperatures, dtype=torch.float32).cpu().flatten()
        if len(values) not in (1, samples):
            raise IntegrationError(
                f"{self._host}'s batch has {len(values)} temperatures for {samples} samples: give 1 or {samples}"
            )
        if not bool(((values > 0) & values.isfinite()).all()):
            raise IntegrationError(f"{self._host}'s temperatures {values.tolist()[:8]} must be finite and above 0")
        return values.expand(samples)


def in_order(results: Sequence[tuple[IntArray, Any]], rows: int) -> list[Any]:
    """Joins the per-sample results of all calls in one `HostModel.run`, in the order of the rows."""
    ordered: list[Any] = [None] * rows
    for numbers, values in results:
        for row, value in zip(numbers.tolist(), values, strict=True):
            ordered[row] = value
    return ordered


def settings_of_planned_passes(config: Any, device: torch.device) -> dict[str, Any]:
    """Settings of a TransformerConfig without which planned passes cannot run."""
    return {
        "batch_p2p_comm": False,  # fails with shapes that differ by micro-batch; see strategy.compatibility
        # Megatron checks it also in dense models.
        "moe_token_dispatcher_type": "alltoall" if config.num_moe_experts is None else config.moe_token_dispatcher_type,
        "overlap_p2p_comm": config.overlap_p2p_comm and transfers_may_overlap(device),
    }


def _disable_conflicting_settings(chunks: Sequence[Any], device: torch.device) -> None:
    """Switches off settings of Megatron under which planned passes cannot run."""
    config = gpt_of(chunks[0]).config
    for name, value in settings_of_planned_passes(config, device).items():
        setattr(config, name, value)
    for chunk in chunks:
        if getattr(chunk, "ddp_config", None) is not None:
            # DDP would raise only on the rank with a NaN or large gradient; HostModel.run raises on all ranks.
            chunk.ddp_config.check_for_nan_in_grad = False
            chunk.ddp_config.check_for_large_grads = False
