"""Whoever reads parameters sees them whole, also while the distributed optimizer's gather is still to come."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.support.ranks import run_ranks

OVERLAPPED = {"use_distributed_optimizer": True, "overlap_grad_reduce": True, "overlap_param_gather": True}


def _parameters(chunks: list[Any]) -> dict[str, torch.Tensor]:
    from roll_batching.modeling.head import gpt_of

    found = {}
    for i, chunk in enumerate(chunks):
        found |= {f"{i}.{name}": p.detach().clone() for name, p in gpt_of(chunk).named_parameters()}
    return found


def _trained(megatron: dict[str, Any], dtype: str) -> tuple[Any, Any, Any]:
    """A strategy one step behind its first weights, its samples and their plan."""
    from roll_batching.losses import SFTLoss
    from roll_batching.samples import distribute, gather_lengths
    from tests.strategy.test_steps import _mine, _strategy
    from tests.support.models import random_batch

    strategy = _strategy(cap=32, dtype=dtype, megatron=megatron)
    strategy.optimizer.reload_model_params()  # the weights that the test filled in
    local = _mine(strategy, random_batch(3, 6, 20))
    plan = strategy.plan(gather_lengths(local))
    local = distribute(local, plan)
    strategy.train_step(local, plan, SFTLoss())
    return strategy, local, plan


def _fresh_reference(megatron: dict[str, Any], dtype: str, cls: Any) -> Any:
    from tests.support.models import worker_config

    strategy = cls(worker_config("packed", 32, dtype=dtype, megatron=megatron), seed=5)
    strategy.initialize()
    return strategy


def readers(options: dict[str, Any]) -> dict[str, list[str]]:
    """What each reader of parameters saw that differs from the same step without overlap."""
    from roll_batching.losses import SFTLoss
    from roll_batching.samples import SampleBatch
    from roll_batching.strategy import GenerationSettings, MegatronInferStrategy, MegatronTrainStrategy

    layout, dtype = options["layout"], options["dtype"]
    plain = layout | {"use_distributed_optimizer": True}
    strategy, local, plan = _trained(plain, dtype)
    expected = _parameters(strategy.chunks)
    log_probs = strategy.compute_log_probs(local, plan)["log_probs"]
    loss = strategy.train_step(local, plan, SFTLoss()).loss
    last = _parameters(strategy.chunks)

    def differing(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor] = expected) -> list[str]:
        return [name for name in wanted if not torch.equal(found[name], wanted[name])]

    seen: dict[str, list[str]] = {}
    overlapped = layout | OVERLAPPED
    strategy, local, plan = _trained(overlapped, dtype)
    seen["plain read"] = differing(_parameters(strategy.chunks))  # shows that there is something to gather
    reference = _fresh_reference(layout, dtype, MegatronInferStrategy)
    reference.copy_weights_from(strategy)
    seen["copy"] = differing(_parameters(reference.chunks))
    seen["read after gathering"] = differing(_parameters(strategy.chunks))

    strategy, local, plan = _trained(overlapped, dtype)
    found = strategy.compute_log_probs(local, plan)["log_probs"]
    seen["forward"] = [] if torch.equal(found, log_probs) else ["log_probs"]
    if dtype == "fp32":
        strategy, local, plan = _trained(overlapped, dtype)
        strategy.state = replace(strategy.state, training=None)  # the state of the distributed optimizer is not saved
        path = options["path"]
        strategy.save(path)
        loaded = _fresh_reference(layout, dtype, MegatronInferStrategy)
        loaded.load(path)
        seen["checkpoint"] = differing(_parameters(loaded.chunks))

    strategy, local, plan = _trained(overlapped, dtype)
    prompts = SampleBatch.from_lists({"input_ids": [torch.tensor([3, 4, 5])]}, {"input_ids": "token"})
    if strategy.layout.dp_rank:
        prompts = prompts.select([])
    strategy.generate(prompts, GenerationSettings(max_new_tokens=2, eos_token_id=0))
    seen["generation"] = differing(_parameters(strategy.chunks))
    seen["loss of the step behind it"] = [] if strategy.train_step(local, plan, SFTLoss()).loss == loss else ["loss"]
    strategy.gather_parameters()
    seen["the step behind it"] = differing(_parameters(strategy.chunks), last)

    # Into a strategy that trains: its optimizer goes on from the copied weights.
    target = _fresh_reference(overlapped, dtype, MegatronTrainStrategy)
    target.copy_weights_from(reference)
    for group in target.optimizer.param_groups:
        group["lr"] = 0.0
    target.train_step(local, plan, SFTLoss())
    target.gather_parameters()
    seen["copy into one that trains"] = differing(_parameters(target.chunks))
    return seen


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_every_reader_sees_gathered_parameters(dtype: str, tmp_path: Any) -> None:
    options = {"layout": {}, "dtype": dtype, "path": str(tmp_path / "saved")}
    everyone = run_ranks(2, "tests.strategy.test_weights:readers", options)
    assert all(seen.pop("plain read") for seen in everyone)  # on every rank some are a step old
    for seen in everyone:
        assert {name: differing for name, differing in seen.items() if differing} == {}


def other_models(_: None) -> str:
    from roll_batching.errors import LayoutError
    from tests.strategy.test_steps import _strategy
    from tests.support.models import ARCHITECTURE

    small, large = _strategy(), _strategy(architecture={**ARCHITECTURE, "ffn_hidden_size": 64})
    try:
        small.copy_weights_from(large)
    except LayoutError as error:
        return str(error)
    return "nothing"


def test_weights_of_another_model_are_refused() -> None:
    assert "same architecture" in run_ranks(1, "tests.strategy.test_weights:other_models")[0]
