"""Recurrent layers: what context-parallel ranks wait for, and a packed step on the CPU beside transformers'.

    python benchmarks/bench_recurrent.py                       all parts
    python benchmarks/bench_recurrent.py --only predicted      bytes of published models

`predicted` counts the bytes that a rank receives in the forward pass of a layer, and the length from which a sequence
is cheaper to divide than the heads. `exchange` runs real steps of a small model with gated delta nets on four processes
over gloo, twice: once as they are, and once with exchanges that sleep as long as links of `BANDWIDTH` would take. What
this adds is compared with the prediction by which `recurrent_context_parallel: auto` chooses. `step` trains a tiny
Qwen3-Next for a step in one pack, beside transformers' plain torch with the same samples padded, and one by one. All
are medians of rounds, taken in turn. `--check` exits 1 if an exchange is more than 15% from its prediction, auto is not
the faster way, or transformers is faster.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs in a checkout that is not installed

from roll_batching.known_warnings import hide_known_warnings

hide_known_warnings()  # before Megatron is imported

from benchmarks.bench_step import decoder
from benchmarks.table import Table
from roll_batching.planning.recurrent_exchange import RecurrentExchange
from roll_batching.settings import ArchitectureConfig
from roll_batching.settings.model_cost import with_exchange
from tests.support.ranks import run_ranks

HERE = "benchmarks.bench_recurrent:"
RANKS = 4
BANDWIDTH = 2e6
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
DELTA = {"num_key_heads": 4, "num_value_heads": 8, "key_head_dim": 32, "value_head_dim": 16, "layers": (1, 1, 1, 0)}
SHAPE = {**decoder(32, 4, 4, 4, 64, 64), "vocab_size": 64, "max_position_embeddings": 4096, "gated_delta_net": DELTA}
PACKS = {"one sequence of 2,048": [2048], "two of 1,024": [1024] * 2, "eight of 256": [256] * 8}
LENGTHS = [37, 91, 256, 500, 64, 300, 200, 512, 88]
"""Of the step beside transformers'."""
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


class Links:
    """Makes the exchanges of recurrent layers sleep, as long as their bytes take."""

    def __init__(self) -> None:
        from megatron.core.tensor_parallel import mappings

        self.slow = False
        dist.all_to_all_single = self._sleeping(dist.all_to_all_single, 0)
        mappings.dist_all_gather_func = self._sleeping(mappings.dist_all_gather_func, 0)
        mappings.dist_reduce_scatter_func = self._sleeping(mappings.dist_reduce_scatter_func, 1)

    def _sleeping(self, collective: Callable[..., Any], whole: int) -> Callable[..., Any]:
        """`collective`, whose argument `whole` has the tokens or maps of all ranks."""

        def call(*arguments: Any, **options: Any) -> Any:
            result = collective(*arguments, **options)
            time.sleep(self.slow * arguments[whole].nbytes * (RANKS - 1) / RANKS / BANDWIDTH)
            return result

        return call


def make_strategy(model: dict[str, Any], **layout: Any) -> Any:
    """A strategy of a model that trains packs of at most 2,048 tokens."""
    from roll_batching.jobs.config import WorkerConfig
    from roll_batching.strategy import MegatronTrainStrategy

    config = {
        "model_args": model,
        "training_args": {"learning_rate": 1e-5},
        "strategy_args": {"strategy_name": "megatron_train", "strategy_config": layout},
        "use_sequence_packing": True,
        "sequence_packing_args": {"max_packed_sequence_length_train": 2048},
    }
    strategy = MegatronTrainStrategy(WorkerConfig.model_validate(config), seed=1)
    strategy.initialize()
    return strategy


def packed_step(strategy: Any, rows: list[torch.Tensor]) -> Callable[[], Any]:
    """A training step of these samples, all of whose tokens count."""
    from roll_batching.losses import SFTLoss
    from roll_batching.samples import SampleBatch, distribute, gather_lengths

    fields = {"input_ids": rows, "response_mask": [torch.ones(len(row), dtype=torch.bool) for row in rows]}
    batch = SampleBatch.from_lists(fields, dict.fromkeys(fields, "token"))
    plan = strategy.plan(gather_lengths(batch))
    placed = distribute(batch, plan)
    return lambda: strategy.train_step(placed, plan, SFTLoss())


def exchange_seconds(rounds: int) -> dict[str, dict[str, list[float]]]:
    """Median seconds of a step by pack and way, without and with slow links."""
    torch.set_num_threads(1)
    strategy = make_strategy({"architecture": SHAPE, "dtype": "bf16"}, context_parallel_size=RANKS)
    links = Links()
    steps = {name: packed_step(strategy, [torch.full((n,), 7) for n in lengths]) for name, lengths in PACKS.items()}
    seconds: dict[str, dict[str, list[list[float]]]] = {name: {way: [[], []] for way in WAYS} for name in PACKS}
    for number in range(rounds + 1):  # the first warms up
        for name, way, slow in itertools.product(PACKS, WAYS, (False, True)):
            settings = replace(strategy.state.settings, recurrent_context_parallel=way)
            strategy.state, links.slow = replace(strategy.state, settings=settings), slow
            dist.barrier()
            start = time.perf_counter()
            steps[name]()
            dist.barrier()
            seconds[name][way][slow] += [time.perf_counter() - start] * (number > 0)
    return {name: {way: [*map(statistics.median, of)] for way, of in ways.items()} for name, ways in seconds.items()}


def step_seconds(rounds: int) -> dict[str, float]:
    """Median seconds of a step of a tiny Qwen3-Next: in a pack here, padded and one by one in transformers."""
    from tests.huggingface import tiny

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        model = tiny.write_model(Path(folder), "qwen3_next").train()
        strategy = make_strategy({"model_name_or_path": folder, "dtype": "fp32"})
    rows = [torch.randint(tiny.VOCABULARY, (length,)) for length in LENGTHS]
    padded = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    real = torch.arange(padded.shape[1]) < torch.tensor(LENGTHS)[:, None]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)

    def theirs(batches: list[dict[str, torch.Tensor]]) -> Callable[[], None]:
        def step() -> None:
            optimizer.zero_grad()
            for batch in batches:
                model(**batch).loss.backward()
            optimizer.step()

        return step

    labels = padded.masked_fill(~real, -100)
    steps = {
        "packed": packed_step(strategy, rows),
        "padded": theirs([{"input_ids": padded, "attention_mask": real.long(), "labels": labels}]),
        "one by one": theirs([{"input_ids": row[None], "labels": row[None]} for row in rows]),
    }
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(rounds + 1):
        for name, step in steps.items():
            start = time.perf_counter()
            step()
            seconds[name] += [time.perf_counter() - start] * (number > 0)
    return {name: statistics.median(of) for name, of in seconds.items()}


def step_table(seconds: dict[str, float]) -> Table:
    """Seconds of a step, and of transformers' over ours."""
    table = Table(
        f"A step of a tiny Qwen3-Next on one CPU core, {sum(LENGTHS):,} tokens in {len(LENGTHS)} samples",
        ("", "seconds", "over packed"),
    )
    for name, of in seconds.items():
        ratio = of / seconds["packed"]
        table.add(name if name == "packed" else f"transformers, {name}", f"{of:.2f}", f"{ratio:.2f}")
        table.require(ratio >= 1, f"{name}: {ratio:.2f} of the packed step")
    return table


def measured_table(seconds: dict[str, dict[str, list[float]]]) -> Table:
    """Seconds that exchanges add, measured and predicted, with the limits of `--check`."""
    table = Table(
        f"Seconds of a step of {RANKS} context-parallel ranks, and of links of {BANDWIDTH / 1e6:.0f} MB/s in it",
        ("pack", *WAYS, "heads add", "predicted", "sequence adds", "predicted"),
    )
    exchange = with_exchange(ArchitectureConfig.model_validate(SHAPE), tp_size=1, divide="auto")["recurrent"]
    for name, lengths in PACKS.items():
        slow, figures = {way: of[1] for way, of in seconds[name].items()}, []
        for way in ("heads", "sequence"):
            received = replace(exchange, divide=way).received(np.array(lengths, np.float64), RANKS).sum()
            expected = 2 * exchange.layers * received / BANDWIDTH
            found = slow[way] - seconds[name][way][0]
            figures += [f"{found:.2f}", f"{expected:.2f}"]
            table.require(abs(found / expected - 1) < 0.15, f"{name}, {way}: {found:.2f} s, predicted {expected:.2f}")
        table.add(name, *(f"{slow[way]:.2f}" for way in WAYS), *figures)
        ratio = slow["auto"] / min(slow["heads"], slow["sequence"])
        table.require(ratio < 1.1, f"{name}: auto takes {ratio:.2f} of the faster")
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rounds", type=int, default=5, help="steps of each pack and way")
    parser.add_argument("--only", choices=("predicted", "exchange", "step"), help="one part; default: all")
    parser.add_argument("--check", action="store_true", help="exit 1 if a limit does not hold")
    given = parser.parse_args()
    tables = []
    if given.only in (None, "predicted"):
        tables.append(predicted_table())
    if given.only in (None, "exchange"):
        tables.append(measured_table(run_ranks(RANKS, HERE + "exchange_seconds", given.rounds, timeout=900)[0]))
    if given.only in (None, "step"):
        tables.append(step_table(run_ranks(1, HERE + "step_seconds", given.rounds, timeout=900)[0]))
    for table in tables:
        table.show()
    if given.check and any(table.missed for table in tables):
        sys.exit(1)


if __name__ == "__main__":
    main()
