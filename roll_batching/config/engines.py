"""The rollout engines that `actor_infer.strategy_args.strategy_name` can name, and how they are asked."""

from __future__ import annotations

from roll_batching.config.fields import Settings, honoured
from roll_batching.registry import Entry, Registry

ENGINES: Registry[Entry] = Registry(
    "rollout engine",
    Entry(name="sglang", target="roll_batching.engines.make:sglang", summary="SGLang servers at engine_args.urls"),
    Entry(name="vllm", target="roll_batching.engines.make:vllm", summary="vLLM servers at engine_args.urls"),
    Entry(name="hf_infer", target="roll_batching.engines.make:hf", summary="transformers in the job's processes"),
)


class EngineArgs(Settings):
    """`engine_args`: how an engine that samples rollouts is reached."""

    urls: list[str] = honoured(
        default_factory=list,
        help="sglang, vllm: servers that run, http://host:port each, all of the same model. Without any, rollouts run "
        "on the Megatron model itself.",
    )
    request_timeout: float = honoured(600.0, help="Seconds for one attempt of one request.", gt=0)
    max_in_flight: int = honoured(128, help="Requests that a server has at once from one data-parallel rank.", ge=1)
    retries: int = honoured(
        3, help="Attempts of a request after the first, at other servers where there are some.", ge=0
    )
    weights_folder: str | None = honoured(
        None,
        help="Folder for the model directories that engines read, on a file system that they and all ranks see. "
        "They lie below it in a folder of the run's name. Default: engine_weights in the run's folder.",
    )
    gap_warning: float = honoured(
        0.05,
        help="Warn where the engine's log-probs differ from the trainer's by more than this per token in the mean.",
        gt=0,
    )
