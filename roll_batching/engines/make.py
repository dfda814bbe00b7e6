"""Engines from a job's settings."""

from __future__ import annotations

import torch

from roll_batching.config.engines import EngineArgs
from roll_batching.engines.hf import HFEngine
from roll_batching.engines.protocol import Engine
from roll_batching.engines.replicas import EngineLimits, Replicas
from roll_batching.engines.sglang import SGLang
from roll_batching.engines.vllm import VLLM


def sglang(settings: EngineArgs, device: torch.device) -> Engine:
    """SGLang servers."""
    return Replicas(settings.urls, SGLang(), _limits(settings))


def vllm(settings: EngineArgs, device: torch.device) -> Engine:
    """VLLM servers."""
    return Replicas(settings.urls, VLLM(), _limits(settings))


def hf(settings: EngineArgs, device: torch.device) -> Engine:
    """Transformers on this process's device."""
    return HFEngine(device)


def _limits(settings: EngineArgs) -> EngineLimits:
    return EngineLimits(seconds=settings.request_timeout, in_flight=settings.max_in_flight, retries=settings.retries)
