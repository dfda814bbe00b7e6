"""Prefetched packs: equal tensors from one buffer, one item ahead, errors raised where an item is requested."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from roll_batching.packing import StepPacks, pack_step
from roll_batching.packing.prefetch import flatten_tensors, prefetch
from roll_batching.planning import PlanConstraints, plan_step
from tests.support.models import random_batch

CPU = torch.device("cpu")


def _tensors(value: Any, path: str = "") -> dict[str, torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return {path: value}
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, list | tuple):
        items = enumerate(value)
    elif dataclasses.is_dataclass(value):
        items = [(field.name, getattr(value, field.name)) for field in dataclasses.fields(value)]
    else:
        return {}
    return {name: x for key, item in items for name, x in _tensors(item, f"{path}.{key}").items()}


def _moved(thing: Any) -> tuple[Any, Callable[[], None]]:
    buffer, rebuild = flatten_tensors(thing, pin=False)
    return rebuild(buffer.clone()), lambda: None


@pytest.mark.parametrize("cp", [1, 2])
@pytest.mark.parametrize("attention", ["dense", "varlen"])
def test_a_pack_out_of_one_buffer_is_the_same(cp: int, attention: str) -> None:
    batch = random_batch(1, 9, 40)
    plan = plan_step(
        batch.lengths.numpy(), PlanConstraints(dp_size=1, max_tokens=96, cp_size=cp), ids=batch.ids.numpy()
    )
    where: dict[str, Any] = {
        "dp_rank": 0, "cp_rank": cp - 1, "device": CPU, "masks": ("response_mask",), "attention": attention
    }  # fmt: skip
    packs = pack_step(batch, plan, **where)
    for pack, again in zip(packs, prefetch(StepPacks(batch, plan, **where)._take, len(packs), _moved), strict=True):
        expected, found = _tensors(pack), _tensors(again)
        assert expected.keys() == found.keys() and len(found) > 15
        for name, tensor in expected.items():
            assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name
        assert again.params.cu_seqlens_q is again.params.cu_seqlens_kv
        assert len({tensor.untyped_storage().data_ptr() for tensor in found.values()}) == 1


def test_stages_make_what_they_read() -> None:
    batch = random_batch(1, 9, 40)
    plan = plan_step(batch.lengths.numpy(), PlanConstraints(dp_size=1, max_tokens=96), ids=batch.ids.numpy())
    where: dict[str, Any] = {"dp_rank": 0, "device": CPU, "masks": ("response_mask",)}
    whole = pack_step(batch, plan, **where)
    for first, last in ((True, False), (False, False), (False, True)):
        for pack, every in zip(
            pack_step(batch, plan, **where, is_first_stage=first, is_last_stage=last), whole, strict=True
        ):
            assert pack.input_ids.shape == every.input_ids.shape
            assert torch.equal(pack.padding_mask, every.padding_mask)
            assert torch.equal(pack.params.positions, every.params.positions)
            if first or last:
                assert torch.equal(pack.input_ids, every.input_ids)
            assert (set(pack.fields) == set(every.fields)) == last
            assert len(pack.labels) == (len(every.labels) if last else 0)


def test_one_thing_ahead() -> None:
    made: list[int] = []
    asked = threading.Event()

    def make(number: int) -> int:
        assert number < 2 or asked.wait(60), "two ahead"
        made.append(number)
        return number

    things = prefetch(make, 4, lambda thing: (thing, lambda: None))
    assert next(things) == 0
    while len(made) < 2:
        pass
    assert made == [0, 1]
    asked.set()
    assert list(things) == [1, 2, 3]


def test_what_fails_ahead_is_raised_where_it_is_used() -> None:
    def make(number: int) -> int:
        if number == 2:
            raise ValueError("of pack 2")
        return number

    things = prefetch(make, 4, lambda thing: (thing, lambda: None))
    assert [next(things), next(things)] == [0, 1]
    with pytest.raises(ValueError, match="of pack 2"):
        next(things)
    left = prefetch(make, 4, lambda thing: (thing, lambda: None))
    assert next(left) == 0
    left.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("prefetch")]


@pytest.mark.parametrize("moves", [False, True])
def test_what_is_waited_for_is_timed(moves: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Time to make packs between passes, or the remaining time of the thread when a pass needs its pack."""
    import roll_batching.packing.batch as module

    batch = random_batch(1, 9, 40)
    plan = plan_step(batch.lengths.numpy(), PlanConstraints(dp_size=1, max_tokens=48), ids=batch.ids.numpy())
    packs = StepPacks(batch, plan, dp_rank=0, device=CPU)
    monkeypatch.setattr(module, "copy_to_cuda", lambda pack, device: _moved(pack))
    if moves:
        packs._device = torch.device("cuda")
    timed: list[str] = []

    def timing(wait: Callable[..., Any]) -> Callable[..., Any]:
        def act(*given: Any) -> Any:
            timed.append("begins")
            pack = wait(*given)
            timed.append("ends")
            return pack

        return act

    packs.set_timer(timing)
    found = []
    for pack in packs:
        assert timed[-1] == "ends" and len(timed) == 2 * (len(found) + 1)
        found.append(pack)
    assert len(found) == len(packs) > 2
