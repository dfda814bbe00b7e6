"""Decoding without a cache, for models that have none; and how many prompts a cache of keys has room for."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from roll_batching.distributed.parallel_layout import ParallelLayout
from roll_batching.errors import DataError
from roll_batching.modeling.head import gpt_of, logits_at
from roll_batching.packing.batch import PackedBatch, pack_step
from roll_batching.planning import BatchingSpec, ParallelDims, PlanConstraints, plan_step
from roll_batching.samples import SampleBatch
from roll_batching.strategy.model_state import ModelState
from roll_batching.strategy.sampling import GenerationSettings
from roll_batching.strategy.schedule import run_schedule
from roll_batching.strategy.step_inputs import pack_options

LENGTH_MULTIPLE = 16
"""The number of attended keys is a multiple of this, so that shapes repeat."""


def gather_vocabulary(logits: torch.Tensor, gpt: Any) -> torch.Tensor:
    """[n, vocabulary] from this tensor-parallel rank's [n, vocabulary / tp]. Collective."""
    group = gpt.pg_collection.tp
    if group.size() == 1:
        return logits
    parts = [torch.empty_like(logits) for _ in range(group.size())]
    dist.all_gather(parts, logits.contiguous(), group=group)
    return torch.cat(parts, -1)


class RecomputingDecoder:
    """Next-token logits without a cache: whole sequences are recomputed for every token.

    Under a pipeline the last stage's logits are broadcast, so that all stages sample the same tokens.
    """

    def __init__(self, model: ModelState, rows: list[torch.Tensor], images: Any = None) -> None:
        """`images`: `strategy.images.SequenceImages` of the rows, for a model with a vision encoder."""
        self.layout, self._model, self._rows, self._images = model.layout, model, rows, images

    def prefill(self) -> torch.Tensor:
        """Logits after each sequence, [n, vocabulary]."""
        model, layout = self._model, self.layout
        lengths = [len(row) for row in self._rows]
        # Each replica generates by itself: a plan of one data-parallel rank.
        widths = [-(-n // LENGTH_MULTIPLE) * LENGTH_MULTIPLE for n in lengths]
        # Ranks that share experts must run the same number of passes: one each.
        cap = sum(widths) if layout.ep_size > 1 else max(model.batching.infer.max_tokens or 0, *widths)
        dims = replace(layout.dims, dp_size=1, ep_size=1, etp_size=layout.tp_size)
        plan = plan_step(lengths, PlanConstraints.of(dims, BatchingSpec(max_tokens=cap, algorithm="none")))
        batch = SampleBatch.from_lists({"input_ids": self._rows}, {"input_ids": "token"})
        images = None if self._images is None else self._images.of_sequences(batch)
        packs = pack_step(batch, plan, dp_rank=0, images=images, **pack_options(model))

        def bind(pack: PackedBatch, chunk: Any) -> Any:
            last = torch.from_numpy(pack.layout.cu_seqlens[:-1][: pack.samples] + pack.layout.lengths - 1)

            def collect(output: torch.Tensor, non_loss_data: bool = True) -> torch.Tensor:
                gpt = gpt_of(chunk)
                return gather_vocabulary(logits_at(output, last.to(output.device), gpt), gpt)

            return collect

        results = run_schedule(
            plan, packs, model.chunks, bind, layout, forward_only=True, collect=True,
            pg_collection=model.pg_collection,
        )  # fmt: skip
        vocabulary = gpt_of(model.chunks[0]).vocab_size
        logits = torch.zeros(len(lengths), vocabulary, dtype=model.result_dtype, device=layout.device)
        if layout.is_last_stage:
            order = torch.tensor(plan.rank_samples(0), device=layout.device)  # plans are not writable
            logits[order] = torch.cat([result for result in results if len(result)]).to(logits.dtype)
        dist.broadcast(logits, dist.get_global_rank(layout.pp_group, layout.pp_size - 1), group=layout.pp_group)
        return logits

    def select(self, rows: torch.Tensor) -> None:
        """Removes all sequences but `rows` from the batch."""
        self._rows = [self._rows[i] for i in rows.tolist()]
        if self._images is not None:
            self._images.select(rows)

    def step(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits after one more token per sequence, [n, vocabulary], from `tokens` [n]."""
        self._rows = [torch.cat([row, token]) for row, token in zip(self._rows, tokens.split(1), strict=True)]
        return self.prefill()


# ---- room in the cache


def cache_positions(prompt_length: int, settings: GenerationSettings, layout: ParallelDims) -> int:
    """Cache positions of a sequence with a prompt of `prompt_length` tokens."""
    return prompt_length + settings.max_new_tokens + positions_per_step(layout) - 1


def positions_per_step(layout: ParallelDims) -> int:
    """Positions per sequence in a decoding step: 1, or TP under sequence parallelism, which splits positions.

    Only the first of them counts; the others repeat its token.
    """
    return layout.tp_size if layout.sequence_parallel else 1


def split_by_cache_limit(positions: list[int], limit: int | None, layout: ParallelLayout) -> list[list[int]]:
    """Groups of sequence indices, longest sequences first, each within `limit` cache positions.

    Ranks that share experts get the same number of groups, some of them empty: they must run the same steps.

    Raises `DataError` where a single sequence exceeds `limit`.
    """
    # A group takes its number of sequences x its longest: groups of similar lengths waste little.
    order = sorted(range(len(positions)), key=lambda index: -positions[index])
    if limit is not None and order and positions[order[0]] > limit:
        raise DataError(
            f"max_tokens_in_cache={limit} has no room for a row of {positions[order[0]]} positions: raise it"
        )
    groups = []
    while order:
        count = len(order) if limit is None else limit // positions[order[0]]
        groups.append(sorted(order[:count]))
        order = order[count:]
    if layout.ep_size > 1:
        groups += [[] for _ in range(max_over_ranks(len(groups), layout) - len(groups))]
    return groups


def max_over_ranks(number: int, layout: ParallelLayout) -> int:
    """The largest `number` of all ranks. Collective."""
    largest = torch.tensor([number])
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=layout.host_group)
    return int(largest)
