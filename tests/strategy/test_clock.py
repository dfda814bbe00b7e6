"""Where a step's time goes: phases inside phases, and on a device the same without waiting for it."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch


def test_a_phase_inside_another_belongs_to_itself_alone() -> None:
    from roll_batching.strategy.step_clock import PHASES, StepClock

    clock, begin = StepClock(torch.device("cpu")), time.perf_counter()
    with clock.phase("forward_backward"):
        time.sleep(0.02)
        clock.timed("loss", time.sleep)(0.03)
        with clock.phase("wait"):
            time.sleep(0.01)
    with pytest.raises(ValueError, match="no more"), clock.phase("optimizer"):
        raise ValueError("no more")
    whole, found = time.perf_counter() - begin, clock.read()
    assert tuple(found) == PHASES
    # A sleep may last longer than was asked for; none of it is counted twice.
    assert found["loss"] >= 0.03 and found["wait"] >= 0.01 and found["forward_backward"] >= 0.02
    assert found["optimizer"] > 0 and found["plan"] == 0 and sum(found.values()) <= whole
    assert set(clock.read().values()) == {0.0}


def test_on_a_device_events_are_recorded_and_nothing_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    from roll_batching.strategy.step_clock import StepClock

    said: list[str] = []
    clock_of_device = iter(range(100))

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            self.at = next(clock_of_device)

        def elapsed_time(self, end: Any) -> float:
            return 1000.0 * (end.at - self.at)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", said.append)
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: said.append("end"))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: pytest.fail("a sync"))
    clock = StepClock(torch.device("cuda", 0))
    with clock.phase("pack", on_host=True):
        pass
    with clock.phase("forward_backward"), clock.phase("loss"):
        pass
    assert said == ["pack", "end", "forward_backward", "loss", "end", "end"]
    found = clock.read()
    assert (found["forward_backward"], found["loss"]) == (2.0, 1.0) and 0 < found["pack"] < 1


@pytest.mark.parametrize(
    ("name", "dtype", "rate"),
    [
        ("NVIDIA H100 80GB HBM3", torch.bfloat16, 989e12),
        ("NVIDIA H100 PCIe", torch.float16, 756e12),
        ("NVIDIA A100-SXM4-80GB", torch.bfloat16, 312e12),
        ("NVIDIA H100 80GB HBM3", torch.float32, None),
        ("NVIDIA GeForce", torch.bfloat16, None),
    ],
)
def test_rates_of_devices(monkeypatch: pytest.MonkeyPatch, name: str, dtype: torch.dtype, rate: float | None) -> None:
    from roll_batching.modeling.cost import device_rate

    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: name)
    assert device_rate(torch.device("cuda"), dtype) == rate
    assert device_rate(torch.device("cpu"), dtype) is None
