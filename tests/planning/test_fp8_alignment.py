"""Under FP8 every rank's share of a micro-batch is a multiple of the recipe's, and the cap holds with the padding."""

from __future__ import annotations

import math
from enum import StrEnum

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roll_batching.errors import PlanError
from roll_batching.planning import PlanConstraints, plan_step
from roll_batching.planning.registry import ALGORITHMS
from roll_batching.settings import MegatronConfig
from roll_batching.settings.fp8 import TOKEN_MULTIPLES, fp8_layers, token_multiple
from tests.planning.test_prefixes import prefixes_of, samples_of

pytestmark = pytest.mark.planning


@st.composite
def steps(draw: st.DrawFn) -> tuple[list[int], PlanConstraints, int]:
    """Lengths, constraints of a layout in FP8, and the multiple of a rank's tokens."""
    megatron = MegatronConfig(
        fp8="e4m3",
        fp8_recipe=draw(st.sampled_from(sorted(TOKEN_MULTIPLES))),
        transformer_impl="transformer_engine",
        tensor_model_parallel_size=draw(st.sampled_from([1, 2, 4])),
        context_parallel_size=draw(st.sampled_from([1, 2, 4])),
        pipeline_model_parallel_size=draw(st.sampled_from([1, 2])),
        sequence_parallel=draw(st.booleans()),
    )
    dims = megatron.parallel_dims(megatron.model_size * draw(st.sampled_from([1, 2, 3])))
    mode = draw(st.sampled_from(["packed", "dynamic", "padded"]))
    rounding = 1 if mode == "packed" else draw(st.sampled_from([1, 4, 64]))
    unit = dims.cp_size * megatron.pack_multiple * (dims.tp_size if dims.sequence_parallel else 1)
    unit = math.lcm(unit, rounding)
    cap = unit * draw(st.integers(1, 4)) + draw(st.integers(0, unit - 1))
    longest = cap // unit * unit  # what fits once it is aligned
    lengths = draw(st.lists(st.integers(1, longest), min_size=1, max_size=30))
    constraints = PlanConstraints(
        dp_size=dims.dp_size, tp_size=dims.tp_size, cp_size=dims.cp_size, pp_size=dims.pp_size,
        sequence_parallel=dims.sequence_parallel, max_tokens=cap, mode=mode, pack_multiple=megatron.pack_multiple,
        algorithm=draw(st.sampled_from(ALGORITHMS[mode].names)),
        sequence_length_round=rounding,
    )  # fmt: skip
    return lengths, constraints, megatron.pack_multiple


@given(steps())
@settings(max_examples=40, deadline=None)
def test_every_share_is_aligned_and_no_micro_batch_exceeds_the_cap(step):
    lengths, constraints, multiple = step
    plan = plan_step(lengths, constraints)
    ranks = constraints.cp_size * (constraints.tp_size if constraints.sequence_parallel else 1)
    for micro_batch in (mb for rank in plan.micro_batches for mb in rank):
        assert micro_batch.tokens <= constraints.max_tokens
        assert micro_batch.tokens % ranks == 0 and micro_batch.tokens // ranks % multiple == 0


@pytest.mark.parametrize("multiple", sorted(TOKEN_MULTIPLES.values()))
def test_packs_that_share_prefixes_are_aligned_too(multiple):
    rows = [row for seed in range(3) for row in samples_of(seed)]
    constraints = PlanConstraints(dp_size=2, max_tokens=multiple * 4 + 7, pack_multiple=multiple, oversize="drop")
    plan = plan_step([len(row) for row in rows], constraints, prefixes=prefixes_of(rows))
    packs = [mb for rank in plan.micro_batches for mb in rank]
    assert any(mb.shared.any() for mb in packs)
    assert all(mb.tokens % multiple == 0 and mb.tokens <= constraints.max_tokens for mb in packs)


def test_a_cap_below_the_alignment_of_one_micro_batch_is_refused():
    with pytest.raises(PlanError, match="below the alignment of one micro-batch .512 tokens"):
        PlanConstraints(dp_size=1, max_tokens=500, cp_size=2, tp_size=2, sequence_parallel=True, pack_multiple=128)


def test_multiples_by_recipe():
    class Fp8Recipe(StrEnum):  # as Megatron's
        blockwise = "blockwise"

    assert token_multiple(None, "blockwise") == 1
    assert [token_multiple("e4m3", recipe) for recipe in ("tensorwise", "mxfp8", "blockwise")] == [16, 32, 128]
    assert token_multiple("hybrid", Fp8Recipe.blockwise) == 128
    assert MegatronConfig().pack_multiple == 1


def test_layers_in_fp8():
    base = {"fp8": "e4m3", "fp8_recipe": "tensorwise"}
    assert fp8_layers(MegatronConfig(), range(4), 8) == 0
    assert fp8_layers(MegatronConfig(**base), range(4), 8) == 4
    some = MegatronConfig(**base, first_last_layers_bf16=True, num_layers_at_start_in_bf16=2)
    assert [fp8_layers(some, range(4), 8), fp8_layers(some, range(4, 8), 8)] == [2, 3]
