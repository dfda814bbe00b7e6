"""Runs Megatron-LM's `pretrain_gpt.py` on the CPU: `python -m tests.hosts.megatron_lm_trainer CHECKOUT WAY OPTIONS...`.

WAY is `plain` (Megatron's own schedule of packs), `planned` (ours), `shared` (ours, and the model shares prefixes), or
`parts` (Megatron-LM builds model and optimizer, and our strategy trains them).
Models have TransformerEngine's layers, whose innermost kernels are torch's.
"""

from __future__ import annotations

import runpy
import sys
from types import SimpleNamespace
from typing import Any

import torch
from torch.utils.data._utils import pin_memory as pinning

CUDA_ANSWERS = {
    "is_available": True,
    "device_count": 2,
    "get_device_capability": (9, 0),
    "get_device_properties": SimpleNamespace(major=9, minor=0, total_memory=80 << 30, name="none"),
    "memory_stats": {},
    **dict.fromkeys(("memory_allocated", "memory_reserved", "max_memory_allocated", "max_memory_reserved"), 0),
    **dict.fromkeys(("set_device", "empty_cache", "set_stream"), None),
}
"""What Megatron's training asks of `torch.cuda`, beside what the models do."""


def main(checkout: str, way: str, *arguments: str) -> None:
    from roll_batching.megatron_patches import cpu_platform

    cpu_platform.install()
    for name, answer in CUDA_ANSWERS.items():
        setattr(torch.cuda, name, lambda *args, answer=answer, **kwargs: answer)
    torch.Tensor.pin_memory = lambda self, *args: self  # type: ignore[method-assign, assignment]
    torch.optim.Optimizer._accelerator_graph_capture_health_check = lambda self: None  # type: ignore[attr-defined]
    pinning.pin_memory = lambda data, *args: data  # type: ignore[assignment]
    sys.path.insert(0, checkout)
    sys.argv = ["pretrain_gpt.py", *arguments]
    if way == "parts":
        return train_parts()
    import gpt_builders

    from roll_batching.integrations.prefixes import share_prefixes_behind
    from tests.te.engine import as_if_on_an_h100
    from tests.te.plain_kernels import plain_kernels

    build = gpt_builders.gpt_builder

    def shared(*args: Any, **kwargs: Any) -> Any:
        model = build(*args, **kwargs)
        if way == "shared":
            share_prefixes_behind(model)
        return model

    gpt_builders.gpt_builder = shared
    if way != "plain":
        import roll_batching.integrations.megatron_lm  # noqa: F401
    with as_if_on_an_h100(), plain_kernels():
        runpy.run_path(f"{checkout}/pretrain_gpt.py", run_name="__main__")


def train_parts() -> None:
    """Builds model and optimizer as docs/own-loop.md does inside Megatron-LM, and prints the losses of four steps."""
    from functools import partial

    from gpt_builders import gpt_builder
    from megatron.core.distributed import finalize_model_grads
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.training.arguments import parse_and_validate_args
    from megatron.training.initialize import initialize_megatron
    from megatron.training.training import get_model
    from model_provider import model_provider

    import roll_batching as rb
    from tests.te.engine import as_if_on_an_h100
    from tests.te.plain_kernels import plain_kernels

    with as_if_on_an_h100(), plain_kernels():
        args = parse_and_validate_args()
        initialize_megatron()
        chunks = get_model(partial(model_provider, gpt_builder))
        chunks[0].config.finalize_model_grads_func = finalize_model_grads
        optimizer = get_megatron_optimizer(OptimizerConfig(lr=1e-2, params_dtype=torch.float32), chunks)
        packed = rb.BatchingSpec(mode="packed", max_tokens=64)
        batching = rb.BatchingConfig(train=packed, infer=packed)
        strategy = rb.MegatronTrainStrategy.from_parts(chunks, optimizer, batching, vocab_size=args.vocab_size)
        rank = strategy.layout.dp_rank
        rows = [torch.arange(n) % 11 for n in (30, 9 + rank, 21, 5)]
        fields = {"input_ids": rows, "response_mask": [torch.ones_like(row) for row in rows]}
        batch = rb.SampleBatch.from_lists(fields, dict.fromkeys(fields, "token"), ids=torch.arange(4) + 4 * rank)
        plan = strategy.plan(strategy.gather_table(batch))
        local = rb.distribute(batch, plan)
        losses = [strategy.train_step(local, plan, rb.SFTLoss()).loss for _ in range(4)]
        sys.stdout.write(f"\nlosses of a rank: {' '.join(map(str, losses))}\n")  # in one write: ranks share the pipe
        sys.stdout.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
