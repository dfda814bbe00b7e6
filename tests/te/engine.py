"""TransformerEngine without a GPU: it imports and builds; its kernels do not run.

Its modules ask whether there is CUDA and of which kind; here they are told of an H100. What is built lies on the CPU.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import types
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest


def engine_is_installed() -> bool:
    """Whether the part of TransformerEngine that binds to torch is there."""
    try:
        return bool(importlib.metadata.version("transformer-engine-torch"))
    except importlib.metadata.PackageNotFoundError:
        return False


needs_engine = pytest.mark.skipif(
    not engine_is_installed(),
    reason="TransformerEngine is not installed: scripts/te_environment.sh makes an environment that has it",
)


@contextlib.contextmanager
def as_if_on_an_h100() -> Iterator[None]:
    """Inside, TransformerEngine's modules are made, and what refuses them on the CPU is silent."""
    import torch

    from roll_batching.distributed import parallel_layout
    from roll_batching.modeling import build_problems
    from roll_batching.modeling.requirements import ModelDemands
    from roll_batching.strategy import infer

    properties = types.SimpleNamespace(major=9, minor=0, multi_processor_count=132, total_memory=80 << 30, name="H100")
    with contextlib.ExitStack() as stack:
        for owner, name, answer in (
            *((module, "start_processes", torch.device("cpu")) for module in (infer, parallel_layout)),  # they have
            (torch.cuda, "is_available", True),
            (torch.cuda, "get_device_capability", (9, 0)),
            (torch.cuda, "get_device_properties", properties),
            (ModelDemands, "refusals_here", []),
            (build_problems, "_device_problems", []),
        ):
            stack.enter_context(mock.patch.object(owner, name, lambda *args, answer=answer, **kwargs: answer))
        yield


def role(directory: str, megatron: dict[str, Any], cap: int = 64, dtype: str = "bf16", **settings: Any) -> Any:
    """A training role for the model in `directory`."""
    from tests.support.models import worker_config

    config = worker_config("packed", cap, megatron=megatron, **settings)
    dumped = config.model_dump(exclude={"model_args"}, exclude_unset=True)
    model = {"model_name_or_path": directory, "dtype": dtype}
    return type(config).model_validate(dumped | {"model_args": model})


def strategy_of(directory: str, megatron: dict[str, Any], **settings: Any) -> Any:
    """A training strategy with TransformerEngine's layers, or with local ones, and the weights of `directory`."""
    from roll_batching.distributed.parallel_layout import start_processes
    from roll_batching.strategy import MegatronTrainStrategy

    start_processes()  # the CPU: before anybody is told otherwise
    strategy = MegatronTrainStrategy(role(directory, megatron, **settings))
    with as_if_on_an_h100():
        strategy.initialize()
    return strategy
