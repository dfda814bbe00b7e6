"""A reference that shares the weights of a policy with LoRA adapters, and switches these off."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from typing import Any

from roll_batching.errors import LayoutError
from roll_batching.modeling.adapters import adapters_off
from roll_batching.planning import Plan
from roll_batching.settings import RoleSettings
from roll_batching.strategy.infer import MegatronInferStrategy
from roll_batching.strategy.model_state import ModelState, StepSettings
from roll_batching.strategy.offload import OffloadedStates, OffloadStats
from roll_batching.strategy.schedule import Packs


class BaseReference(MegatronInferStrategy):
    """Forward passes of the frozen model under a policy's adapters, in the policy's layout.

    Args:
        policy: a strategy whose model has adapters.
        config: the reference's settings; only those of its micro-batches are read.

    Raises:
        LayoutError: for a policy without adapters.
    """

    has_own_weights = False

    def __init__(self, policy: MegatronInferStrategy, config: RoleSettings) -> None:
        super().__init__(config, seed=policy.seed, temperature=policy.temperature)
        if policy.state.adapters is None:
            raise LayoutError("the policy has no adapters, so that without them it is the policy itself")
        self._policy, self._settings = policy, StepSettings.of(config, policy.layout.dp_size)
        self._batching = config.batching()
        self._batching.load_algorithms()

    @property  # type: ignore[misc]  # it has no state to set
    def state(self) -> ModelState:
        """The policy's state now, with the reference's batching."""
        return replace(self._policy.state, batching=self._batching, settings=self._settings, training=None)

    @cached_property
    def _offload(self) -> OffloadedStates:
        return self._policy._offload

    @property
    def offload_stats(self) -> OffloadStats:
        """Empty: the policy counts them."""
        return OffloadStats()

    def _run(self, plan: Plan, packs: Packs, bind: Any, **options: Any) -> list[Any]:
        with adapters_off(self.chunks):
            return super()._run(plan, packs, bind, **options)
