"""Predicted beside measured times of optimizer steps, where the rates of the cluster come from a file."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from roll_batching.errors import PlanError
from roll_batching.modeling.head import gpt_of
from roll_batching.planning import Plan
from roll_batching.strategy.model_state import ModelState, StepSettings
from roll_batching.strategy.pack_features import model_times

logger = logging.getLogger(__name__)

MISFIT, STEPS = 1.5, 5
"""A file no longer fits when the last `STEPS` predicted steps are all off by this factor in one direction."""
_SHARE = 0.02
"""Largest share of the steps' time that predicting takes: of a large pipeline, only some steps are predicted."""


def device_name(device: torch.device) -> str:
    """Name of the kind of `device`, as files of rates have it."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


class StepPrediction:
    """Compares the steps of a strategy with their predictions on rank 0; warns once when the file does not fit."""

    def __init__(self, settings: StepSettings, device: torch.device) -> None:
        self._file = settings.cluster_file
        self._ratios: deque[float] = deque(maxlen=STEPS)
        self._predicting = self._measured = 0.0
        self._is_on, self._warned = self._file is not None and dist.get_rank() == 0, False
        measured, here = settings.cluster_device, device_name(device)
        if self._is_on and measured not in (None, here):
            self._warn(f"has the rates of {measured}, and this is {here}")

    def compare(self, state: ModelState, plan: Plan, phases: Mapping[Any, float]) -> float | None:
        """Predicted / measured seconds of a step's passes; None where it is not predicted.

        Both end with the last pass of the slowest rank. The measured time, from `phases`, also has sums of gradients.
        """
        measured = phases["forward_backward"] + phases["loss"] + phases["wait"]
        self._measured += measured
        if not self._is_on or self._predicting > _SHARE * self._measured:
            return None
        started = time.perf_counter()
        try:
            ratio = _predict(state, plan) / measured
        except PlanError as error:
            self._is_on = False
            logger.warning("steps are not compared with the rates of %s: %s", self._file, error)
            return None
        self._predicting += time.perf_counter() - started
        self._ratios.append(ratio)
        for off, word in ((min(self._ratios), "longer"), (1 / max(self._ratios), "shorter")):
            if len(self._ratios) == STEPS and off >= MISFIT:
                self._warn(f"no longer fits: it predicts steps at least {off:.2g} times {word} than the last {STEPS}")
        return ratio

    def _warn(self, finding: str) -> None:
        if not self._warned:
            self._warned = True
            logger.warning("%s %s: run roll-batching doctor --calibrate %s again", self._file, finding, self._file)


def _predict(state: ModelState, plan: Plan) -> float:
    """Seconds of the passes of `plan`."""
    from roll_batching.planning.simulated_step import simulate_plan  # few jobs have measured rates

    times, config = model_times(state), gpt_of(state.chunks[0]).config
    outputs = 1 if state.value_head else state.vocab_size or 0
    recomputed = 0.0
    if config.recompute_granularity == "full":
        layers = config.recompute_num_layers if config.recompute_method == "block" else config.num_layers
        recomputed = min(1.0, (layers or 0) * plan.constraints.vpp_size / times.stage_layers)
    return simulate_plan(plan, times, recomputed=recomputed, head=6.0 * config.hidden_size * outputs).seconds
