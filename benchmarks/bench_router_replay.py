"""Differences between old log-probs and those of each optimizer step of a rollout, with and without router replay.

    python benchmarks/bench_router_replay.py
    python benchmarks/bench_router_replay.py --learning-rate 1e-5 --updates 16

A small mixture of experts with random weights trains on one rollout in several mini-batches, on the CPU. Before each
optimizer step the log-probs of its samples are computed as the step computes them, and compared with the old ones. The
table has their mean absolute difference, and the share of tokens to which the routers would now give other experts than
in the pass of old log-probs, in one layer or more.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs in a checkout that is not installed

from roll_batching.known_warnings import hide_known_warnings

hide_known_warnings()  # before Megatron is imported

from roll_batching.losses import PolicyLoss
from roll_batching.samples import LengthTable, SampleBatch, gather_lengths
from roll_batching.settings.role import RoleSettings
from roll_batching.strategy import MegatronTrainStrategy

EXPERTS, TOP_K, LAYERS = 16, 4, 4


def strategy_of(learning_rate: float, dtype: str) -> MegatronTrainStrategy:
    """A policy with the same random weights in every call."""
    architecture = {
        "vocab_size": 512,
        "hidden_size": 64,
        "num_layers": LAYERS,
        "num_attention_heads": 4,
        "ffn_hidden_size": 128,
        "init_std": 0.1,  # experts matter more than with Megatron's 0.02
        "moe": {"num_experts": EXPERTS, "router_topk": TOP_K, "ffn_hidden_size": 64},
    }
    role = {
        "model_args": {"architecture": architecture, "dtype": dtype},
        "training_args": {"learning_rate": learning_rate, "max_grad_norm": 1.0},
        "strategy_args": {"strategy_name": "megatron_train"},
        "use_sequence_packing": True,
        "sequence_packing_args": {"max_packed_sequence_length_train": 512, "max_packed_sequence_length_forward": 512},
    }
    strategy = MegatronTrainStrategy(RoleSettings.model_validate(role), seed=1)
    strategy.initialize()
    return strategy


def rollout(samples: int) -> SampleBatch:
    """Samples of random tokens with random advantages, the first tokens of each as prompt."""
    g = torch.Generator().manual_seed(2)
    lengths = torch.randint(24, 200, (samples,), generator=g).tolist()
    return SampleBatch.from_lists(
        {
            "input_ids": [torch.randint(0, 512, (n,), generator=g) for n in lengths],
            "response_mask": [torch.arange(n) >= 8 for n in lengths],
            "advantages": torch.randn(samples, generator=g),
        },
        {"input_ids": "token", "response_mask": "token", "advantages": "sample"},
    )


def train(replay: bool, updates: int, learning_rate: float, dtype: str) -> list[tuple[float, float]]:
    """(mean difference of log-probs, share of tokens with other experts) before each optimizer step."""
    strategy = strategy_of(learning_rate, dtype)
    batch = rollout(4 * updates)
    table: LengthTable = gather_lengths(batch)
    plans = [strategy.plan(table.select(range(4 * i, 4 * i + 4))) for i in range(updates)]
    needs = ("log_probs", "routed_experts")
    parts = [batch.select_ids(plan.ids) for plan in plans]
    old = [strategy.forward(part, plan, needs) for part, plan in zip(parts, plans, strict=True)]
    rows = []
    for part, plan, before in zip(parts, plans, old, strict=True):
        now = strategy.forward(part, plan, needs)
        fields: dict[str, Any] = {"old_log_probs": before["log_probs"]}
        schema: dict[str, Any] = {"old_log_probs": before.schema["log_probs"]}
        if replay:
            fields["routed_experts"], schema["routed_experts"] = (
                before["routed_experts"],
                before.schema["routed_experts"],
            )
        part = part.with_fields(fields, schema)
        trained = strategy.forward(part, plan, ("log_probs",)) if replay else now
        gap = (trained["log_probs"] - before["log_probs"]).abs().sum() / (part.num_tokens - len(part))
        other = (now["routed_experts"].sort(-1)[0] != before["routed_experts"].sort(-1)[0]).flatten(1).any(1)
        rows.append((float(gap), float(other.float().mean())))
        strategy.train_step(part, plan, PolicyLoss())
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--updates", type=int, default=8, help="optimizer steps of the rollout")
    parser.add_argument("--learning-rate", type=float, default=1e-4)
    parser.add_argument("--dtype", choices=["fp32", "bf16"], default="fp32")
    arguments = parser.parse_args()
    without, with_replay = (
        train(replay, arguments.updates, arguments.learning_rate, arguments.dtype) for replay in (False, True)
    )
    print("| updates so far | mean difference, disabled | R2 | tokens with other experts, disabled | R2 |")
    print("|---|---|---|---|---|")
    for number, ((gap, other), (replayed, would)) in enumerate(zip(without, with_replay, strict=True)):
        print(f"| {number} | {gap:.2e} | {replayed:.2e} | {other:.1%} | {would:.1%} |")


if __name__ == "__main__":
    main()
