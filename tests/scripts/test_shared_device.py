"""Several ranks on one device: groups through the host with NCCL's rules of time, and layouts over them, on the CPU."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from benchmarks.gpu import shared_device
from tests.support.ranks import run_ranks

HERE = "tests.scripts.test_shared_device:"


def collectives(folder: str) -> dict[str, Any]:
    """Results of each kind of collective among two ranks, and of outputs before they were awaited."""
    from torch.distributed.distributed_c10d import _coalescing_manager

    from benchmarks.gpu import host_groups

    host_groups.register()
    rank = int(os.environ["RANK"])
    dist.init_process_group(host_groups.BACKEND, init_method=f"file://{folder}/met", rank=rank, world_size=2)
    found: dict[str, Any] = {}
    group = dist.new_group([0, 1])

    def kept(name: str, *tensors: torch.Tensor) -> None:
        found[name] = [x.tolist() for x in tensors]

    x = torch.full((2,), rank + 1.0)
    dist.all_reduce(x, group=group)
    kept("all_reduce", x)
    x = torch.full((2,), float(rank))
    dist.broadcast(x, 1)
    kept("broadcast", x)
    x = torch.empty(2)
    dist.all_gather_into_tensor(x, torch.full((1,), float(rank)))
    kept("all_gather", x)
    x = torch.empty(1)
    dist.reduce_scatter_tensor(x, torch.tensor([1.0, 10.0]) * (rank + 1))
    kept("reduce_scatter", x)
    x = torch.empty(2)
    dist.all_to_all_single(x, torch.tensor([rank * 10.0, rank * 10.0 + 1]))
    kept("all_to_all", x)
    x = torch.empty(1)
    mine = torch.full((1,), float(rank))
    for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, mine, 1 - rank), dist.P2POp(dist.irecv, x, 1 - rank)]):
        work.wait()
    kept("send and receive", x)
    x, y = torch.ones(1), torch.full((2,), rank + 1.0)
    with _coalescing_manager(group, async_ops=True) as manager:
        dist.all_reduce(x, group=group)
        dist.all_reduce(y, group=group)
    manager.wait()
    kept("coalesced", x, y)
    everyone: list[Any] = [None, None]
    dist.all_gather_object(everyone, rank)
    found["objects"] = everyone
    x = torch.ones(2)
    work = dist.all_reduce(x, async_op=True)
    end = time.monotonic() + 30
    while not work.is_completed() and time.monotonic() < end:
        time.sleep(0.01)
    kept("before it is awaited", x)
    work.wait()
    kept("awaited", x)
    dist.barrier()
    dist.destroy_process_group()
    return found


def test_collectives_through_the_host_have_results_when_they_are_awaited(tmp_path: Path) -> None:
    for rank, found in enumerate(run_ranks(2, HERE + "collectives", str(tmp_path))):
        early = found.pop("before it is awaited")[0]
        assert all(value != value for value in early), "an output is NaN until wait"
        assert found == {
            "all_reduce": [[3.0, 3.0]],
            "broadcast": [[1.0, 1.0]],
            "all_gather": [[0.0, 1.0]],
            "reduce_scatter": [[3.0]] if rank == 0 else [[30.0]],
            "all_to_all": [[rank + 0.0, rank + 10.0]],
            "send and receive": [[1.0 - rank]],
            "coalesced": [[2.0], [3.0, 3.0]],
            "objects": [0, 1],
            "awaited": [[2.0, 2.0]],
        }


def test_a_layout_is_recorded_beside_one_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    fine = next(case for case in shared_device.CASES if case.megatron and not case.offload)
    broken = replace(fine, megatron={"attention_backend": "nothing"})
    monkeypatch.setattr(shared_device, "CASES", (broken, fine))
    failed, good = shared_device.run(torch.device("cpu"), True)
    assert failed["limits"] == {"failed": [1.0, 0.0]} and "'nothing' is unknown" in failed["notes"]
    assert good["case"] == "2 processes: dp2 distopt fp32, overlap_grad_reduce, overlap_param_gather"
    assert set(good["limits"]) == {"loss", "gradient", "losses of 3 steps"} and "notes" not in good
    assert all(value < 1e-5 for value, _ in good["limits"].values())


@pytest.mark.slow
def test_second_layouts_and_experts_equal_one_process(monkeypatch: pytest.MonkeyPatch, report: Any) -> None:
    """The layouts with the most kinds of exchanges; the slow test of all checks runs every one."""
    some = tuple(case for case in shared_device.CASES if case.other or (case.layout.moe and case.layout.tp > 1))
    monkeypatch.setattr(shared_device, "CASES", some)
    for found in shared_device.run(torch.device("cpu"), True):
        report(f"{found['case']}: {found['limits']}")
        assert all(value < 1e-5 for value, _ in found["limits"].values()), found


def test_the_layouts_are_those_that_the_page_names() -> None:
    sizes = {name for case in shared_device.CASES for name in ("tp", "pp", "vpp", "cp", "dp", "ep")
             if getattr(case.layout, name) > 1}  # fmt: skip
    assert sizes == {"tp", "pp", "vpp", "cp", "dp", "ep"}
    assert {case.layout.ranks for case in shared_device.CASES} == {2, 4}
    assert len({case.name for case in shared_device.CASES}) == len(shared_device.CASES)
