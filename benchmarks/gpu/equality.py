"""A small model on CUDA against the CPU: losses, gradients, log-probs, generation and training.

The CPU run has its own process without a GPU. `tests/strategy/test_equality.py` compares CPU runs with an independent
reference.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks import ROOT
from roll_batching.losses import DPOLoss, PolicyLoss, SFTLoss
from roll_batching.packing.attention_backend import installed_versions
from roll_batching.samples import LengthTable, SampleBatch
from roll_batching.strategy import GenerationSettings, MegatronTrainStrategy
from tests.support.models import MODES, fill, random_batch, whole_gradients, worker_config, worst_difference

VOCABULARY, CAP, STEPS = 509, 192, 6
ARCHITECTURE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "num_layers": 3,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "ffn_hidden_size": 192,
    "qk_layernorm": True,
    "tie_word_embeddings": True,
    "max_position_embeddings": 512,
}
EXPERTS = {**ARCHITECTURE, "moe": {"num_experts": 4, "router_topk": 2, "ffn_hidden_size": 96}}
LIMITS = {"fp32": 2e-4, "bf16": 6e-2}
"""Largest relative errors: fp32 sums in another order; bf16 rounding through three layers, forward and backward."""
TEMPERATURE = 0.8


def losses() -> dict[str, Any]:
    policy = PolicyLoss(clip_low=0.2, clip_high=0.28, kl_coef=0.05, kl_bound=None, entropy_coef=0.02)
    return {"policy": policy, "sft": SFTLoss(), "dpo": DPOLoss(beta=0.05)}


def paired(batch: SampleBatch) -> tuple[SampleBatch, torch.Tensor]:
    """Batch of chosen and rejected neighbours, each with response tokens, and the pair of each sample."""
    batch = batch.select((batch.lengths > 3).nonzero()[:, 0])
    batch = batch.select(torch.arange(len(batch) // 2 * 2))
    pair = torch.arange(len(batch)) // 2
    extra = {"pair": pair, "chosen": torch.arange(len(batch)) % 2 == 0}
    mask = {"response_mask": torch.ones_like(batch["response_mask"])}
    batch = batch.without("response_mask").with_fields(mask, {"response_mask": "token"})
    return batch.with_fields(extra, dict.fromkeys(extra, "sample")), pair


def observe(mode: str, dtype: str, backend: str, architecture: dict[str, Any], layers: str = "local") -> dict[str, Any]:
    """All compared values of one mode in one precision, on the device of this process."""
    megatron = {"attention_backend": backend, "transformer_impl": layers}
    config = worker_config(mode, CAP, architecture=architecture, megatron=megatron, dtype=dtype)
    strategy = MegatronTrainStrategy(config, seed=1, temperature=TEMPERATURE)
    strategy.initialize()
    found: dict[str, Any] = {"device": strategy.device.type}

    def restore() -> None:
        fill(strategy.chunks, VOCABULARY)
        strategy.optimizer.reload_model_params()

    for name, loss in losses().items():
        batch, groups = random_batch(5, 13, 96, VOCABULARY), None
        if name == "dpo":
            batch, groups = paired(batch)
        restore()
        plan = strategy.plan(LengthTable.of(batch), group_ids=groups)
        value = strategy.train_step(batch, plan, loss).loss
        gradients = whole_gradients(strategy.chunks, VOCABULARY, 0, False)
        found[name] = value, {key: g.cpu() if isinstance(g, torch.Tensor) else g for key, g in gradients.items()}
    restore()
    batch = random_batch(6, 11, 96, VOCABULARY)
    forward = strategy.plan(LengthTable.of(batch), forward=True)
    statistics = strategy.forward(batch, forward, ("log_probs", "entropy"))
    found["log_probs"], found["entropy"] = statistics["log_probs"], statistics["entropy"]
    prompts = random_batch(7, 6, 20, VOCABULARY)
    settings = GenerationSettings(max_new_tokens=24, eos_token_id=5, greedy=True, temperature=TEMPERATURE)
    answers = strategy.generate(prompts, settings)
    again = strategy.compute_log_probs(answers, strategy.plan(LengthTable.of(answers), forward=True))
    shown = answers["log_probs"] != 0
    found["sampled"] = answers["log_probs"][shown], again["log_probs"][shown]
    found["answers"] = answers["input_ids"]
    strategy.start_phase(config.training_args)
    batch = random_batch(20, 13, 96, VOCABULARY)
    plan = strategy.plan(LengthTable.of(batch))
    found["training"] = [strategy.train_step(batch, plan, SFTLoss()).loss for _ in range(STEPS)]
    return found


def gap(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.double().cpu() - expected.double()).norm() / expected.double().norm().clamp(min=1e-12))


def judge(case: str, found: dict[str, Any], expected: dict[str, Any], limit: float) -> dict[str, Any]:
    """Differences between one mode and the packed run on the CPU."""
    kept = {}
    for name in losses():
        (value, gradients), (right, exact) = found[name], expected[name]
        kept[f"{name} loss"] = [abs(value - right) / max(abs(right), 0.1), limit]
        kept[f"{name} gradient"] = [worst_difference(gradients, exact)[0], 3 * limit]
    for name in ("log_probs", "entropy"):
        kept[name] = [gap(found[name], expected[name]), limit]
    kept["log-probs while sampling"] = [gap(*found["sampled"]), limit]
    kept[f"losses of {STEPS} steps"] = [
        max(abs(a / b - 1) for a, b in zip(found["training"], expected["training"], strict=True)),
        limit,
    ]
    same = found["answers"].shape == expected["answers"].shape and bool((found["answers"] == expected["answers"]).all())
    figures = {"greedy answers equal": float(same), "loss of the last step": found["training"][-1]}
    return {"case": case, "figures": figures, "limits": kept}


def run(device: torch.device, dry: bool) -> Iterator[dict[str, Any]]:
    """Compare all modes in fp32 (dense), and on CUDA in bf16 with both backends, with fp32 on the CPU."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "expected.pt"
        hidden = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "4"}
        subprocess.run([sys.executable, "-m", "benchmarks.gpu.equality", str(path)], check=True, env=hidden, cwd=ROOT)
        dense, experts = torch.load(path)
    assert dense["device"] == "cpu"
    cases = [(mode, "fp32", "dense") for mode in MODES]
    if device.type == "cuda":
        cases += [(mode, "bf16", "varlen") for mode in MODES] + [("packed", "bf16", "dense")]
        named = {"flash-attn": "flash_attn", "flash-attn-4": "flash_attn_4"}
        cases += [("packed", "bf16", named[one]) for one in installed_versions(named)]
    for mode, dtype, backend in cases[-1:] if dry else cases:
        found = observe(mode, dtype, backend, ARCHITECTURE)
        assert found["device"] == device.type
        yield judge(f"{mode}, {dtype}, {backend}", found, dense, LIMITS[dtype])
    if device.type == "cuda" and importlib.util.find_spec("transformer_engine"):
        found = observe("packed", "bf16", "auto", ARCHITECTURE, "transformer_engine")
        yield judge("packed, bf16, layers and attention of TransformerEngine", found, dense, LIMITS["bf16"])
    # fp32 only: in bf16, rounding can route a token to another expert.
    found = observe("packed", "fp32", "dense", EXPERTS)
    yield judge("packed, fp32, dense, mixture of experts", found, experts, LIMITS["fp32"])


if __name__ == "__main__":
    torch.save([observe("packed", "fp32", "dense", shape) for shape in (ARCHITECTURE, EXPERTS)], sys.argv[1])
