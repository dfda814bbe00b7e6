"""A field keeps its dtype on every way through the library, whatever its pad; a pad that it cannot hold is refused."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from roll_batching.errors import DataError
from roll_batching.losses.denominators import local_counts
from roll_batching.losses.views import TokenView
from roll_batching.packing import pack_step, unpack_results
from roll_batching.planning import PlanConstraints, plan_step
from roll_batching.samples import FieldSpec, SampleBatch, collect, distribute, gather_lengths
from tests.support.ranks import run_ranks

CPU = torch.device("cpu")
WHOLE = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
FRACTIONS = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128)
PADS: dict[torch.dtype, list[Any]] = {
    torch.bool: [0, 1, False, True, 0.0, 1.0],
    torch.uint8: [0, 255, 7.0, True],
    **{dtype: [0, -100, 3.0, False] for dtype in WHOLE[1:]},
    **{dtype: [0, -100, 0.5, True, float("nan"), float("-inf")] for dtype in FRACTIONS},
}
CASES = [(dtype, pad) for dtype in PADS for pad in PADS[dtype]]
KINDS = {"a": "token", "b": "next_token", "c": "sample"}


def values(dtype: torch.dtype, count: int, seed: int) -> torch.Tensor:
    """[count, 2] numbers that every dtype holds."""
    top = 2 if dtype is torch.bool else 100
    return torch.randint(0, top, (count, 2), generator=torch.Generator().manual_seed(seed)).to(dtype)


def schema(pad: Any) -> dict[str, Any]:
    return {name: FieldSpec(kind, pad) for name, kind in KINDS.items()}  # type: ignore[arg-type]


def batch(dtype: torch.dtype, pad: Any, lengths: list[int], first: int = 0) -> SampleBatch:
    tokens, count = sum(lengths), len(lengths)
    fields = {
        "input_ids": torch.arange(tokens, dtype=torch.int32),
        "response_mask": torch.ones(tokens, dtype=torch.bool),
        "a": values(dtype, tokens, 1),
        "b": values(dtype, tokens - count, 2),
        "c": values(dtype, count, 3),
    }
    kinds = {"input_ids": "token", "response_mask": "token"}
    return SampleBatch(range(first, first + count), lengths, fields, {**kinds, **schema(pad)})


def all_pad(found: torch.Tensor, pad: Any) -> bool:
    return torch.allclose(found, torch.full_like(found, pad), rtol=0, atol=0, equal_nan=True)


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and torch.allclose(one, other, rtol=0, atol=0, equal_nan=True)


@settings(max_examples=60)
@given(
    st.sampled_from(CASES),
    st.lists(st.integers(1, 7), min_size=1, max_size=6),
    st.sampled_from([{"pack_multiple": 8}, {"mode": "dynamic"}, {"mode": "padded", "rows": 2}]),
)
def test_packs_and_views_show_what_the_batch_holds(case, lengths, mode) -> None:
    dtype, pad = case
    data = batch(dtype, pad, lengths)
    plan = plan_step(lengths, PlanConstraints(dp_size=1, max_tokens=16, **mode))
    counts = local_counts(data, ("response_mask",))
    packs = pack_step(data, plan, dp_rank=0, device=CPU, masks=("response_mask",))
    for pack in packs:
        view = TokenView(pack, counts)
        assert view.input_ids.dtype == pack.labels.dtype == pack.input_ids.dtype == torch.int64
        assert int((~view["response_mask"]).sum()) == int((~pack.predicts).sum())
        source = torch.from_numpy(pack.layout.source(data.offsets[data.rows_of(pack.ids)].numpy()))
        for name, shift in (("a", 1), ("b", 0)):
            shown = view.per_token(name)
            assert same(shown[pack.predicts], data[name][source[pack.predicts] + shift])
            assert all_pad(shown[~pack.predicts], pad)
        here = view.segment_ids < view.samples
        rows = data.rows_of(pack.ids)
        assert same(view["c"], data["c"][rows])
        assert same(view.per_token("c")[here], data["c"][rows[view.segment_ids[here]]])
    back = unpack_results(data, plan, [pack.layout for pack in packs], [pack.fields["a"] for pack in packs])
    assert back.dtype == dtype


def test_a_rank_without_samples_packs_fields_of_the_same_dtype() -> None:
    empty = batch(torch.bool, 0, [3, 2]).select([])
    plan = plan_step([3], PlanConstraints(dp_size=2, max_tokens=8))
    without = next(rank for rank in range(2) if not len(plan.rank_samples(rank)))
    (pack,) = pack_step(empty, plan, dp_rank=without, device=CPU)
    assert [pack.fields[name].dtype for name in KINDS] == [torch.bool] * 3


@pytest.mark.parametrize(("dtype", "pad"), [(torch.int64, 1), (torch.bool, True), (torch.float32, 0.5)])
def test_a_masks_pad_counts_nothing(dtype, pad) -> None:
    """What a row without a prediction reads is the pad; no mask may count it."""
    data = batch(torch.float32, 0, [4, 1, 3])
    ones = torch.ones(data.num_tokens, dtype=dtype)
    data = data.with_fields({"response_mask": ones}, {"response_mask": FieldSpec("token", pad)})
    plan = plan_step([4, 1, 3], PlanConstraints(dp_size=1, max_tokens=16, pack_multiple=16))
    (pack,) = pack_step(data, plan, dp_rank=0, device=CPU, masks=("response_mask",))
    assert torch.equal(pack.masks["response_mask"], pack.predicts)
    view = TokenView(pack, local_counts(data, ("response_mask",)))
    assert float(view.mean(torch.ones(len(pack.predicts)))) == 1.0


def test_sums_of_half_precision_fields_are_not_rounded_at_every_addition() -> None:
    lengths = [600, 300]
    data = batch(torch.bfloat16, 0, lengths)
    plan = plan_step(lengths, PlanConstraints(dp_size=1, max_tokens=1024))
    (pack,) = pack_step(data, plan, dp_rank=0, device=CPU, masks=("response_mask",))
    view = TokenView(pack, local_counts(data, ("response_mask",)))
    ones = torch.ones(len(pack.predicts), dtype=torch.bfloat16)
    assert view.segment_sum(ones).tolist() == [float(n - 1) for n in pack.layout.lengths]
    assert float(view.sum(ones)) == 898 and float(view.sequence_mean(ones)) == 1.0


@pytest.mark.parametrize(("dtype", "pad"), CASES, ids=str)
def test_every_way_to_make_a_batch_keeps_the_dtype(dtype, pad) -> None:
    lengths = [3, 1, 4]
    data = batch(dtype, pad, lengths)
    assert all(data[name].dtype == dtype for name in KINDS)
    assert all_pad(data["b"][data.offsets[1:] - 1], pad)
    ways = [data.select([2, 0, 1]).select_ids(data.ids), SampleBatch.concat([data.select([0]), data.select([1, 2])])]
    columns = {name: data.to_lists(name) for name in KINDS}
    ways.append(SampleBatch.from_lists(columns, schema(pad)))
    for side in ("right", "left"):
        padded = {name: data[name] if name == "c" else data.to_padded(name, padding_side=side) for name in KINDS}
        gaps = ~data.padded_mask(padding_side=side)
        assert all_pad(padded["a"][gaps], pad) and padded["a"].dtype == dtype
        padded["b"] = padded["b"][:, :-1] if side == "right" else padded["b"]
        ways.append(SampleBatch.from_padded(padded, ~gaps, schema(pad), padding_side=side))
    for way in ways:
        assert all(same(way[name], data[name]) for name in KINDS)


def travels(payload: None) -> list[str]:
    """On a rank: fields of every dtype and pad out and home again, one sample dropped or cut; what went wrong."""
    dist.init_process_group("gloo")
    rank, wrong = dist.get_rank(), []
    lengths = [[3, 9, 2, 1], [8, 12, 4, 5]][rank]
    columns: dict[str, Any] = {}
    specs: dict[str, Any] = {}
    for number, (dtype, pad) in enumerate(CASES):
        one = batch(dtype, pad, lengths)
        columns |= {f"{name}{number}": one[name] for name in KINDS}
        specs |= {f"{name}{number}": one.schema[name] for name in KINDS}
    local = SampleBatch(range(10 * rank, 10 * rank + 4), lengths, columns, specs)
    table = gather_lengths(local)
    for policy in ("drop", "truncate"):
        constraints = PlanConstraints(dp_size=2, max_tokens=10, oversize=policy)
        plan = plan_step(table.lengths, constraints, ids=table.ids, location=table.location)
        there = distribute(local, plan)
        used = there.lengths.clamp(max=10)
        position = torch.arange(there.num_tokens) - there.offsets[:-1].repeat_interleave(there.lengths)
        kept = position < used.repeat_interleave(there.lengths)
        fields = {name: there[name][kept] if specs[name].per_token else there[name] for name in specs}
        home = collect(SampleBatch(there.ids, used, fields, specs), plan, like=local)
        for name, spec in specs.items():
            expected = local[name].clone()
            if rank == 1 and spec.per_token:  # its second sample has twelve tokens
                expected[8 + (10 if policy == "truncate" else 0) : 20] = spec.pad
            elif rank == 1 and policy == "drop":
                expected[1] = spec.pad
            if there[name].dtype != local[name].dtype or not same(home[name], expected):
                wrong.append(f"{local[name].dtype} {spec} {policy}")
    return wrong


def test_every_dtype_travels_and_comes_home() -> None:
    assert run_ranks(2, "tests.samples.test_dtypes:travels") == [[], []]


REFUSED = [
    (torch.bool, 2),
    (torch.bool, -1),
    (torch.bool, 0.5),
    (torch.bool, float("nan")),
    (torch.uint8, -100),
    (torch.uint8, 256),
    (torch.int8, 200),
    (torch.int64, 1.5),
    (torch.int64, float("nan")),
    (torch.int64, float("inf")),
    (torch.int64, 2**63),
    (torch.float16, 1e6),
    (torch.float32, 1e39),
]


@pytest.mark.bad_input
@pytest.mark.parametrize(("dtype", "pad"), REFUSED, ids=str)
def test_a_pad_that_the_dtype_cannot_hold_is_refused(dtype, pad) -> None:
    rows, mask = values(dtype, 4, 0).view(2, 2, 2), torch.ones(2, 2)
    words = re.escape(f"'x': its pad value {pad} does not fit its dtype {str(dtype).removeprefix('torch.')}")
    for kind in ("token", "next_token", "sample"):
        spec = {"x": FieldSpec(kind, pad)}
        with pytest.raises(DataError, match=words):
            SampleBatch([0, 1], [2, 2], {"x": rows[:, 0] if kind == "sample" else rows.flatten(0, 1)}, spec)
        with pytest.raises(DataError, match=words):
            SampleBatch.from_padded({"x": rows}, mask, spec)
        with pytest.raises(DataError, match=words):
            SampleBatch.from_lists({"x": list(rows)}, spec, lengths=[2, 2])


@pytest.mark.bad_input
@pytest.mark.parametrize("dtype", [torch.uint16, torch.uint32, torch.uint64, torch.float8_e4m3fn], ids=str)
def test_a_dtype_that_cannot_be_moved_is_refused_by_name(dtype) -> None:
    rows = torch.zeros(2, 2).to(dtype)
    words = f"'x' is {str(dtype).removeprefix('torch.')}, which .* cast it"
    for kind in ("token", "sample"):
        with pytest.raises(DataError, match=words):
            SampleBatch([0, 1], [1, 1], {"x": rows}, {"x": kind})
    with pytest.raises(DataError, match=words):
        SampleBatch.from_padded({"x": rows}, torch.ones(2, 2), {"x": "token"})


@pytest.mark.bad_input
@pytest.mark.parametrize("dtype", [torch.float32, torch.bool])
def test_tokens_are_integers(dtype) -> None:
    data = SampleBatch([0], [3], {"input_ids": torch.zeros(3, dtype=dtype)}, {"input_ids": "token"})
    plan = plan_step([3], PlanConstraints(dp_size=1, max_tokens=8))
    with pytest.raises(DataError, match="input_ids .* integers"):
        pack_step(data, plan, dp_rank=0, device=CPU)
