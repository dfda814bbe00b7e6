"""What Megatron asks of CUDA, on a machine without it."""

from __future__ import annotations

from typing import Any

import torch

from tests.support.ranks import run_ranks


def devices_and_types(_: None) -> list[Any]:
    """Where tensors lie that are asked for on CUDA, and what one says of its type, and after conversions."""
    from roll_batching.megatron_patches import cpu_platform

    cpu_platform.install()
    cpu_platform.install()  # does nothing
    x = torch.ones(2)
    made = [
        torch.zeros(1, device="cuda"),
        torch.tensor([1], device=torch.device("cuda", 0)),
        torch.empty_like(x, device="cuda"),
        torch.arange(3, device=torch.cuda.current_device()),
        x.new_zeros(1, device="cuda"),
        x.to(device="cuda", dtype=torch.float64),
        x.cuda(non_blocking=True),
        torch.nn.Linear(1, 1).cuda().weight,
        x.type(torch.int64),
        x.type("torch.LongTensor"),
    ]
    return [[(tensor.device.type, tensor.dtype) for tensor in made], x.type(), torch.nn.Parameter(x).type()]


def test_calls_for_cuda_use_the_cpu() -> None:
    ((made, *types),) = run_ranks(1, "tests.distributed.test_cpu_platform:devices_and_types")
    assert {device for device, _ in made} == {"cpu"}
    assert [dtype for _, dtype in made][-5:] == [torch.float64, torch.float32, torch.float32, torch.int64, torch.int64]
    assert types == ["torch.cuda.FloatTensor"] * 2  # as Megatron's clip_grads asserts
