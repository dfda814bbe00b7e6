"""Packed training steps in FP8 beside the same steps in bf16: time, memory, and how far the losses differ.

TransformerEngine's layers compute both, of Qwen3-1.7B's shape and of models with multi-latent attention and with gated
delta nets. Each recipe that the device can compute is a case of its own, after one in bf16; of the two others, another
case compares these layers with local ones in bf16. A dry run has neither FP8 nor TransformerEngine: it trains local
layers in fp32 with the alignment of each recipe.
"""

from __future__ import annotations

import gc
import importlib.metadata
import importlib.util
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from benchmarks.bench_step import UNTIED, WORKLOADS, Workload, batch_of, decoder, worker_config
from roll_batching.losses import SFTLoss
from roll_batching.samples import LengthTable
from roll_batching.settings.fp8 import TOKEN_MULTIPLES, device_problems
from roll_batching.strategy import MegatronTrainStrategy

GIB = 1 << 30
STEPS, DRY_STEPS, WARM_UP = 10, 4, 2
LOSS_LIMIT = 0.03
"""Largest relative difference of a step's loss from bf16's. An assumption: nothing was measured when it was set."""
ENGINE = {"transformer_impl": "transformer_engine"}


def _shapes(dry: bool) -> dict[str, Workload]:
    """Few layers of Moonlight's and Qwen3-Next's widths with fewer experts, by what they have in place of attention."""
    load = WORKLOADS["tiny" if dry else "qwen3-1.7b"]
    part = 8 if dry else 1
    hidden, head, layers, heads = 64 if dry else 2048, 128 // part, 2 if dry else 4, 4 if dry else 16
    moe = {"num_experts": 8, "router_topk": 2, "ffn_hidden_size": 1408 // part}
    latent = {"kv_lora_rank": 512 // part, "qk_head_dim": head, "qk_pos_emb_head_dim": head // 2, "v_head_dim": head}
    delta = {"num_key_heads": heads, "num_value_heads": 2 * heads, "key_head_dim": head, "value_head_dim": head}
    delta["layers"] = [1] * (layers - 1) + [0]
    vocabulary, own = load.architecture["vocab_size"], {"tie_word_embeddings": False}
    with_latents = decoder(hidden, layers, heads, heads, 8 * hidden, vocabulary, **own)
    with_delta_nets = decoder(hidden, layers, heads, heads // 2, 4 * hidden, vocabulary, **UNTIED)
    return {
        "multi-latent attention": replace(
            load, architecture={**with_latents, "multi_latent_attention": latent, "moe": moe}
        ),
        "gated delta nets": replace(load, architecture={**with_delta_nets, "gated_delta_net": delta, "moe": moe}),
    }


@dataclass(frozen=True, kw_only=True)
class Run:
    """Steps in one precision."""

    losses: list[float]
    seconds: float
    """Per step after the warm-up."""
    peak: float
    """Bytes."""
    tokens: int
    """Computed by the steps, alignment included."""


def train(load: Workload, device: torch.device, settings: dict[str, Any], multiple: int | None = None) -> Run:
    """Train `STEPS` steps of fresh weights; `multiple` replaces the alignment of the precision."""
    strategy = MegatronTrainStrategy(worker_config(replace(load, settings=settings), "packed"), seed=1)
    strategy.initialize()
    if multiple is not None:
        changed = replace(strategy.settings, pack_multiple=multiple)
        strategy.state = replace(strategy.state, settings=changed)
    on_cuda = device.type == "cuda"
    losses, seconds, tokens = [], [], 0
    if on_cuda:
        torch.cuda.reset_peak_memory_stats()
    for step in range(STEPS if on_cuda else DRY_STEPS):
        batch = batch_of(load, step % 2)  # two mini-batches in turn, so that the loss falls
        plan = strategy.plan(LengthTable.of(batch))
        tokens += int(plan.report.computed_tokens)
        if on_cuda:
            torch.cuda.synchronize()
        started = time.perf_counter()
        losses.append(strategy.train_step(batch, plan, SFTLoss()).loss)  # a number: the device has finished
        if step >= WARM_UP:
            seconds.append(time.perf_counter() - started)
    peak = torch.cuda.max_memory_allocated() if on_cuda else 0
    del strategy
    gc.collect()
    if on_cuda:
        torch.cuda.empty_cache()
    return Run(losses=losses, seconds=sum(seconds) / len(seconds), peak=peak, tokens=tokens)


def run(device: torch.device, dry: bool) -> Iterator[dict[str, Any]]:
    """A case per recipe, with its figures beside those of bf16."""
    load = WORKLOADS["tiny" if dry else "qwen3-1.7b"]
    if not dry and importlib.util.find_spec("transformer_engine") is None:
        text = "TransformerEngine is not installed: run this in an environment that has it (scripts/te_environment.sh)"
        yield {"case": "FP8", "figures": {}, "limits": {}, "notes": {"not run": text}}
        return
    yield from _recipes(load, device, dry, "")
    for name, shape in _shapes(dry).items():
        yield from _recipes(shape, device, dry, f", {name}")


def _recipes(load: Workload, device: torch.device, dry: bool, ending: str) -> Iterator[dict[str, Any]]:
    base = train(load, device, {} if dry else ENGINE)
    if ending and not dry:
        yield {"case": f"bf16 beside local layers{ending}", **compared(base, train(load, device, {}))}
    for recipe, multiple in TOKEN_MULTIPLES.items():
        if dry:
            found = train(load, device, {}, multiple)
        else:
            refusals = device_problems(recipe, torch.cuda.get_device_capability(), torch.version.cuda)
            if refusals:
                yield {"case": recipe + ending, "figures": {}, "limits": {}, "notes": {"not run": refusals}}
                continue
            found = train(load, device, {**ENGINE, "fp8": "e4m3", "fp8_recipe": recipe})
        yield {"case": recipe + ending, **compared(found, base)}


def compared(found: Run, base: Run) -> dict[str, Any]:
    """Figures of a run beside those of the one in bf16."""
    gaps = [abs(a / b - 1) for a, b in zip(found.losses, base.losses, strict=True)]
    names = ("transformer-engine", "megatron-core")
    versions = {name: importlib.metadata.version(name) for name in names if importlib.util.find_spec(_MODULES[name])}
    return {
        "figures": {
            "seconds per step": found.seconds,
            "seconds per step in bf16": base.seconds,
            "peak GiB": found.peak / GIB,
            "peak GiB in bf16": base.peak / GIB,
            "computed tokens beside bf16": found.tokens / base.tokens,
            "last loss": found.losses[-1],
            "last loss in bf16": base.losses[-1],
        },
        "limits": {"losses beside bf16": [max(gaps), LOSS_LIMIT], "fall of the loss": [-_fall(found), 0.0]},
        "notes": {"losses": found.losses, "losses in bf16": base.losses, "versions": versions},
    }


def _fall(run: Run) -> float:
    """How far the loss of the second mini-batch fell."""
    return run.losses[1] - run.losses[-1]


_MODULES = {"transformer-engine": "transformer_engine", "megatron-core": "megatron.core"}
