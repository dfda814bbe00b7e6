"""Worked planning examples of the ROLL and NeMo-RL documentation, with the printed numbers."""

from __future__ import annotations

import numpy as np
import pytest

from roll_batching.planning import PlanConstraints, pack_bins, packing_metrics, plan_step

pytestmark = pytest.mark.planning

ROLL_LENGTHS = [7, 6, 8, 5, 1, 3, 8, 6]


def shapes(plan):
    return [[(mb.lengths.tolist(), mb.padded_length) for mb in rank] for rank in plan.micro_batches]


def roll_constraints(cap, **more):
    return PlanConstraints(
        dp_size=2,
        mode="dynamic",
        algorithm="roll",
        max_tokens=cap,
        sequence_length_round=2,
        shared_shapes=True,
        padded_length=10,
        **more,
    )


def test_roll_dynamic_batching_prints_three_micro_batches_and_56_tokens():
    """Erratum: the document says max_tokens_microbatch=10 and prints a micro-batch of 2 x 6 = 12 tokens.

    The printed numbers come out at a cap of 12, with every rank padded to the longest rank's length.
    """
    plan = plan_step(ROLL_LENGTHS, roll_constraints(12))
    assert shapes(plan) == [
        [([1, 5], 6), ([6], 8), ([8], 8)],
        [([3, 6], 6), ([7], 8), ([8], 8)],
    ]
    report = plan.report
    assert report.tokens_before == 80
    assert report.computed_tokens == 56
    assert report.share_removed == pytest.approx(0.30)  # of all 80 tokens, not of the pad tokens
    assert report.num_micro_batches == 3


def test_roll_dynamic_batching_at_the_cap_that_the_document_states():
    plan = plan_step(ROLL_LENGTHS, roll_constraints(10))
    assert plan.report.num_micro_batches == 4
    assert plan.report.computed_tokens == 52
    assert all(mb.tokens <= 10 for rank in plan.micro_batches for mb in rank)


def test_roll_dynamic_batching_without_shared_shapes_keeps_each_ranks_own_length():
    plan = plan_step(ROLL_LENGTHS, PlanConstraints(dp_size=2, mode="dynamic", max_tokens=12, sequence_length_round=2))
    assert [[mb.padded_length for mb in rank] for rank in plan.micro_batches] == [[6, 6, 8], [6, 8, 8]]


def test_roll_shards_after_sorting():
    plan = plan_step(ROLL_LENGTHS, roll_constraints(12))
    assert [np.concatenate([mb.lengths for mb in rank]).tolist() for rank in plan.micro_batches] == [
        [1, 5, 6, 8],
        [3, 6, 7, 8],
    ]


def test_roll_virtual_pipeline_splits_the_first_micro_batch_and_keeps_its_length():
    plan = plan_step(ROLL_LENGTHS, roll_constraints(12, pp_size=2, vpp_size=2))
    assert shapes(plan) == [
        [([1], 6), ([5], 6), ([6], 8), ([8], 8)],
        [([3], 6), ([6], 6), ([7], 8), ([8], 8)],
    ]


@pytest.mark.parametrize("sequence_multiple", [None, "2*cp*tp"])
def test_roll_packing_example_pads_2_4_6_1_to_4_4_8_4(sequence_multiple):
    constraints = PlanConstraints(
        dp_size=1, cp_size=2, max_tokens=20, algorithm="none", sequence_multiple=sequence_multiple
    )
    (mb,) = plan_step([2, 4, 6, 1], constraints).micro_batches[0]
    assert mb.slots.tolist() == [4, 4, 8, 4]
    assert np.concatenate([[0], np.cumsum(mb.slots)]).tolist() == [0, 4, 8, 16, 20]
    assert mb.tokens == 20
    assert mb.tokens // 2 == 10  # what each CP rank's printed input holds


def test_roll_context_parallel_chunks_pad_6_to_8():
    (mb,) = plan_step([6], PlanConstraints(dp_size=1, cp_size=2, max_tokens=8)).micro_batches[0]
    assert mb.slots.tolist() == [8]


def test_roll_alignment_of_the_document_is_2_cp_tp():
    constraints = PlanConstraints(
        dp_size=1, cp_size=2, tp_size=4, max_tokens=64, sequence_multiple="2*cp*tp", algorithm="none"
    )
    assert constraints.sequence_alignment == 16
    (mb,) = plan_step([3, 17], constraints).micro_batches[0]
    assert mb.slots.tolist() == [16, 32]


def test_roll_promise_no_packed_sequence_exceeds_8192():
    """Three sequences of 5440 at 8192: ROLL's own code makes a micro-batch of 10880."""
    plan = plan_step([5440] * 3, PlanConstraints(dp_size=1, max_tokens=8192))
    assert [mb.tokens for mb in plan.micro_batches[0]] == [5440] * 3


def test_nemo_rl_packing_picture():
    lengths = [3, 6, 2, 3]
    padded = plan_step(lengths, PlanConstraints(dp_size=1, mode="padded", rows=4))
    assert padded.report.computed_tokens == 24
    assert padded.report.padding_share == pytest.approx(10 / 24)  # "~40% padding"
    packed = plan_step(lengths, PlanConstraints(dp_size=1, max_tokens=15, pack_multiple=15, algorithm="none"))
    (mb,) = packed.micro_batches[0]
    assert mb.samples.tolist() == [0, 1, 2, 3]
    assert (mb.tokens, int(mb.slots.sum())) == (15, 14)  # one p at the end


def test_nemo_rl_context_parallel_packing():
    constraints = PlanConstraints(dp_size=1, cp_size=2, max_tokens=24, algorithm="none")
    (mb,) = plan_step([5, 8, 1, 3], constraints).micro_batches[0]
    assert mb.slots.tolist() == [8, 8, 4, 4]
    assert mb.tokens // 2 == 12


def test_nemo_rl_dynamic_batching():
    constraints = PlanConstraints(dp_size=1, mode="dynamic", algorithm="nemo_rl", max_tokens=16)
    first, second = plan_step([2, 4, 7, 6, 3, 4], constraints).micro_batches[0]
    assert (first.samples.tolist(), first.rows, first.padded_length) == ([2, 3], 2, 7)
    assert (second.samples.tolist(), second.rows, second.padded_length) == ([1, 5, 4, 0], 4, 4)


def test_modified_first_fit_decreasing_ends_in_true_first_fit():
    """NeMo-RL's own code ends in worst-fit and needs 3 bins here."""
    lengths = [34, 31, 24, 23, 14, 34, 35]
    assert len(pack_bins(lengths, 100, "modified_first_fit_decreasing")) == 2
    assert len(pack_bins(lengths, 100, "first_fit_decreasing")) == 2


def test_modified_first_fit_decreasing_runs_the_documented_phases():
    # C = 60: large > 30, medium > 20, small > 10, tiny <= 10.
    lengths = [40, 35, 25, 21, 12, 11, 11, 8, 5]
    bins = pack_bins(lengths, 60, "modified_first_fit_decreasing")
    # Two bins for the large; forward, 35 takes 25 (40 has no room for any medium); backward, 40 would take
    # a pair of small ones but 11 + the largest that fits do not (20 left); forward again, 40 takes 12 and 8;
    # first fit for the rest.
    assert bins == [[0, 4, 7], [1, 2], [3, 5, 6, 8]]


def test_the_four_metrics_of_nemo_rl():
    metrics = packing_metrics([6, 2, 4, 3], [[0, 1], [2, 3]], 10)
    assert metrics["bin_utilization"] == pytest.approx(0.75)
    assert metrics["waste_ratio"] == pytest.approx(0.25)
    assert metrics["packing_efficiency"] == 1.0
    assert metrics["bin_balance"] == pytest.approx(1 - 0.05 / 0.75)
    assert packing_metrics([5, 3], [[0, 1]], 16, multiple=8)["alignment_waste"] == pytest.approx(0.5)
