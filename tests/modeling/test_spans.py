"""Spans of attention backends: every query attends to exactly the causal past of its own sequence."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis.strategies import integers

from roll_batching.modeling.attention.dense import BucketSpans, bucket_spans
from roll_batching.modeling.attention.varlen import VarlenSpans, varlen_spans
from roll_batching.packing import PackLayout
from roll_batching.planning import PlanConstraints, plan_step
from tests.packing.test_layout import CPU, plan_of, plans


@given(plans)
def test_spans_see_exactly_the_causal_past_of_their_own_sequence(case) -> None:
    plan = plan_of(*case)
    cp = case[1]
    for mb in plan.micro_batches[0]:
        layout = PackLayout.of(mb, cp)
        same = layout.segment_ids[:, None] == layout.segment_ids[None]
        wanted = same & (np.arange(layout.tokens)[:, None] >= np.arange(layout.tokens)[None])
        for rank in range(cp):
            assert np.array_equal(_seen(bucket_spans(layout, rank, CPU), layout), wanted[layout.local_tokens(rank)])
            varlen = varlen_spans(layout, rank, CPU)
            assert np.array_equal(_seen_by_kernel(varlen, layout), wanted[layout.local_tokens(rank)])


@given(plans, integers(1, 40))
def test_windowed_spans_see_the_last_keys_of_that_past(case, window) -> None:
    plan = plan_of(*case)
    cp = case[1]
    for mb in plan.micro_batches[0]:
        layout = PackLayout.of(mb, cp)
        for rank in range(cp):
            seen = _seen(bucket_spans(layout, rank, CPU, window), layout)
            assert np.array_equal(seen, _window(layout, window)[layout.local_tokens(rank)])


def test_windowed_spans_of_long_sequences_have_few_keys() -> None:
    """Blocks of the window's size, of 1,000 and 333 tokens on two ranks each."""
    plan = plan_step([1000, 333], PlanConstraints(dp_size=1, max_tokens=2048, cp_size=2))
    (mb,) = plan.micro_batches[0]
    layout = PackLayout.of(mb, 2)
    for rank in range(2):
        spans = bucket_spans(layout, rank, CPU, 70)
        assert np.array_equal(_seen(spans, layout), _window(layout, 70)[layout.local_tokens(rank)])
        assert max(bucket.keys.shape[1] for bucket in spans.buckets) < 2 * 70


def _window(layout: PackLayout, window: int) -> np.ndarray:
    same = layout.segment_ids[:, None] == layout.segment_ids[None]
    behind = np.arange(layout.tokens)[:, None] - np.arange(layout.tokens)[None]
    return same & (behind >= 0) & (behind < window)


def _seen(spans: BucketSpans, layout: PackLayout) -> np.ndarray:
    """[local rows, tokens] bool: which keys each query row attends to, read back from the buckets."""
    seen = []
    for bucket in spans.buckets:
        count, width = bucket.queries.shape
        depth = bucket.keys.shape[1]
        mask = (
            torch.ones(width, depth).tril().bool().expand(count, -1, -1) if bucket.mask is None else bucket.mask[:, 0]
        )
        grid = torch.zeros(count, width, layout.tokens, dtype=torch.bool)
        keys = _over_ranks(layout)[bucket.keys][:, None].expand(-1, width, -1)
        # Repeated keys must not make a key seen that the mask hides: OR over repetitions.
        grid = grid.int().scatter_add(2, keys, mask.int()) > 0
        seen.append(grid.reshape(count * width, layout.tokens))
    return torch.cat(seen)[spans.inverse].numpy()


def _over_ranks(layout: PackLayout) -> torch.Tensor:
    """[tokens] the pack's row of every gathered one: rank after rank."""
    return torch.from_numpy(np.concatenate([layout.local_tokens(rank) for rank in range(layout.cp_size)]))


def _seen_by_kernel(spans: VarlenSpans, layout: PackLayout) -> np.ndarray:
    """As `_seen`, by the rule of the variable-length kernels: the last query of a span sees its last key."""
    queries, keys = spans.cu_queries.tolist(), spans.cu_keys.tolist()
    assert spans.max_queries == max(np.diff(queries)) and spans.max_keys == max(np.diff(keys))
    rows = torch.arange(layout.tokens) if spans.key_rows is None else _over_ranks(layout)[spans.key_rows]
    assert keys[-1] == len(rows)
    seen = np.zeros((queries[-1], layout.tokens), dtype=bool)
    for span in range(len(queries) - 1):
        for query in range(queries[span], queries[span + 1]):
            last = keys[span + 1] - (queries[span + 1] - query) + 1
            seen[query, rows[keys[span] : last]] = True
    return seen
