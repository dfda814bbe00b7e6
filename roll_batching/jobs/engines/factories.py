"""Creates engines from a job's settings; `config.engines` names these functions."""

from __future__ import annotations

import torch

from roll_batching.errors import EngineError
from roll_batching.jobs.config.engines import EngineArgs
from roll_batching.jobs.engines.hf import HFEngine
from roll_batching.jobs.engines.protocol import Engine
from roll_batching.jobs.engines.replicas import EngineLimits, Replicas
from roll_batching.jobs.engines.sglang import SGLang
from roll_batching.jobs.engines.vllm import VLLM
from roll_batching.jobs.engines.weight_broadcast import WeightBroadcast


def sglang(settings: EngineArgs, device: torch.device) -> Engine:
    """An engine of SGLang servers."""
    return Replicas(settings.urls, SGLang(), _limits(settings))


def vllm(settings: EngineArgs, device: torch.device) -> Engine:
    """An engine of vLLM servers."""
    return Replicas(settings.urls, VLLM(), _limits(settings))


def hf(settings: EngineArgs, device: torch.device) -> Engine:
    """Transformers in this process, on `device`."""
    return HFEngine(device)


def weight_broadcast(engine: Engine, device: torch.device) -> WeightBroadcast:
    """Sends weights on `device` to the servers of `engine`. Raises EngineError for other engines than SGLang."""
    if not isinstance(engine, Replicas) or not isinstance(engine.api, SGLang):
        raise EngineError("update_weights_from=distributed is for servers of sglang")
    return WeightBroadcast(engine, engine.api, device)


def _limits(settings: EngineArgs) -> EngineLimits:
    return EngineLimits(seconds=settings.request_timeout, in_flight=settings.max_in_flight, retries=settings.retries)
