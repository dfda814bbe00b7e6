from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch

from roll_batching.errors import DataError
from roll_batching.samples import FieldSpec, SampleBatch
from tests.samples.batches import assert_same, make_batch

TOKENS = torch.arange(12).view(3, 4)
MASK = torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0], [1, 1, 1, 1]])
LEFT = MASK.flip(1)


def test_padded_rows_lose_exactly_their_padding():
    batch = SampleBatch.from_padded({"input_ids": TOKENS}, MASK, {"input_ids": "token"}, ids=[4, 2, 7])
    assert batch.lengths.tolist() == [3, 1, 4]
    assert batch["input_ids"].tolist() == [0, 1, 2, 4, 8, 9, 10, 11]
    assert [row.tolist() for row in batch.to_lists("input_ids")] == [[0, 1, 2], [4], [8, 9, 10, 11]]
    assert batch.offsets.tolist() == [0, 3, 4, 8]


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.float32])
def test_padding_and_back(side, dtype):
    mask = (MASK if side == "right" else LEFT).to(dtype)
    values = torch.randn(3, 4, 2) * mask.bool()[..., None]
    batch = SampleBatch.from_padded({"x": values}, mask, {"x": "token"}, padding_side=side)
    assert torch.equal(batch.to_padded("x", padding_side=side), values)
    assert torch.equal(batch.padded_mask(padding_side=side), mask.bool())


def test_left_and_right_padding_hold_the_same_samples():
    right = SampleBatch.from_padded({"x": TOKENS}, MASK, {"x": "token"})
    shifted = torch.zeros_like(TOKENS)
    for row, length in enumerate(right.lengths.tolist()):
        shifted[row, 4 - length :] = TOKENS[row, :length]
    left = SampleBatch.from_padded({"x": shifted}, LEFT, {"x": "token"}, padding_side="left")
    assert left["x"].tolist() == right["x"].tolist()


def test_rows_padded_on_both_sides_hold_the_same_samples():
    mask = torch.tensor([[0, 1, 1, 1, 0], [0, 0, 0, 0, 1], [1, 1, 1, 1, 0]])
    values, shifted = torch.arange(15.0).view(3, 5), torch.arange(12.0).view(3, 4)
    schema = {"x": "token", "wide": "next_token", "lp": "next_token"}
    tensors = {"x": values, "wide": values, "lp": shifted}
    batch = SampleBatch.from_padded(tensors, mask, schema, padding_side="both")
    assert [row.tolist() for row in batch.to_lists("x")] == [[1, 2, 3], [9], [10, 11, 12, 13]]
    assert [row.tolist() for row in batch.to_lists("wide")] == [[1, 2, 0], [0], [10, 11, 12, 0]]
    assert [row.tolist() for row in batch.to_lists("lp")] == [[1, 2, 0], [0], [8, 9, 10, 0]]
    none = SampleBatch.from_padded({"x": torch.zeros(0, 0)}, torch.zeros(0, 0), {"x": "token"}, padding_side="both")
    assert len(none) == 0


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("width", [3, 4])
def test_next_token_values_stay_with_the_token_before(side, width):
    """Column j of a [B, S-1] tensor speaks of column j+1, whichever side is padded."""
    mask = MASK if side == "right" else LEFT
    values = torch.arange(12.0).view(3, 4)[:, :width]
    spec = FieldSpec("next_token", -5)
    batch = SampleBatch.from_padded({"lp": values}, mask, {"lp": spec}, padding_side=side)
    first = [0, 0, 0] if side == "right" else [1, 3, 0]
    for row, (flat, length) in enumerate(zip(batch.to_lists("lp"), [3, 1, 4], strict=True)):
        assert flat.tolist() == [*values[row, first[row] : first[row] + length - 1].tolist(), -5]


def test_wider_padding_reads_the_pad_value():
    batch = SampleBatch.from_padded({"x": TOKENS}, MASK, {"x": FieldSpec("token", 99)})
    assert batch.to_padded("x", 6)[1].tolist() == [4, 99, 99, 99, 99, 99]
    with pytest.raises(DataError, match=r"row 0 \(id 0\), row 2 \(id 2\) do not fit a width of 2"):
        batch.to_padded("x", 2)


def test_lists_of_numbers_arrays_and_tensors_agree():
    schema = {"x": "token", "lp": "next_token", "r": "sample"}
    rows, log_probs = [[1, 2, 3], [4]], [[0.5, 0.25], []]
    plain = SampleBatch.from_lists({"x": rows, "lp": log_probs, "r": [1.0, 2.0]}, schema)
    arrays = SampleBatch.from_lists(
        {
            "x": [np.array(r) for r in rows],
            "lp": [torch.tensor(r) for r in log_probs],
            "r": torch.tensor([1.0, 2.0]),
        },
        schema,
    )
    assert_same(plain, arrays)
    assert plain["lp"].tolist() == [0.5, 0.25, 0, 0]
    assert plain["x"].dtype == torch.int64 and plain["lp"].dtype == torch.float32


def test_next_token_lists_may_mix_both_lengths():
    batch = SampleBatch.from_lists(
        {"x": [[1, 2, 3], [4, 5]], "lp": [[0.5, 0.25], [0.125, 7.0]]}, {"x": "token", "lp": "next_token"}
    )
    assert batch["lp"].tolist() == [0.5, 0.25, 0, 0.125, 0]


def test_flat_next_token_values_get_their_last_row():
    batch = make_batch([1, 2], [3, 1])
    added = batch.with_fields({"lp": torch.tensor([0.5, 0.25])}, {"lp": FieldSpec("next_token", -1)})
    assert added["lp"].tolist() == [0.5, 0.25, -1, -1]


class Dict:
    """As much of a TensorDict as a caller may have."""

    def __init__(self, entries):
        self.entries = entries

    def keys(self):
        return self.entries.keys()

    def __getitem__(self, key):
        return self.entries[key]


def test_a_tensordict_gives_what_the_schema_names():
    source = Dict({"input_ids": TOKENS, "attention_mask": MASK, "uid": torch.tensor([5, 6, 8]), "other": 1})
    batch = SampleBatch.from_tensordict(source, {"input_ids": "token"}, "uid")
    assert_same(batch, SampleBatch.from_padded({"input_ids": TOKENS}, MASK, {"input_ids": "token"}, [5, 6, 8]))
    with pytest.raises(DataError, match="No entry 'labels'; present are attention_mask, input_ids"):
        SampleBatch.from_tensordict(source, {"labels": "token"})


def test_selection_takes_whole_samples_in_order():
    batch = make_batch([10, 20, 30, 40], [2, 5, 1, 3])
    assert_same(batch.select([3, 1]), make_batch([40, 20], [3, 5]))
    assert_same(batch.select_ids(np.array([30, 10])), make_batch([30, 10], [1, 2]))
    assert_same(batch.select([]), make_batch([], []))
    assert_same(
        SampleBatch.concat([batch.select([1]), batch.select([]), batch.select([3, 0])]),
        make_batch([20, 40, 10], [5, 3, 2]),
    )
    assert batch.rows_of([40, 10]).tolist() == [3, 0]
    with pytest.raises(DataError, match=r"does not hold ids \[7\]"):
        batch.rows_of([10, 7])
    with pytest.raises(DataError, match="run from 0 to 4"):
        batch.select([0, 4])


def test_rows_are_repeated_only_under_new_ids():
    batch = make_batch([10, 20], [2, 1])
    with pytest.raises(DataError, match=r"more than once.*\[10\]"):
        batch.select([0, 0])
    twice = batch.select([0, 0, 1], ids=[0, 1, 2])
    assert twice.ids.tolist() == [0, 1, 2] and twice.lengths.tolist() == [2, 2, 1]


def test_batches_travel_between_processes_and_devices():
    batch = make_batch([3, 1], [2, 4])
    assert_same(pickle.loads(pickle.dumps(batch)), batch)
    meta = batch.to("meta")
    assert meta.device.type == "meta" and meta.ids.device.type == meta.lengths.device.type == "cpu"


def test_a_batch_is_never_changed_in_place():
    fields = {"x": torch.arange(3)}
    batch = SampleBatch([0], [3], fields, {"x": "token"})
    fields["y"] = 1
    more = batch.with_fields({"r": torch.ones(1)}, {"r": "sample"})
    assert list(batch.fields) == ["x"] and list(more.fields) == ["x", "r"]
    assert list(more.without("x").fields) == ["r"] and list(more.only(["r", "x"]).fields) == ["r", "x"]
    with pytest.raises(AttributeError):
        batch.lengths = torch.ones(1)


def test_thousand_samples_in_no_time():
    lengths = torch.randint(1, 400, (4000,))
    batch = SampleBatch(range(4000), lengths, {"x": torch.arange(int(lengths.sum()))}, {"x": "token"})
    order = torch.randperm(4000)
    back = SampleBatch.concat([batch.select(order[:1000]), batch.select(order[1000:])]).select_ids(range(4000))
    assert torch.equal(back["x"], batch["x"])
    padded = batch.to_padded("x")
    mask = batch.padded_mask()
    assert torch.equal(padded[mask], batch["x"])
    assert torch.equal(SampleBatch.from_padded({"x": padded}, mask, {"x": "token"})["x"], batch["x"])


@pytest.mark.bad_input
@pytest.mark.parametrize(
    "mask, side, message",
    [
        ([[1, 1, 0], [0, 0, 0]], "right", r"row 1 \(id 20\).*all padding"),
        ([[1, 1, 0], [1, 0, 1]], "right", r"row 1 \(id 20\).*holes"),
        ([[1, 1, 0], [0, 1, 0]], "right", r'row 1 \(id 20\): padded on the left.*or "both"'),
        ([[1, 1, 0], [1, 0, 1]], "both", r"row 1 \(id 20\).*holes"),
        ([[1, 1, 1], [0, 1, 1]], "right", r'row 1 \(id 20\): padded on the left.*padding_side="left"'),
        ([[1, 1, 1], [1, 1, 0]], "left", r'row 1 \(id 20\): padded on the right.*padding_side="right"'),
        ([[1, 1, 1], [1, 0, 1]], "left", r"row 1 \(id 20\).*holes"),
        ([[0, 1, 1], [1, -1, 1]], "left", "only 0 and 1"),
        ([[0.0, float("-inf"), 1], [1, 1, 1]], "left", "only 0 and 1"),
        ([[1, 1, 1], [1, 1, 1]], "middle", "padding_side"),
    ],
)
def test_masks_that_mean_no_sample(mask, side, message, report):
    with pytest.raises(DataError, match=message) as caught:
        SampleBatch.from_padded(
            {"x": torch.zeros(2, 3)}, torch.tensor(mask), {"x": "token"}, [10, 20], padding_side=side
        )
    report(f"mask {mask}, padding_side={side!r}: {caught.value}")


BAD = [
    (lambda: SampleBatch([1, 2], [1, 0], {}, {}), r"No token in row 1 \(id 2\)"),
    (lambda: SampleBatch([1, 2], [1, -3], {}, {}), r"No token in row 1 \(id 2\)"),
    (lambda: SampleBatch([1, 1], [1, 2], {}, {}), r"more than once in one batch: \[1\]"),
    (lambda: SampleBatch([1], [1, 2], {}, {}), "1 ids for 2 lengths"),
    (lambda: SampleBatch([1], [1.5], {}, {}), "lengths must be integers; got dtype float64"),
    (lambda: SampleBatch([1], torch.ones(1), {}, {}), "lengths must be integers; got dtype torch.float32"),
    (lambda: SampleBatch([1], torch.ones(1, 1, dtype=torch.int64), {}, {}), r"one-dimensional.*\(1, 1\)"),
    (lambda: SampleBatch("12", [1, 2], {}, {}), "ids must be a one-dimensional list"),
    (
        lambda: SampleBatch([0], [3], {"x": torch.zeros(2)}, {"x": "token"}),
        r"token field with 3 rows here.*\(2,\)",
    ),
    (lambda: SampleBatch([0], [3], {"x": torch.zeros(1)}, {"x": "next_token"}), r"next_token.*\(1,\)"),
    (
        lambda: SampleBatch([0], [3], {"x": torch.zeros(3)}, {"x": "sample"}),
        r"sample field with 1 rows here.*\(3,\)",
    ),
    (lambda: SampleBatch([0], [3], {"x": [1, 2, 3]}, {"x": "token"}), "'x' is a list: pass a tensor"),
    (lambda: SampleBatch([0], [3], {"x": torch.zeros(3)}, {}), "Field 'x' not in the schema"),
    (lambda: SampleBatch([0], [3], {}, {"x": "token"}), "names 'x': give these fields, or take them out"),
    (lambda: SampleBatch([0], [3], {}, {"x": "tokens"}), "Field 'x': A field's kind is one of.*'tokens'"),
    (lambda: FieldSpec("token", "0"), "pad value is a number"),
    (lambda: SampleBatch.from_lists({"x": [[1], []]}, {"x": "token"}), r"No token in row 1 \(id 1\)"),
    (
        lambda: SampleBatch.from_lists({"x": [[1], [1, 2]], "m": [[1], [1]]}, {"x": "token", "m": "token"}),
        "'m', row 1: 1 values for a sample of 2 tokens",
    ),
    (
        lambda: SampleBatch.from_lists({"x": [[1, 2, 3]], "m": [[1]]}, {"x": "token", "m": "next_token"}),
        "as many or one less",
    ),
    (lambda: SampleBatch.from_lists({"x": [[1, "a"]]}, {"x": "token"}), "does not hold numbers"),
    (lambda: SampleBatch.from_lists({"r": [1, 2]}, {"r": "sample"}), "Without a token field, pass lengths"),
    (
        lambda: SampleBatch.from_padded({"x": torch.zeros(3, 5)}, MASK, {"x": "token"}),
        r"must be \[3, 4, ...\] like the mask; got \(3, 5\)",
    ),
    (
        lambda: SampleBatch.from_padded({"x": torch.zeros(3, 2)}, MASK, {"x": "next_token"}),
        r"\[3, 4, ...\] or \[3, 3, ...\]",
    ),
    (lambda: SampleBatch.from_padded({"x": torch.zeros(3, 3)}, MASK, {"x": "token"}), r"got \(3, 3\)"),
    (lambda: SampleBatch.from_padded({"x": TOKENS}, MASK[0], {"x": "token"}), r"\[B, S\] tensor; got \(4,\)"),
    (lambda: SampleBatch.concat([]), "at least one batch"),
    (
        lambda: SampleBatch.concat([make_batch([1], [1]), make_batch([2], [1]).without("group")]),
        "field group is sample int16 pad -1 here and absent there",
    ),
    (
        lambda: SampleBatch.concat(
            [
                make_batch([1], [1]),
                make_batch([2], [1]).with_fields({"temperature": 0.7}, {"temperature": "static"}),
            ]
        ),
        "field temperature is static 0.5 here and static 0.7 there",
    ),
    (lambda: make_batch([1], [1])["nope"], "No field 'nope'; this batch has input_ids"),
    (lambda: make_batch([1], [1]).without("nope"), "No field 'nope'"),
    (lambda: make_batch([1], [1]).to_padded("reward"), "only fields per token are padded"),
]


@pytest.mark.bad_input
@pytest.mark.parametrize("make, message", BAD, ids=range(len(BAD)))
def test_batches_that_cannot_be(make, message):
    with pytest.raises(DataError, match=message):
        make()


@pytest.mark.bad_input
def test_not_finite_values_are_named(report):
    reward = torch.tensor([1.0, float("nan"), 2.0, float("inf")])
    batch = SampleBatch(
        [5, 6, 7, 8],
        [2, 1, 3, 2],
        {"reward": reward, "lp": torch.tensor([1.0, 0, 0, 1, 2, 3, 4, 5]), "n": torch.arange(4)},
        {"reward": "sample", "lp": "next_token", "n": "sample"},
    )
    batch.require_finite(["lp", "n"])
    with pytest.raises(DataError, match=r"'reward' is not finite in row 1 \(id 6\), row 3 \(id 8\)\.") as caught:
        batch.require_finite("reward")
    report(f"NaN in rewards: {caught.value}")
    with pytest.raises(DataError, match="reward"):
        batch.require_finite()
    log_probs = batch["lp"].clone()
    log_probs[2] = float("nan")  # the only row of sample 6: it speaks of no token
    batch.with_fields({"lp": log_probs}, {"lp": "next_token"}).require_finite("lp")
    log_probs[4] = float("nan")
    with pytest.raises(DataError, match=r"in row 2 \(id 7\); the first at position 1 of 3"):
        batch.with_fields({"lp": log_probs}, {"lp": "next_token"}).require_finite("lp")
