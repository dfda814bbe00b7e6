"""Abuses of limits and units, and settings with which nothing would be learned."""

from __future__ import annotations

from typing import Any

from tests.campaigns.abuse.runner import DONE, REFUSED, TRAIN, Abuse

_LAYOUT = "actor_train.strategy_args.strategy_config"
_PLAN = ("-m", "roll_batching.cli", "plan", "lengths.csv", "--dynamic-cp", "--dp", "2", "--max-tokens", "64")


def _refused(name: str, settings: dict[str, Any], *words: str, arguments: tuple[str, ...] = TRAIN) -> Abuse:
    return Abuse(
        name=f"limits: {name}", code=REFUSED, settings=settings, words=words, arguments=arguments, lines=3, seconds=30
    )


LIMITS = [
    _refused("greedy groups", {"actor_infer.generating_args.do_sample": False}, "set do_sample to true"),
    _refused("the likeliest token", {"actor_infer.generating_args.top_k": 1}, "raise top_k"),
    _refused("a rate that rises", {"actor_train.training_args.min_lr": 1.0}, "min_lr is 1, above learning_rate"),
    _refused("a million processes", {"reward_workers": 10**6}, "it must be at most 1024"),
    _refused("a cap that is no number", {"loss_args": {"engine_ratio_cap": float("nan")}}, "finite number"),
    _refused(
        "microseconds in a file",
        {
            f"{_LAYOUT}.context_parallel_size": "auto",
            f"{_LAYOUT}.cluster": {"node_latency": 25},
            "actor_train.use_sequence_packing": True,
        },
        "node_latency: is 25",
        "did you mean 2.5e-05 (25 microseconds)?",
    ),
    _refused("an override twice", {}, "replaces the override 'seed=1'", arguments=(*TRAIN, "seed=1", "seed=2")),
    _refused(
        "no checkpoint in the background", {"save_steps": 0}, "save_steps is 0", arguments=(*TRAIN, "async_save=true")
    ),
    Abuse(
        name="limits: gigabytes on the command line",
        code=REFUSED,
        files={"lengths.csv": "length\n9\n30\n"},
        arguments=(*_PLAN, "--cluster", "network_bandwidth=42"),
        words=("Cluster.network_bandwidth is 42", "did you mean 4.2e+10 (42 GB/s)?"),
        seconds=30,
    ),
    Abuse(
        name="limits: a warm-up longer than the job",
        code=DONE,
        settings={"actor_train.training_args.warmup_steps": 1000},
        words=("warmup_steps", "is 1000, above the number of optimizer steps, 1"),
    ),
]
