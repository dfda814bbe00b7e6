"""Models of a rehearsal: subclasses of the strategies that pack on the host and compute on fake tensors."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from roll_batching.distributed import Facts
from roll_batching.jobs.config import JobConfig
from roll_batching.losses.contract import LossSpec
from roll_batching.packing.batch import PackedBatch
from roll_batching.planning import Plan
from roll_batching.samples import SampleBatch
from roll_batching.strategy import MegatronInferStrategy, MegatronTrainStrategy
from roll_batching.strategy.roles import BaseReference
from roll_batching.strategy.schedule import Packs
from roll_batching.strategy.step_inputs import pack_inputs
from roll_batching.tools.rehearsal.fake_data import ImageSizes, fake_pack, real_pack, samples_of, with_images
from roll_batching.tools.rehearsal.recorder import Recorder
from roll_batching.tools.rehearsal.rollout import rehearse_rollout

_CPU = torch.device("cpu")


class RehearsedStrategy(MegatronInferStrategy):
    """Strategy that packs real tensors on the host, as packing reads lengths and offsets, and computes on fake ones."""

    recorder: Recorder
    with_values = False
    """Whether to compute on real tensors: tests compare a rehearsal with such passes."""
    top_k = 0
    """Likely tokens of a teacher at each position, where the loss reads them."""

    images: ImageSizes | None = None
    """Sizes of the images of samples; None: samples are texts."""

    def _pack(self, facts: Facts, local: SampleBatch, plan: Plan, masks: Sequence[str] | None) -> list[PackedBatch]:
        state = self.state
        on_host = dataclasses.replace(state, layout=dataclasses.replace(state.layout, device=_CPU))
        with _disable_current_modes():
            packs = list(pack_inputs(on_host, facts, local, plan, masks))
        with self.recorder.during("inputs"):
            if self.with_values:
                return [real_pack(pack) for pack in packs]
            return [fake_pack(pack, state.device, self.top_k) for pack in packs]

    def samples(self, plan: Plan) -> SampleBatch:
        """This rank's samples of `plan`.

        Without values the teacher's fields have one token per position, to save memory; `fake_pack` widens them.
        """
        with _disable_current_modes():
            top_k = self.top_k if self.with_values else min(self.top_k, 1)
            samples = samples_of(plan, self.layout.dp_rank, top_k)
            return samples if self.images is None else with_images(samples, self.images)

    def _pack_for(self, facts: Facts, local: SampleBatch, plan: Plan, spec: LossSpec) -> Packs:
        return super()._pack_for(facts, local, plan, dataclasses.replace(spec, check=_on_host(spec.check)))

    def _require_finite(self, outputs: SampleBatch) -> SampleBatch:
        return super()._require_finite(outputs) if self.with_values else outputs

    def _run(self, plan: Plan, packs: Packs, bind: Any, **options: Any) -> list[Any]:
        phase = contextlib.nullcontext() if options.get("forward_only") else self.recorder.during("step")
        with phase:
            return super()._run(plan, packs, bind, **options)


class Policy(RehearsedStrategy, MegatronTrainStrategy):
    """Training strategy of the policy."""

    def trace_gradient_sync(self) -> None:
        """Record the gradient synchronization at the end of the schedule as a separate phase."""
        config = self.chunks[0].config
        finalize = config.finalize_model_grads_func

        def traced_finalize(*args: Any, **kwargs: Any) -> Any:
            with self.recorder.during("gradient sync"):
                return finalize(*args, **kwargs)

        config.finalize_model_grads_func = traced_finalize

    def roll_out(self, config: JobConfig) -> str:
        """Rehearse the rollouts of a step; returns a note for the report."""
        with self._evaluating():
            return rehearse_rollout(self.state, config, self.recorder, self.images, with_values=self.with_values)


class Frozen(RehearsedStrategy):
    """Frozen model with its own weights: a reference, or a teacher."""


class SharedReference(RehearsedStrategy, BaseReference):
    """Reference of a policy with adapters: the policy's own weights, without the adapters."""


def _on_host(check: Callable[..., None] | None) -> Callable[..., None] | None:
    """Wraps `check` so that it runs outside the fake modes: samples are real tensors on the host."""
    if check is None:
        return None

    def check_on_host(*args: Any) -> None:
        with _disable_current_modes():
            check(*args)

    return check_on_host
