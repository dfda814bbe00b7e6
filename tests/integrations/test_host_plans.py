"""Plans with the hosts' rules: lengths, cuts, samples that stay on their rank."""

from __future__ import annotations

import numpy as np
import pytest

from roll_batching.errors import PlanError
from roll_batching.integrations.host_plans import (
    WORKLOAD,
    HostSamples,
    cut_rectangles,
    gather_samples,
    joined_prefixes,
    plan_on_home_ranks,
)
from roll_batching.planning import PlanConstraints, SharedPrefixes
from roll_batching.planning.cost_model import FIXED_TOKENS


def greedy_cuts(widths, cap):
    """ROLL's and NeMo-RL's cuts: a micro-batch takes positions while its rectangle is below the cap."""
    cuts, widest = [[0, 0]], 0
    for position, width in enumerate(widths):
        widest = max(widest, width)
        if (position + 1 - cuts[-1][0]) * widest <= cap:
            cuts[-1][1] += 1
        else:
            cuts.append([position, position + 1])
            widest = width
    return cuts


def tokens_of(widths, cuts):
    return sum((end - first) * max(widths[first:end]) for first, end in cuts)


def test_cuts_are_never_behind_greedy_ones():
    generator = np.random.default_rng(4)
    ahead = 0
    for _ in range(200):
        widths = np.sort(generator.lognormal(5, 1, int(generator.integers(1, 90))).astype(int) // 16 * 16 + 16)
        cap = int(widths.max() * generator.integers(1, 9))
        cuts, greedy = cut_rectangles(widths, cap), greedy_cuts(widths, cap)
        assert [first for first, _ in cuts] == [0, *(end for _, end in cuts[:-1])] and cuts[-1][1] == len(widths)
        assert all((end - first) * max(widths[first:end]) <= cap for first, end in cuts)
        assert len(cuts) <= len(greedy)
        if len(cuts) == len(greedy):
            assert tokens_of(widths, cuts) <= tokens_of(widths, greedy)
            ahead += tokens_of(widths, cuts) < tokens_of(widths, greedy)
        multiple = int(generator.integers(2, 5))
        if len(widths) >= -(-len(cuts) // multiple) * multiple:
            more = cut_rectangles(widths, cap, multiple)
            assert len(more) == -(-len(cuts) // multiple) * multiple and tokens_of(widths, more) <= tokens_of(
                widths, cuts
            )
    assert ahead > 50


@pytest.mark.bad_input
def test_cuts_that_cannot_be():
    assert cut_rectangles([], 8) == []
    with pytest.raises(AssertionError, match="a row of 9 tokens is longer than a micro-batch of 8"):
        cut_rectangles([1, 9], 8)
    with pytest.raises(AssertionError, match="3 positions cannot form a multiple of 4"):
        cut_rectangles([1, 2, 3], 8, 4)


@pytest.mark.bad_input
def test_lengths_that_are_none():
    (own,), rank = gather_samples(lambda: HostSamples.of(np.array([3.0, 0.0]), "a host", lambda: []), None)
    assert (
        own.lengths.tolist() == [3, 1] and own.lengths.dtype == np.int64 and rank == 0
    )  # a sample without tokens takes one
    for wrong in (np.nan, np.inf, -1.0, 1.5):
        with pytest.raises(ValueError, match=f"sample 1 has the length {wrong}"):
            gather_samples(lambda wrong=wrong: HostSamples.of(np.array([3.0, wrong]), "a host", lambda: []), None)


@pytest.mark.bad_input
def test_abuse_of_home_plans():
    rules = {"max_tokens": 100, "fillers": False, "oversize": "alone"}
    with pytest.raises(PlanError, match=r"ranks \[1\] have no samples"):
        plan_on_home_ranks([np.array([3]), np.array([], dtype=np.int64)], PlanConstraints(dp_size=2, **rules))
    assert plan_on_home_ranks([np.array([3, 4])], PlanConstraints(dp_size=1, **rules)) == [[[0, 1]]]
    alone = plan_on_home_ranks([np.array([3, 400, 4])], PlanConstraints(dp_size=1, **rules))
    assert sorted(alone[0]) == [[0, 2], [1]]
    with pytest.raises(PlanError, match="exceeds max_tokens=100"):
        plan_on_home_ranks([np.array([400])], PlanConstraints(dp_size=1, **rules | {"oversize": "error"}))


def test_a_host_cost_has_a_fixed_part_so_that_pipelines_do_not_split_to_the_end():
    lengths = np.clip(np.random.default_rng(7).lognormal(6.5, 0.9, 512), 16, 8192).astype(np.int64)
    rules = PlanConstraints(
        dp_size=2, max_tokens=32768, pp_size=4, num_micro_batches_multiple=8, fillers=False, objective="auto"
    )
    (first, _) = plan_on_home_ranks([lengths[:256], lengths[256:]], rules)
    assert WORKLOAD.fixed == 24576 * FIXED_TOKENS and len(first) <= 48  # 256 with a fixed cost near 0


def test_siblings_share_micro_batches_of_whole_samples_under_the_cap():
    rng, responses, prompt = np.random.default_rng(5), 8, 700
    prompts = rng.integers(0, 1000, (12, prompt))
    parts, known, computed = [], [], {}
    for rank in range(2):  # the samples of a rank in random order
        owners = rng.permutation(np.repeat(np.arange(rank * 6, rank * 6 + 6), responses))
        parts.append(prompt + np.clip(rng.lognormal(5.0, 0.8, len(owners)), 16, 1500).astype(np.int64))
        rows = [
            np.concatenate([prompts[owner], rng.integers(0, 1000, length - prompt)])
            for owner, length in zip(owners, parts[-1], strict=True)
        ]
        known.append(HostSamples(parts[-1], SharedPrefixes.of(np.concatenate(rows), parts[-1])))
    rules = PlanConstraints(dp_size=2, max_tokens=8192, fillers=False)
    for name, prefixes in (("apart", None), ("shared", joined_prefixes(known))):
        plan = plan_on_home_ranks(parts, rules, prefixes=prefixes)
        assert [sorted(sum(bins, [])) for bins in plan] == [list(range(48))] * 2
        computed[name] = 0
        for part, samples, bins in zip(parts, known, plan, strict=True):
            assert samples.prefixes is not None
            for members in map(np.array, bins):
                assert part[members].sum() <= 8192
                computed[name] += int(part[members].sum() - samples.prefixes.select(members).shared.sum())
    assert computed["shared"] < 0.7 * computed["apart"], computed
