"""The reference on the devices of the policy: a frozen copy, or the policy without its adapters."""

from __future__ import annotations

from roll_batching.jobs.config import JobConfig
from roll_batching.jobs.config.objective_rules import wants_reference
from roll_batching.jobs.steps.plan_consensus import prefix_errors
from roll_batching.strategy import MegatronInferStrategy


def make_reference(config: JobConfig, policy: MegatronInferStrategy) -> MegatronInferStrategy | None:
    """The reference that the loss needs, or None: a copy of `policy` as it is now. Collective."""
    if config.reference is None or not wants_reference(config):
        return None
    if policy.state.adapters is not None:
        from roll_batching.strategy.roles import BaseReference  # few jobs have adapters

        return BaseReference(policy, config.reference)
    reference = MegatronInferStrategy(config.reference, seed=config.seed, temperature=policy.temperature)
    with prefix_errors("reference"):
        reference.initialize(weights=False)
        reference.copy_weights_from(policy)
    return reference
