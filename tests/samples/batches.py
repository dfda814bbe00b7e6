"""Batches for the tests of data/: every kind of field, several dtypes and trailing dimensions."""

from __future__ import annotations

import torch

from roll_batching.samples import FieldSpec, SampleBatch

SCHEMA = {
    "input_ids": FieldSpec("token", 9),
    "response_mask": FieldSpec("token", False),
    "log_probs": FieldSpec("next_token"),
    "features": FieldSpec("token", -1),
    "reward": FieldSpec("sample", float("nan")),
    "group": FieldSpec("sample", -1),
    "patches": FieldSpec("rows", 7, counts="patch_count"),
    "patch_count": FieldSpec("sample"),
    "temperature": FieldSpec("static"),
    "prior": FieldSpec("static"),
}


def make_batch(ids: list[int], lengths: list[int]) -> SampleBatch:
    """Fields are functions of id and position, so that every value tells where it belongs."""
    id_of = torch.tensor(ids, dtype=torch.int64).repeat_interleave(torch.tensor(lengths, dtype=torch.int64))
    position = torch.cat([torch.arange(length) for length in lengths]) if lengths else torch.arange(0)
    row = torch.tensor(ids, dtype=torch.float64)
    patch_count = torch.tensor(ids, dtype=torch.int64) % 4
    patches = [id * 1000 + number for id in ids for number in range(id % 4)]
    code = id_of * 1000 + position
    fields = {
        "input_ids": code,
        "response_mask": (code % 3) == 0,
        "log_probs": (code / 7).to(torch.bfloat16),
        "features": torch.stack([code, -code, code * 2], -1).to(torch.int32).view(-1, 3, 1),
        "reward": torch.stack([row / 3, row], -1),
        "group": row.to(torch.int16),
        "patches": torch.tensor(patches, dtype=torch.int64)[:, None].repeat(1, 2),
        "patch_count": patch_count,
        "temperature": 0.5,
        "prior": torch.tensor([1.0, float("nan")]),
    }
    return SampleBatch(ids, lengths, fields, SCHEMA)


def assert_same(one: SampleBatch, other: SampleBatch) -> None:
    assert one.ids.tolist() == other.ids.tolist()
    assert one.lengths.tolist() == other.lengths.tolist()
    assert one.describe(static_values=True) == other.describe(static_values=True)
    for name, spec in one.schema.items():
        if spec.kind != "static":
            assert torch.allclose(one[name], other[name], rtol=0, atol=0, equal_nan=True), name
