"""Tensors or plans of rollout micro-batches that a batcher has divided into one row per data-parallel rank.

`DataCollatorForRollout` makes TRL's padded rectangle, for loops that scatter row i to rank i. `rollout_step` makes the
samples and the plan of an optimizer step, for `train_step`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from roll_batching.errors import DataError
from roll_batching.planning import Plan, PlanConstraints
from roll_batching.samples.batch import SampleBatch

Rows = Sequence[Sequence[Any]]
"""A micro-batch: for each data-parallel rank its samples, `RolloutSample`s or mappings with the same fields."""

_PER_TOKEN = ("input_ids", "completion_mask", "old_log_probs")


@dataclass(frozen=True)
class DataCollatorForRollout:
    """Packs the rows of micro-batches: samples end to end, positions from 0 in each, advantages per token.

    `__call__` takes a list of one micro-batch, from a DataLoader with `batch_size=1`; `step` takes all micro-batches of
    an optimizer step and gives them the step's denominator. Rows are padded to the longest of their micro-batch, so
    that a dispatcher can send row i to rank i. A row without samples (at the end of the data) is all padding.

    Tensors by name: `[num_processes, T]` input_ids, attention_mask, completion_mask, position_ids (int64),
    old_log_probs, advantages (fp32); `[num_processes]` fp32 global_n_tokens, the tokens to divide the loss by, equal on
    all ranks; metrics, by name `[num_processes, most samples of a row]` fp32, NaN where a row has fewer.

    Raises:
        DataError: for another number of rows or micro-batches, no token to learn from, or a field that is missing or
            not as long as its sample; names the sample's group.
    """

    pad_token_id: int
    num_processes: int = 1

    def __call__(self, examples: Sequence[Rows]) -> dict[str, Any]:
        """The tensors of the one micro-batch in `examples`; its number of tokens is the denominator."""
        if len(examples) != 1:
            raise DataError(
                f"{len(examples)} micro-batches in one call: use batch_size=1, or collate_fn=collator.step with "
                "batch_size=gradient_accumulation_steps"
            )
        return self.step(examples)[0]

    def step(self, micro_batches: Sequence[Rows]) -> list[dict[str, Any]]:
        """The tensors of every micro-batch of an optimizer step, with the number of tokens of all as denominator.

        The loss of a step, summed over micro-batches and ranks, is then a mean over its tokens under any division.
        """
        tokens = sum(sum(_field(one, "completion_mask")) for rows in micro_batches for row in rows for one in row)
        if not tokens:
            raise DataError(
                "These micro-batches have no token to learn from: completion_mask is 0 in all their samples"
            )
        return [self._pack(rows, tokens) for rows in micro_batches]

    def _pack(self, rows: Rows, tokens: int) -> dict[str, Any]:
        _check_rows(rows, self.num_processes)
        for one in (one for row in rows for one in row):
            _check(one)

        def padded(values_of: Callable[[Any], Sequence[Any]], dtype: torch.dtype, fill: float = 0) -> Tensor:
            flat = [torch.tensor([value for one in row for value in values_of(one)], dtype=dtype) for row in rows]
            return pad_sequence(flat, batch_first=True, padding_value=fill)

        def length(one: Any) -> int:
            return len(_field(one, "input_ids"))

        names = sorted({name for row in rows for one in row for name in _field(one, "metrics", {})})
        return {
            "input_ids": padded(lambda one: _field(one, "input_ids"), torch.int64, self.pad_token_id),
            "attention_mask": padded(lambda one: [1] * length(one), torch.int64),
            "completion_mask": padded(lambda one: _field(one, "completion_mask"), torch.int64),
            "old_log_probs": padded(lambda one: _field(one, "old_log_probs"), torch.float32),
            "position_ids": padded(lambda one: range(length(one)), torch.int64),
            "advantages": padded(lambda one: [_field(one, "advantage")] * length(one), torch.float32),
            "global_n_tokens": torch.full((self.num_processes,), float(tokens)),
            "metrics": {
                name: padded(
                    lambda one, name=name: [_field(one, "metrics", {}).get(name, float("nan"))],  # type: ignore[misc]
                    torch.float32,
                    float("nan"),
                )
                for name in names
            },
        }


def rollout_step(
    micro_batches: Sequence[Rows], constraints: PlanConstraints, *, cost: Any = None
) -> tuple[SampleBatch, Plan]:
    """The samples of an optimizer step, and the plan in which rank i computes row i of every micro-batch.

    Ids count the samples from 0. A rank passes `plan.shard(batch, rank)` to `train_step`, whose loss is divided by the
    counts of the whole step. Fields: input_ids, response_mask and old_log_probs (one value per token),
    advantages (per sample). Every rank has the same number of micro-batches; an empty row becomes a filler.

    Raises:
        DataError: for samples whose fields do not fit.
        PlanError: for a row above the cap of `constraints`, or a number of micro-batches that they do not allow.
    """
    for rows in micro_batches:
        _check_rows(rows, constraints.dp_size)
    samples = [one for rows in micro_batches for row in rows for one in row]
    for one in samples:
        _check(one)
    columns = {name: [_field(one, name) for one in samples] for name in _PER_TOKEN}
    batch = SampleBatch.from_lists(
        {
            "input_ids": columns["input_ids"],
            "response_mask": columns["completion_mask"],
            "old_log_probs": [[float(value) for value in values] for values in columns["old_log_probs"]],
            "advantages": [float(_field(one, "advantage")) for one in samples],
        },
        {"input_ids": "token", "response_mask": "token", "old_log_probs": "token", "advantages": "sample"},
    )
    numbers = iter(range(len(samples)))
    by_step = [[[next(numbers) for _ in row] for row in rows] for rows in micro_batches]
    bins = [[rows[rank] for rows in by_step] for rank in range(constraints.dp_size)]
    return batch, Plan.from_bins(bins, batch.lengths.numpy(), constraints, cost=cost)


def _field(sample: Any, name: str, default: Any = None) -> Any:
    value = sample.get(name, default) if isinstance(sample, Mapping) else getattr(sample, name, default)
    if value is None:
        raise DataError(f"A sample of group {_group(sample)} has no {name}")
    return value


def _group(sample: Any) -> Any:
    return sample.get("group_id") if isinstance(sample, Mapping) else getattr(sample, "group_id", None)


def _check_rows(rows: Rows, ranks: int) -> None:
    if len(rows) != ranks:
        raise DataError(f"A micro-batch has {len(rows)} rows for {ranks} data-parallel ranks: one row per rank")


def _check(sample: Any) -> None:
    length = len(_field(sample, "input_ids"))
    for name in _PER_TOKEN:
        if len(_field(sample, name)) != length:
            raise DataError(
                f"A sample of group {_group(sample)} has {length} input_ids and {len(_field(sample, name))} {name}: "
                "one per token"
            )
