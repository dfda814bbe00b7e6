"""Samples read from the batches of hosts, and fields written back: the same values at the same tokens."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from roll_batching.errors import DataError
from roll_batching.integrations.batches import HostForm, make_host_fields, read_host_batch
from roll_batching.samples import SampleBatch

PROMPTS, RESPONSES = [3, 1, 4, 2], [2, 5, 1, 3]
ROWS = [torch.arange(1, 1 + p + r) + 10 * n for n, (p, r) in enumerate(zip(PROMPTS, RESPONSES, strict=True))]
OWN = [row.float() / 100 for row in ROWS]
"""A value of each token, which says the token it belongs to."""
FORMS: dict[str, HostForm] = {"input_ids": "token", "old": "response", "advantages": "response", "score": "sample"}


def jagged(rows: list[torch.Tensor]) -> torch.Tensor:
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)


def padded(rows: list[torch.Tensor], width: int, firsts: list[int] | None = None) -> torch.Tensor:
    full = rows[0].new_zeros(len(rows), width)
    for row, (values, first) in enumerate(zip(rows, firsts or [0] * len(rows), strict=True)):
        full[row, first : first + len(values)] = values
    return full


def tails(rows: list[torch.Tensor]) -> list[torch.Tensor]:
    return [row[p:] for row, p in zip(rows, PROMPTS, strict=True)]


def verl_engine() -> dict[str, Any]:
    """verl's TensorDict in its engines: `input_ids` of whole rows, fields of the response."""
    return {
        "input_ids": jagged(ROWS),
        "responses": jagged(tails(ROWS)),
        "old": jagged(tails(OWN)),
        "advantages": jagged(tails(OWN)),
        "score": torch.tensor([1.0, 2.0, 3.0, 4.0]),
    }


def verl_trainer() -> Any:
    """verl's DataProto: prompts padded on the left, responses on the right."""
    firsts, left = [4 - prompt for prompt in PROMPTS], 4
    return SimpleNamespace(
        batch={
            "input_ids": padded(ROWS, 9, firsts),
            "attention_mask": padded([torch.ones_like(row) for row in ROWS], 9, firsts),
            "responses": padded(ROWS, 9, firsts)[:, left:],
            "old": padded(OWN, 9, firsts)[:, left:],
            "advantages": padded(OWN, 9, firsts)[:, left:],
        },
        non_tensor_batch={"score": np.array([1.0, 2, 3, 4], dtype=object), "uid": np.array(list("abcd"), dtype=object)},
        meta_info={"temperature": 0.7},
    )


def verl_between() -> dict[str, Any]:
    """What verl's trainer hands to its engines: jagged `input_ids`, the other fields padded as before."""
    trainer = verl_trainer()
    return {**trainer.batch, "input_ids": jagged(ROWS), "score": torch.tensor([1.0, 2.0, 3.0, 4.0])}


def roll() -> Any:
    """ROLL's DataProto: whole rows, padded on the right; log-probs without a first column."""
    return SimpleNamespace(
        batch={
            "input_ids": padded(ROWS, 8),
            "attention_mask": padded([torch.ones_like(row) for row in ROWS], 8),
            "response_mask": padded([torch.arange(len(row)) >= p for row, p in zip(ROWS, PROMPTS, strict=True)], 8),
            "old": padded(OWN, 8)[:, 1:],
        },
        non_tensor_batch={},
        meta_info={},
    )


def nemo_rl() -> dict[str, Any]:
    """NeMo-RL's BatchedDataDict: whole rows, padded on the right, by lengths."""
    return {
        "input_ids": padded(ROWS, 8),
        "input_lengths": torch.tensor([len(row) for row in ROWS], dtype=torch.int32),
        "old": padded(OWN, 8),
    }


def same(found: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(found, right, strict=True))


@pytest.mark.parametrize("make", [verl_engine, verl_trainer, verl_between])
def test_verl_responses_lie_behind_their_prompts(make: Any) -> None:
    batch = read_host_batch(make(), FORMS, [7, 8, 9, 3])
    assert batch.ids.tolist() == [7, 8, 9, 3] and batch.lengths.tolist() == [len(row) for row in ROWS]
    assert batch["input_ids"].dtype == torch.int64 and same(batch.to_lists("input_ids"), ROWS)
    for name in ("old", "advantages"):
        for found, own, prompt in zip(batch.to_lists(name), OWN, PROMPTS, strict=True):
            assert found[:prompt].eq(0).all() and torch.equal(found[prompt:], own[prompt:])
    assert batch.schema["old"].kind == "token" and batch["score"].tolist() == [1, 2, 3, 4]


def test_fields_of_roll_and_of_nemo_rl_lie_at_their_tokens() -> None:
    forms: dict[str, HostForm] = {"input_ids": "token", "response_mask": "token", "old": "next_token"}
    batch = read_host_batch(roll(), forms)
    assert same(batch.to_lists("input_ids"), ROWS) and batch["response_mask"].dtype == torch.bool
    assert [int(row.sum()) for row in batch.to_lists("response_mask")] == RESPONSES
    assert same([row[:-1] for row in batch.to_lists("old")], [own[1:] for own in OWN])
    batch = read_host_batch(nemo_rl(), {"input_ids": "token", "old": "token"})
    assert same(batch.to_lists("input_ids"), ROWS) and same(batch.to_lists("old"), OWN)


@pytest.mark.parametrize("make", [verl_engine, verl_trainer, verl_between, roll, nemo_rl])
def test_every_field_comes_back_where_it_was(make: Any) -> None:
    data = make()
    columns = getattr(data, "batch", data)
    forms: dict[str, HostForm] = {name: "token" for name in ("input_ids", "response_mask") if name in columns}
    forms["old"] = {roll: "next_token", nemo_rl: "token"}.get(make, "response")  # type: ignore[assignment]
    written = make_host_fields(read_host_batch(data, forms), data, forms)
    for name in forms:
        found, right = written[name], columns[name]
        assert found.is_nested == right.is_nested and found.dtype == right.dtype
        assert same(list(found.unbind()), list(right.unbind())), name


def test_log_probs_are_written_in_the_form_of_each_host() -> None:
    """Ours speak of the next token; verl's and NeMo-RL's of the token itself."""
    lengths = [len(row) for row in ROWS]
    columns = {"input_ids": ROWS, "log_probs": [own[1:] for own in OWN], "score": [1, 2, 3, 4]}
    kinds = {"input_ids": "token", "log_probs": "next_token", "score": "sample"}
    batch = SampleBatch.from_lists(columns, kinds)  # type: ignore[arg-type]
    without_first = [torch.cat([own.new_zeros(1), own[1:]]) for own in OWN]
    found = make_host_fields(batch, nemo_rl(), {"log_probs": "token", "score": "sample"})
    assert torch.equal(found["log_probs"], padded(without_first, 8)) and found["score"].tolist() == [1, 2, 3, 4]
    found = make_host_fields(batch, roll(), {"log_probs": "next_token"})
    assert torch.equal(found["log_probs"], padded(OWN, 8)[:, 1:])
    found = make_host_fields(batch, verl_trainer(), {"log_probs": "response"})
    assert torch.equal(found["log_probs"], verl_trainer().batch["old"])
    rows = make_host_fields(batch, verl_engine(), {"log_probs": "next_token"})["log_probs"].unbind()
    assert [len(row) for row in rows] == lengths and same([row[:-1] for row in rows], [own[1:] for own in OWN])
    back = make_host_fields(read_host_batch(nemo_rl(), {"old": "token"}), roll(), {"old": "next_token"})
    assert torch.equal(back["old"], padded(OWN, 8)[:, 1:])


def test_numbers_and_settings_beside_the_tensors() -> None:
    batch = read_host_batch(verl_trainer(), {"input_ids": "token", "temperature": "static", "score": "sample"})
    assert batch["temperature"] == 0.7 and batch["score"].shape == (4,)
    with pytest.raises(DataError, match="'uid' does not hold numbers"):
        read_host_batch(verl_trainer(), {"input_ids": "token", "uid": "sample"})


def test_a_real_tensordict() -> None:
    tensordict = pytest.importorskip("tensordict")
    data = tensordict.TensorDict(verl_engine(), batch_size=[4])
    data["temperature"], data["uid"] = tensordict.NonTensorData(0.7), tensordict.NonTensorStack(5, 6, 7, 8)
    forms: dict[str, HostForm] = {**FORMS, "temperature": "static", "uid": "sample"}
    batch = read_host_batch(data, forms)
    assert same(batch.to_lists("input_ids"), ROWS) and batch["uid"].tolist() == [5, 6, 7, 8]
    assert batch["temperature"] == 0.7
    data.update(make_host_fields(batch, data, {"old": "response"}))
    assert same(list(data["old"].unbind()), tails(OWN))
    proto = SimpleNamespace(batch=tensordict.TensorDict(verl_trainer().batch, 4), non_tensor_batch={}, meta_info={})
    assert same(read_host_batch(proto, {"input_ids": "token"}).to_lists("input_ids"), ROWS)


def with_(make: Any, **changed: Any) -> Any:
    """A host's batch with other fields."""
    data = make()
    getattr(data, "batch", data).update(changed)
    return data


HOLES = padded([torch.ones_like(row) for row in ROWS], 8)
HOLES[2, 1] = 0
BAD: list[tuple[Any, dict[str, HostForm], str]] = [
    (with_(roll, attention_mask=HOLES), {}, r"row 2 \(id 2\): the attention mask has holes"),
    (with_(roll, attention_mask=HOLES[:, 1:]), {}, r"'attention_mask' has shape \(4, 7\): give it \(4, 8\)"),
    (with_(roll, attention_mask=torch.full((4, 8), torch.nan)), {}, "holds nan: pass only 0 and 1"),
    (with_(roll, input_ids=torch.zeros(0, 8)), {}, "'input_ids' has no rows"),
    (with_(roll, input_ids=torch.zeros(4, 8, 2)), {}, r"'input_ids' must be jagged or \[B, S\]; got .*\(4, 8, 2\)"),
    (with_(roll, input_ids=[[1, 2]]), {}, "'input_ids' is a list: pass a tensor"),
    (with_(nemo_rl, input_lengths=torch.tensor([5, 9, 5, 5])), {}, "'input_lengths' of row 1 is 9: lengths are 1 to 8"),
    (with_(nemo_rl, input_lengths=torch.tensor([5, 0, 5, 5])), {}, "'input_lengths' of row 1 is 0"),
    (with_(nemo_rl, input_lengths=torch.full((4,), torch.nan)), {}, "'input_lengths' must be integers"),
    (
        with_(nemo_rl, input_lengths=torch.tensor([5, 5])),
        {},
        "has 2 values: give one for each of the 4 rows",
    ),
    (with_(verl_between, attention_mask=torch.ones(4, 9)), {}, "'input_ids' and 'attention_mask' have different"),
    (roll(), {"advantages": "token"}, "has no 'advantages'; it has attention_mask, input_ids, old, response_mask"),
    (roll(), {"old": "token"}, r"'old' has the shape \(4, 7\); as 'token' it must be \[4, 8, ...\]"),
    (roll(), {"old": "response"}, "has no 'responses'"),
    (with_(roll, old=torch.zeros(4, 6)), {"old": "next_token"}, r"it must be \[4, 8, ...\] or \[4, 7, ...\]"),
    (with_(roll, old=torch.zeros(3)), {"old": "sample"}, "'old' has 3 samples: give one value for each of 4"),
    (with_(roll, old=torch.tensor(0.5)), {"old": "sample"}, "'old' is one value"),
    (with_(roll, old=torch.zeros(3, 8)), {"old": "token"}, r"'old' has the shape \(3, 8\)"),
    (with_(verl_engine, old=jagged(OWN)), {"old": "response"}, "'old', row 0: 5 values for a response of 2 tokens"),
    (with_(verl_engine, old=jagged(tails(OWN))), {"old": "token"}, "'old', row 0: 2 values for a sample of 5 tokens"),
    (
        with_(roll, responses=padded(tails(ROWS), 5)),  # ROLL shifts rows, so columns of responses have no place
        {"responses": "response"},
        "'responses' of row 1 are not the last tokens of 'input_ids'",
    ),
]


@pytest.mark.bad_input
@pytest.mark.parametrize("case", range(len(BAD)))
def test_a_batch_that_cannot_be_read_names_the_field(case: int, report: Any) -> None:
    data, forms, text = BAD[case]
    with pytest.raises(DataError, match=text) as caught:
        read_host_batch(data, {"input_ids": "token", **forms})
    report(str(caught.value))


@pytest.mark.bad_input
def test_fields_that_cannot_be_written() -> None:
    batch = read_host_batch(nemo_rl(), {"input_ids": "token", "old": "token"})
    with pytest.raises(DataError, match=r"the lengths \[6, 5, 5, 5\] and the host's batch \[5, 6, 5, 5\]"):
        make_host_fields(batch.select([1, 0, 2, 3]), nemo_rl(), {"old": "token"})
    with pytest.raises(DataError, match="'old' of the samples is a token field, which cannot be written as 'sample'"):
        make_host_fields(batch, nemo_rl(), {"old": "sample"})
    with pytest.raises(DataError, match="No field 'new'"):
        make_host_fields(batch, nemo_rl(), {"new": "token"})
    with pytest.raises(DataError, match='padded on the left, but padding_side="right"'):
        read_host_batch(verl_trainer(), {"input_ids": "token"}, padding_side="right")
