"""The rollout engines that `actor_infer.strategy_args.strategy_name` can name, and how they are asked."""

from __future__ import annotations

from typing import Literal

from roll_batching.registry import Entry, Registry
from roll_batching.settings.fields import Settings, setting

ENGINES: Registry[Entry] = Registry(
    "rollout engine",
    Entry(name="sglang", target="roll_batching.jobs.engines.factories:sglang", summary="SGLang servers"),
    Entry(name="vllm", target="roll_batching.jobs.engines.factories:vllm", summary="vLLM servers"),
    Entry(
        name="hf_infer", target="roll_batching.jobs.engines.factories:hf", summary="transformers in the job's processes"
    ),
)


class EngineArgs(Settings):
    """`engine_args`: how an engine that samples rollouts is reached."""

    urls: list[str] = setting(
        default_factory=list,
        help="sglang, vllm: servers that run, http://host:port each, all of the same model. Without any, the job "
        "starts its own, on actor_infer.device_mapping, with strategy_args.strategy_config as their options.",
    )
    command: list[str] | None = setting(
        None,
        help="The program of a server that the job starts, before its options. Default: [vllm, serve]; for sglang the "
        "job's own Python with -m sglang.launch_server.",
    )
    start_timeout: float = setting(
        1800.0, help="Seconds that servers which the job starts may take until they answer.", gt=0
    )
    request_timeout: float = setting(600.0, help="Seconds for one attempt of one request.", gt=0)
    max_in_flight: int = setting(128, help="Requests that a server has at once from one data-parallel rank.", ge=1)
    retries: int = setting(
        3, help="Attempts of a request after the first, at other servers where there are some.", ge=0
    )
    update_weights_from: Literal["disk", "distributed"] = setting(
        "disk",
        help="How new weights come to the engine. disk: as a model directory that it reads. distributed: from rank 0 "
        "over a process group with each server, in buckets, without a file; for sglang.",
    )
    weights_folder: str | None = setting(
        None,
        help="Folder for the model directories that engines read, on a file system that they and all ranks see. "
        "They lie below it in a folder of the run's name and a digest of its path. Default: engine_weights in the "
        "run's folder.",
    )
    gap_warning: float = setting(
        0.05,
        help="Warn where the engine's log-probs differ from the trainer's by more than this per token in the mean.",
        gt=0,
    )
