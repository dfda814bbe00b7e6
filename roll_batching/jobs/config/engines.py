"""Rollout engines that `actor_infer.strategy_args.strategy_name` can name, and their settings."""

from __future__ import annotations

from typing import Literal

from roll_batching.registry import Entry, Registry
from roll_batching.settings.fields import Settings, setting

ENGINES: Registry[Entry] = Registry(
    "rollout engine",
    Entry(name="sglang", target="roll_batching.jobs.engines.sglang:sglang_engine", summary="SGLang servers"),
    Entry(name="vllm", target="roll_batching.jobs.engines.vllm:vllm_engine", summary="vLLM servers"),
    Entry(
        name="hf_infer", target="roll_batching.jobs.engines.hf:hf_engine", summary="transformers in the job's processes"
    ),
)


class EngineArgs(Settings):
    """`engine_args`: servers of a rollout engine, requests, and weight updates."""

    urls: list[str] = setting(
        default_factory=list,
        help="sglang, vllm: running servers, http://host:port each, all of the same model. Default: the job starts "
        "servers on actor_infer.device_mapping, with strategy_args.strategy_config as their options.",
    )
    command: list[str] | None = setting(
        None,
        help="Command of a server that the job starts, before its options. Default: [vllm, serve]; for sglang the "
        "job's Python with -m sglang.launch_server.",
    )
    start_timeout: float = setting(1800.0, help="Seconds until a server that the job starts must respond.", gt=0)
    request_timeout: float = setting(600.0, help="Seconds per attempt of a request.", gt=0)
    max_in_flight: int = setting(128, help="Most concurrent requests per server and data-parallel rank.", ge=1)
    retries: int = setting(3, help="Further attempts of a failed request, on other servers where there are any.", ge=0)
    update_weights_from: Literal["disk", "distributed"] = setting(
        "disk",
        help="How the engine gets new weights. disk: from a model directory. distributed: from rank 0 over a process "
        "group with each server, in buckets, without a file; sglang only.",
    )
    weights_folder: str | None = setting(
        None,
        help="Folder of the model directories for engines, on a file system that engines and all ranks share. Each run "
        "has a subfolder, named by the run and a digest of its path. Default: engine_weights in the run's folder.",
    )
    gap_warning: float = setting(
        0.05,
        help="Warn when the engine's log-probs differ from the trainer's by more than this, in the mean over tokens.",
        gt=0,
    )
