"""States that go to the host and come back: memory is free meanwhile, and no bit changes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.strategy.test_checkpoint import bits, steps, strategy_of
from tests.strategy.test_sharded_checkpoint import case_of
from tests.support.layouts import Layout
from tests.support.ranks import run_ranks

HERE = "tests.strategy.test_offload:"


def memory(strategy: Any) -> int:
    """Bytes of the storages that hold weights, gradients and the optimizer's state."""
    from roll_batching.strategy.offload import KINDS, _storages, _tensors

    found = {s.data_ptr(): s.nbytes() for k in KINDS for s in _storages(_tensors(strategy.state, k), strategy.device)}
    return sum(found.values())


def train_with_pauses(case: dict[str, Any]) -> Any:
    """Steps with states away in between; what was refused meanwhile, and how many bytes moved."""
    from roll_batching.errors import LayoutError

    strategy = strategy_of({"fill": True, **case})
    done = steps(strategy, 0, 2)
    if not case["pauses"]:
        return done + steps(strategy, 2, 4), bits(strategy)
    before, held = bits(strategy), memory(strategy)
    some = strategy.offload_states("gradients", "optimizer")
    refused = []
    try:
        steps(strategy, 2, 3)
    except LayoutError as error:
        refused.append(str(error))
    rest = strategy.offload_states()
    again = strategy.offload_states()
    try:
        strategy.save("nowhere")
    except LayoutError as error:
        refused.append(str(error))
    left = memory(strategy)
    with strategy.loaded("parameters"):
        weights = {name: p.detach().clone() for c in strategy.chunks for name, p in c.named_parameters()}
    assert all(p.untyped_storage().nbytes() == 0 for c in strategy.chunks for p in c.parameters())
    back = strategy.load_states()
    after = bits(strategy)
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    count = sum(p.numel() for c in strategy.chunks for p in c.parameters())
    figures = {
        "count": count,
        "held": held,
        "moved": (some + rest).bytes,
        "again": again.bytes,
        "left": left,
        "back": back.bytes,
    }
    return done + steps(strategy, 2, 4), bits(strategy), figures, refused, weights


@pytest.mark.parametrize(
    ("kind", "layout", "megatron"),
    [
        ("bf16", Layout(dp=2, distopt=True), {"overlap_grad_reduce": True, "overlap_param_gather": True}),
        pytest.param("dense", Layout(), {}, marks=pytest.mark.slow),
        pytest.param("bf16", Layout(), {}, marks=pytest.mark.slow),
        pytest.param("tied", Layout(pp=2, vpp=2), {}, marks=pytest.mark.slow),
        pytest.param("dense", Layout(tp=2, dp=2, distopt=True), {}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_steps_go_on_to_the_bit(kind, layout, megatron, report):
    case = case_of(kind, layout, **megatron)
    expected = run_ranks(layout.ranks, HERE + "train_with_pauses", case | {"pauses": False})
    found = run_ranks(layout.ranks, HERE + "train_with_pauses", case | {"pauses": True})
    for (losses, tensors), (again, theirs, figures, refused, weights) in zip(expected, found, strict=True):
        assert losses == again
        assert tensors.keys() == theirs.keys() and all(torch.equal(tensors[name], theirs[name]) for name in tensors)
        assert figures["held"] == figures["moved"] == figures["back"] > 0, "all of it moved, once"
        width = (2 + 4 + 12 / layout.dp) if kind == "bf16" else (4 + 4 + 8 / (layout.dp if layout.distopt else 1))
        assert figures["held"] == pytest.approx(width * figures["count"], rel=0.1), "weights, gradients, moments"
        assert figures["left"] == figures["again"] == 0
        assert "train_step needs the model's gradients and optimizer, which are offloaded to the host" in refused[0]
        assert "save needs the model's parameters and gradients and optimizer" in refused[1]
        assert all(weight.isfinite().all() for weight in weights.values())
    report(f"{kind}, {layout}: {found[0][2]['moved']:,} bytes of rank 0 went to the host and back, steps to the bit")


def without_room(_: None) -> tuple[list[str], bool]:
    """What is said where the device has no room for what comes back, or a source of weights is away; to the bit."""
    from roll_batching.errors import DeviceMemoryError, LayoutError
    from roll_batching.strategy import offload

    strategy = strategy_of({"layout": Layout().megatron(), "fill": True})
    steps(strategy, 0, 1)
    before, said = bits(strategy), []
    strategy.offload_states()
    flat, room = offload._flat, 3

    def filling(storage: Any) -> torch.Tensor:
        nonlocal room
        room -= 1
        if not room:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return flat(storage)

    offload._flat = filling
    try:
        strategy.load_states()
    except DeviceMemoryError as error:
        said.append(str(error))
    offload._flat = flat
    reference = strategy_of({"layout": Layout().megatron()}, train=False)
    for act in (
        lambda: strategy.compute_log_probs(None, None),  # type: ignore[arg-type]
        lambda: reference.copy_weights_from(strategy),
    ):
        try:
            act()
        except LayoutError as error:
            said.append(str(error))
    strategy.load_states()
    after = bits(strategy)
    return said, all(torch.equal(before[name], after[name]) for name in before)


def test_what_found_no_room_is_away_as_a_whole() -> None:
    ((said, same),) = run_ranks(1, HERE + "without_room")
    assert "ran out of device memory while the model's parameters came back from the host" in said[0]
    assert said[1].startswith("forward needs the model's parameters, which are offloaded to the host")
    assert said[2].startswith("the strategy that copy_weights_from reads needs the model's parameters")
    assert same
