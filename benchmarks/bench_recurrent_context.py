"""What context-parallel ranks of recurrent layers wait for when they divide heads, and when they divide the sequence.

    python benchmarks/bench_recurrent_context.py                 sizes of published models, then steps of four processes
    python benchmarks/bench_recurrent_context.py --predicted     the first part alone

The first part counts the bytes that a rank receives in the forward pass of a layer, and the length from which a
sequence is cheaper to divide than the heads. The second runs real steps of a small model with gated delta nets over
gloo, whose exchanges sleep as long as links of `BANDWIDTH` would take, and compares them with the prediction by which
`recurrent_context_parallel: auto` chooses; medians of the rounds, taken in turn. `--check` exits 1 if a measured
difference between two ways is more than 15% from the predicted one, or auto is not the faster.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs in a checkout that is not installed

from roll_batching.known_warnings import hide_known_warnings

hide_known_warnings()  # before Megatron is imported

from benchmarks.bench_cp_steps import free_port
from benchmarks.bench_step import decoder
from benchmarks.table import Table
from roll_batching.planning.recurrent_exchange import RecurrentExchange
from roll_batching.settings import ArchitectureConfig
from roll_batching.settings.model_cost import with_exchange

RANKS = 4
BANDWIDTH = 6e6
"""Bytes/s of the links: exchanges then take far longer than the small model computes."""
PUBLISHED: dict[str, dict[str, Any]] = {
    "Qwen3-Next-80B-A3B": {
        "layers": 36,
        "units": 16,
        "channels": 16 * 2 * 128 + 3 * 32 * 128 + 2 * 32,
        "map_elements": 32 * 128 * 256,
    },
    "Nemotron-H-8B": {
        "layers": 24,
        "units": 8,
        "heads": 16,
        "channels": 2 * 8192 + 2 * 8 * 128 + 128,
        "map_elements": 128 * (8192 + 128),
    },
}
"""Of the models' config.json, without tensor parallelism."""
DELTA = {"num_key_heads": 4, "num_value_heads": 8, "key_head_dim": 16, "value_head_dim": 16, "layers": (1, 1, 1, 0)}
PACKS = {"one sequence of 2,048": [2048], "two of 1,024": [1024] * 2, "32 of 64": [64] * 32}
WAYS = ("heads", "sequence", "auto")


def predicted_table() -> Table:
    """Bytes by context-parallel size, for the layers of published models."""
    table = Table(
        "MB that a rank receives in the forward pass of a layer, for one sequence",
        ("model", "CP", "heads: 8k tokens", "heads: 64k", "sequence: any length", "the sequence from"),
    )
    for name, sizes in PUBLISHED.items():
        ways = {way: RecurrentExchange(**sizes, divide=way) for way in ("heads", "sequence")}
        for cp_size in (2, 4, 8, 16, 32):
            can = ways["heads"].can_divide_heads(cp_size)
            short, long = ways["heads"].received(np.array([8192.0, 65536.0]), cp_size) / 1e6
            states = float(ways["sequence"].received(np.array([1.0]), cp_size)[0]) / 1e6
            cells = (f"{short:.0f}", f"{long:.0f}", f"{states:.0f}", f"{states / short * 8192:,.0f} tokens")
            table.add(name, cp_size, *(cells if can else ("cannot", "cannot", f"{states:.0f}", "always")))
    return table


def sleeping(collective: Callable[..., Any], received: Callable[..., int]) -> Callable[..., Any]:
    """`collective`, which lasts as long as its bytes take on the links."""

    def call(*arguments: Any, **options: Any) -> Any:
        result = collective(*arguments, **options)
        time.sleep(received(*arguments) * (RANKS - 1) / RANKS / BANDWIDTH)
        return result

    return call


def slow_links() -> None:
    """Makes the exchanges of recurrent layers sleep."""
    from megatron.core.tensor_parallel import mappings

    dist.all_to_all_single = sleeping(dist.all_to_all_single, lambda output, *_: output.nbytes)
    mappings.dist_all_gather_func = sleeping(mappings.dist_all_gather_func, lambda output, *_: output.nbytes)
    mappings.dist_reduce_scatter_func = sleeping(mappings.dist_reduce_scatter_func, lambda _, given, *__: given.nbytes)


def make_strategy() -> Any:
    """A strategy of a model with three gated delta nets, on all ranks as context-parallel ranks."""
    from roll_batching.jobs.config import WorkerConfig
    from roll_batching.strategy import MegatronTrainStrategy

    shape = {
        **decoder(32, 4, 4, 4, 64, 64),
        "vocab_size": 64,
        "max_position_embeddings": 4096,
        "gated_delta_net": DELTA,
    }
    config = {
        "model_args": {"architecture": shape, "dtype": "bf16"},
        "training_args": {"learning_rate": 1e-5},
        "strategy_args": {"strategy_name": "megatron_train", "strategy_config": {"context_parallel_size": RANKS}},
        "use_sequence_packing": True,
        "sequence_packing_args": {"max_packed_sequence_length_train": 2048},
    }
    strategy = MegatronTrainStrategy(WorkerConfig.model_validate(config), seed=1)
    strategy.initialize()
    return strategy


def run_rank(rank: int, port: int, rounds: int, results: Any) -> None:
    """Measures all packs and ways in turn; rank 0 puts the median seconds by pack and way into `results`."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(RANKS), LOCAL_WORLD_SIZE=str(RANKS))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    from roll_batching.losses import SFTLoss
    from roll_batching.samples import SampleBatch, distribute, gather_lengths

    strategy, loss = make_strategy(), SFTLoss()
    slow_links()
    seconds: dict[str, dict[str, list[float]]] = {name: {way: [] for way in WAYS} for name in PACKS}
    for number in range(rounds + 1):  # the first warms up
        for name, lengths in PACKS.items():
            ids = [torch.full((length,), 7) for length in lengths]
            fields = {"input_ids": ids, "response_mask": [torch.ones(len(row), dtype=torch.bool) for row in ids]}
            batch = SampleBatch.from_lists(fields, dict.fromkeys(fields, "token"))
            plan = strategy.plan(gather_lengths(batch))
            placed = distribute(batch, plan)
            for way in WAYS:
                settings = replace(strategy.state.settings, recurrent_context_parallel=way)
                strategy.state = replace(strategy.state, settings=settings)
                dist.barrier()
                start = time.perf_counter()
                strategy.train_step(placed, plan, loss)
                dist.barrier()
                seconds[name][way] += [time.perf_counter() - start] * (number > 0)
    if rank == 0:
        results.put({name: {way: statistics.median(of) for way, of in ways.items()} for name, ways in seconds.items()})
    dist.barrier()
    dist.destroy_process_group()


def measured_table(seconds: dict[str, dict[str, float]]) -> Table:
    """Measured and predicted differences, with the limits of `--check`."""
    table = Table(
        f"Seconds of a step of {RANKS} context-parallel ranks, with links of {BANDWIDTH / 1e6:.0f} MB/s",
        ("pack", *WAYS, "sequence - heads", "predicted"),
    )
    shape = {
        **decoder(32, 4, 4, 4, 64, 64),
        "vocab_size": 64,
        "max_position_embeddings": 4096,
        "gated_delta_net": DELTA,
    }
    exchange = with_exchange(ArchitectureConfig.model_validate(shape), tp_size=1, divide="auto")["recurrent"]
    for name, lengths in PACKS.items():
        tokens, of = np.array(lengths, np.float64), seconds[name]
        heads, sequence = (
            2 * exchange.layers * replace(exchange, divide=way).received(tokens, RANKS).sum() / BANDWIDTH
            for way in ("heads", "sequence")
        )
        found, expected = of["sequence"] - of["heads"], sequence - heads
        table.add(name, *(f"{of[way]:.2f}" for way in WAYS), f"{found:+.2f}", f"{expected:+.2f}")
        table.require(abs(found / expected - 1) < 0.15, f"{name}: {found:+.2f} s, predicted {expected:+.2f}")
        table.require(
            of["auto"] < 1.05 * min(of.values()),
            f"{name}: auto takes {of['auto'] / min(of.values()):.2f} of the faster",
        )
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rounds", type=int, default=5, help="steps of each pack and way")
    parser.add_argument("--predicted", action="store_true", help="sizes of published models alone")
    parser.add_argument("--check", action="store_true", help="exit 1 if a limit does not hold")
    given = parser.parse_args()
    predicted_table().show()
    if given.predicted:
        return
    results = torch.multiprocessing.get_context("spawn").SimpleQueue()
    torch.multiprocessing.spawn(run_rank, (free_port(), given.rounds, results), nprocs=RANKS)
    table = measured_table(results.get())
    table.show()
    if given.check and table.missed:
        sys.exit(1)


if __name__ == "__main__":
    main()
