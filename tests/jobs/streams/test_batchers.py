"""Micro-batches of samples that arrive one by one: TRL's two batchers, and what its reviewers found wrong with them."""

from __future__ import annotations

from collections import Counter
from itertools import islice

import numpy as np
import pytest
from torch.utils.data import DataLoader

from roll_batching.errors import DataError
from roll_batching.jobs.streams import (
    FixedCountBatcher,
    StridedBatcher,
    TokenBudgetBatcher,
    balance_by_squared_length,
    rollout_batcher,
    serpentine,
)
from roll_batching.jobs.streams.rows import imbalance
from roll_batching.planning.pipeline.ordering import pipeline_makespan
from tests.jobs.streams.test_pool_batcher import lengths_of

pytestmark = pytest.mark.streams


def loads(rows):
    return [sum(n * n for n in row) for row in rows]


def trl_lengths(count, seed=0):
    """Prompt and completion lengths of TRL's benchmark (docs/streams.md)."""
    r = np.random.default_rng(seed)
    completions = np.clip(r.lognormal(np.log(700), 0.9, count), 16, 4096)
    completions[r.random(count) < 0.1] = 4096
    prompts = np.clip(r.lognormal(np.log(256), 0.43, count), 16, 1024)
    return (completions.astype(int) + prompts.astype(int)).tolist()


def budget_batcher(samples, ranks, budget, **options):
    return TokenBudgetBatcher(samples, ranks, budget, length_of=int, **options)


# ---- fixed count


def test_longest_first_to_the_lightest_row():
    # 9 | 8 | then 3 (64 < 81) | 3 (73 < 81) | 2 (81 = 82?: 81 < 82) | 1
    assert balance_by_squared_length([3, 1, 9, 2, 8, 3], 2, int) == [[9, 2], [8, 3, 3, 1]]
    assert balance_by_squared_length([5, 5, 5], 2, int) == [[5, 5], [5]]


def test_the_strided_baseline_deals_round_the_ranks():
    assert list(StridedBatcher([1, 2, 3, 4, 5], 2, 4, length_of=int)) == [[[1, 3], [2, 4]], [[5], []]]


def test_fixed_counts_and_a_tail():
    lengths = lengths_of(26)
    steps = list(FixedCountBatcher(iter(lengths), num_processes=4, microbatch_size=8, length_of=int))
    assert [sum(map(len, rows)) for rows in steps] == [8, 8, 8, 2]
    assert all(len(rows) == 4 and all(rows) for rows in steps[:-1])
    assert sorted(n for rows in steps for row in rows for n in row) == sorted(lengths)


def test_rows_are_never_less_even_than_dealing_longest_first():
    lengths = trl_lengths(64 * 20)
    found = [imbalance(rows) for rows in FixedCountBatcher(lengths, 8, 64, length_of=int)]
    dealt = [imbalance(balance_by_squared_length(lengths[i : i + 64], 8, int)) for i in range(0, len(lengths), 64)]
    assert all(mine <= theirs for mine, theirs in zip(found, dealt, strict=True))
    assert np.median(found) < np.median(dealt) / 4


# ---- token budget


@pytest.mark.parametrize("window", [1, 3])
@pytest.mark.parametrize("oversize", ["error", "alone"])
@pytest.mark.parametrize("seed", range(4))
def test_no_row_is_empty_or_above_the_budget(seed, oversize, window):
    """What the review found first: rows of no sample, and of more than the budget beside others."""
    lengths = lengths_of(200, seed, longest=300 if oversize == "error" else 900)
    steps = list(budget_batcher(lengths, 3, 300, oversize=oversize, window=window))
    assert Counter(n for rows in steps for row in rows for n in row) == Counter(lengths)
    assert all(all(rows) for rows in steps[:-1]) and any(steps[-1])
    assert all(sum(row) <= 300 or len(row) == 1 for rows in steps for row in rows)


def test_every_rank_gets_a_sample_where_rows_are_full_with_one():
    """A micro-batch is closed at 98% of its room, which 63 of 64 such samples are."""
    assert list(budget_batcher([10] * 128, 64, 10)) == [[[10]] * 64] * 2


def test_an_oversized_sample_after_full_rows():
    """The review: a full row and an oversized successor gave a micro-batch with empty ranks, or with none at all."""
    assert list(budget_batcher([10, 25], 2, 10, oversize="alone")) == [[[25], [10]]]
    first, second = budget_batcher([25, 25, 4], 2, 10, oversize="alone")
    assert first == [[25], [25]] and sorted(second) == [[], [4]]
    with pytest.raises(DataError, match="Sample 0 has 25 tokens, more than token_budget=10"):
        list(budget_batcher([25], 2, 10))


@pytest.mark.parametrize("make", [StridedBatcher, FixedCountBatcher, TokenBudgetBatcher])
def test_what_is_left_at_the_end_is_handed_out(make):
    """The review: buffered samples were never flushed."""
    steps = list(make([5, 5, 5, 1], 2, 6, length_of=int))
    assert Counter(n for rows in steps for row in rows for n in row) == Counter([5, 5, 5, 1])


def test_the_budget_on_paper():
    # 6 3 4 4 are 17 of 20 tokens; 9 more would not fit. 36 + 9 | 16 + 16 is as even as they divide.
    assert list(budget_batcher([6, 3, 4, 4, 9, 2], 2, 10)) == [[[6, 3], [4, 4]], [[9], [2]]]


@pytest.mark.parametrize("window, imbalanced, fill", [(1, 0.03, 0.94), (4, 0.02, 0.97)])
def test_rows_are_even_and_full(window, imbalanced, fill):
    batcher = budget_batcher(trl_lengths(8000), 8, 16384, window=window)
    steps = list(islice(batcher, 40))
    assert np.mean([imbalance(rows) for rows in steps]) <= imbalanced
    assert np.mean([sum(map(sum, rows)) for rows in steps]) >= fill * 8 * 16384
    row = batcher.metrics.to_dict()
    assert row["tokens_per_row"] == pytest.approx(np.mean([sum(r) for rows in steps for r in rows]))
    assert row["row_imbalance"] == pytest.approx(np.mean([imbalance(rows) for rows in steps]))
    assert row["held_micro_batches"] <= (0.1 if window == 1 else 2.0), "what the window costs in freshness"


def test_a_window_holds_nothing_back_for_longer_than_it_says():
    lengths = trl_lengths(1500)
    batcher = TokenBudgetBatcher(enumerate(lengths), 4, 16384, length_of=second, window=4)
    handed_out = [[number for row in rows for number, _ in row] for rows in batcher]
    assert sorted(number for numbers in handed_out for number in numbers) == list(range(1500))
    windows = [sum(handed_out[k : k + 4], []) for k in range(0, len(handed_out), 4)]
    assert len(windows) > 3 and all(max(a) < min(b) for a, b in zip(windows, windows[1:], strict=False))


def second(pair):
    return pair[1]


def test_what_grows_stale_while_it_waits_is_left_out_and_counted():
    lengths = trl_lengths(3000)
    handed_out = 0

    def is_fresh(sample):
        # Versions advance with every micro-batch; so many samples as make two of them share a version.
        return handed_out - sample[0] // 160 <= 2

    batcher = TokenBudgetBatcher(enumerate(lengths), 8, 16384, length_of=second, window=4, is_fresh=is_fresh)
    seen = []
    for rows in batcher:
        assert all(is_fresh(sample) for row in rows for sample in row) and all(rows[:1])
        seen += [number for row in rows for number, _ in row]
        handed_out += 1
    assert len(set(seen)) == len(seen) and 0 < batcher.metrics.stale_samples == 3000 - len(seen)


def test_a_budget_of_zero_means_a_fixed_count():
    for budget in (0, -1):
        batcher = rollout_batcher([1, 2], 1, token_budget=budget, microbatch_size=2, length_of=int)
        assert type(batcher) is FixedCountBatcher and batcher.microbatch_size == 2
    assert type(rollout_batcher([1, 2], 1, microbatch_size=2)) is FixedCountBatcher, "TRL's default"
    for kind, size in ((FixedCountBatcher, "microbatch_size"), (TokenBudgetBatcher, "token_budget")):
        assert next(iter(kind(dataset=["ab", "c"], num_processes=2, **{size: 2}))) == [["ab"], ["c"]]
    batcher = rollout_batcher([1, 2], 1, token_budget=9, microbatch_size=2, length_of=int, window=2)
    assert type(batcher) is TokenBudgetBatcher and (batcher.token_budget, batcher.window) == (9, 2)


# ---- what both do


def test_samples_of_a_batcher_are_any_sized_things():
    rows = next(iter(TokenBudgetBatcher(["abc", "de", "f"], num_processes=2, token_budget=4)))
    assert rows == [["abc"], ["de", "f"]]
    samples = [{"input_ids": [1] * n} for n in (3, 2, 1)]
    assert next(iter(TokenBudgetBatcher(samples, 2, 4))) == [samples[:1], samples[1:]]


def test_a_batcher_reads_no_further_than_it_must():
    def source():
        yield from [5, 5, 5]
        raise RuntimeError("the queue is gone")

    batcher = iter(budget_batcher(source(), 2, 5))
    assert next(batcher) == [[5], [5]]
    with pytest.raises(RuntimeError, match="the queue is gone"):
        next(batcher)


def test_serpentine_fills_and_drains_a_pipeline_with_small_micro_batches():
    micro_batches = [[[n]] for n in (5, 9, 1, 7, 3, 8, 2, 6)]
    order = serpentine(micro_batches, int)
    assert sorted(order) == sorted(micro_batches)
    assert [rows[0][0] for rows in order] == [2, 5, 7, 9, 8, 6, 3, 1]
    makespans = [pipeline_makespan([rows[0][0] ** 2 for rows in one], stages=4) for one in (order, micro_batches)]
    assert makespans[0] < 0.95 * makespans[1]


@pytest.mark.bad_input
def test_what_a_batcher_cannot_do_is_said():
    with pytest.raises(DataError, match="Sample 1 has 11 tokens, more than token_budget=10"):
        list(budget_batcher([3, 11], 2, 10))
    with pytest.raises(DataError, match="Sample 1 has no tokens"):
        list(FixedCountBatcher(["a", ""], num_processes=1, microbatch_size=2))
    with pytest.raises(DataError, match="num_processes=3, microbatch_size=2"):
        FixedCountBatcher([], num_processes=3, microbatch_size=2)
    with pytest.raises(DataError, match="at least 1: num_processes=1, token_budget=0, window=1"):
        TokenBudgetBatcher([], num_processes=1, token_budget=0)
    with pytest.raises(DataError, match="oversize is one of error, alone; got 'drop'"):
        TokenBudgetBatcher([], num_processes=1, token_budget=1, oversize="drop")
    with pytest.raises(DataError, match="num_workers=0"):
        list(DataLoader(budget_batcher([1, 2], 1, 4), batch_size=None, num_workers=1))
