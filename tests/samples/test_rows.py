"""Fields of kind rows: any number of rows per sample, counted by a sample field."""

from __future__ import annotations

import pytest
import torch

from roll_batching.errors import DataError
from roll_batching.jobs.driver.shard_distribution import to_columns
from roll_batching.samples import FieldSpec, SampleBatch
from tests.samples.batches import make_batch

SCHEMA = {"x": FieldSpec("token"), "boxes": FieldSpec("rows", counts="count"), "count": FieldSpec("sample")}
TOKENS = [[1, 2], [3], [4, 5, 6]]
BOXES = [[[1, 1], [2, 2]], [], [[3, 3]]]


def listed(**changes) -> SampleBatch:
    columns = {
        "x": TOKENS,
        "boxes": [torch.tensor(one, dtype=torch.int64).view(-1, 2) for one in BOXES],
        "count": [2, 0, 1],
    }
    return SampleBatch.from_lists({**columns, **changes}, SCHEMA)


def test_rows_follow_their_sample():
    batch = listed()
    assert batch.rows_per_sample("boxes").tolist() == [2, 0, 1]
    assert [one.tolist() for one in batch.to_lists("boxes")] == BOXES
    assert batch.select([2, 1, 0])["boxes"].tolist() == [[3, 3], [1, 1], [2, 2]]
    assert batch.select([0, 0, 2], ids=[7, 8, 9])["boxes"].tolist() == [[1, 1], [2, 2], [1, 1], [2, 2], [3, 3]]
    assert batch.select([])["boxes"].shape == (0, 2)
    joined = SampleBatch.concat([batch, batch.with_ids([5, 6, 7]).select([2])])
    assert joined["boxes"].tolist()[-1] == [3, 3] and joined["count"].tolist() == [2, 0, 1, 1]


def test_rows_are_flat_beside_padded_tensors():
    mask = torch.tensor([[1, 1], [1, 0]])
    given = {"x": torch.ones(2, 2), "boxes": torch.zeros(3, 2), "count": torch.tensor([0, 3])}
    assert SampleBatch.from_padded(given, mask, SCHEMA).to_lists("boxes")[1].shape == (3, 2)


def test_counts_stay_on_the_host():
    moved = listed().to("meta")
    assert moved["boxes"].device.type == "meta" and moved["count"].device.type == "cpu"
    assert moved.only(["count", "boxes"]).device.type == "meta"
    assert moved.select([2])["boxes"].shape == (1, 2)


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("change", "words"),
    {
        "counts of other samples": ({"count": [1, 1, 1]}, r"boxes.*\[2, 0, 1\].*\[1, 1, 1\]"),
        "negative": ({"boxes": torch.zeros(0, 2), "count": torch.tensor([1, -1, 0])}, "-1 must be 0 or more"),
        "sum": ({"boxes": torch.zeros(4, 2)}, r"rows field with 3 rows.*\[3, \.\.\.\]; got \(4, 2\)"),
        "fractions": ({"count": torch.tensor([2.0, 0.0, 1.0])}, "integers"),
    }.values(),
)
def test_counts_that_do_not_fit(change, words, report):
    with pytest.raises(DataError, match=words) as error:
        if isinstance(change.get("count"), list):
            listed(**change)
        else:  # flat, as stored
            listed().with_fields(change, {name: SCHEMA[name] for name in change})
    report(str(error.value))


@pytest.mark.bad_input
def test_rows_without_their_counts():
    with pytest.raises(DataError, match="'count'.*it is absent"):
        listed().without("count")
    with pytest.raises(DataError, match="'count', which must be a sample field"):
        listed().with_fields({"count": torch.zeros(6)}, {"count": "token"})
    with pytest.raises(DataError, match="pad value 0"):
        listed().with_fields({"count": torch.tensor([2, 0, 1])}, {"count": FieldSpec("sample", -1)})
    with pytest.raises(DataError, match="names the sample field"):
        FieldSpec("rows")
    with pytest.raises(DataError, match="names the sample field"):
        FieldSpec("token", counts="count")


@pytest.mark.bad_input
def test_values_that_are_not_finite_name_sample_and_row():
    boxes = [torch.zeros(2, 2), torch.zeros(0, 2), torch.tensor([[float("nan"), 0.0]])]
    with pytest.raises(DataError, match=r"'boxes' is not finite in row 2 \(id 2\); the first at position 0 of 1"):
        listed(boxes=boxes).require_finite()


@pytest.mark.bad_input
def test_a_worker_group_refuses_them():
    with pytest.raises(DataError, match="patches are of kind rows"):
        to_columns(make_batch([1, 2], [3, 4]))
