"""Modules that version 0.2.0 moved, for errors with the new path."""

from __future__ import annotations

MOVED = {
    "roll_batching.compat.nemo_rl": "roll_batching.integrations.nemo_rl_names",
    "roll_batching.config": "roll_batching.jobs.config",
    "roll_batching.conversion": "roll_batching.jobs.conversion",
    "roll_batching.driver.handout": "roll_batching.jobs.driver.shard_distribution",
    "roll_batching.driver": "roll_batching.jobs.driver",
    "roll_batching.engines.dialect": "roll_batching.jobs.engines.server_api",
    "roll_batching.engines": "roll_batching.jobs.engines",
    "roll_batching.launch": "roll_batching.jobs.launch",
    "roll_batching.observe": "roll_batching.jobs.observe",
    "roll_batching.packing.layout": "roll_batching.packing.pack_layout",
    "roll_batching.rl.rewards": "roll_batching.jobs.rewards",
    "roll_batching.rl": "roll_batching.jobs.rl",
    "roll_batching.strategy.settings": "roll_batching.strategy.model_state",
    "roll_batching.strategy.state": "roll_batching.strategy.model_state",
}
"""New paths by old ones. Subpackages stand before their packages: the first match counts."""


def moved_to(module: str) -> str | None:
    """The new path of `module`, or None if it has not moved."""
    for old, new in MOVED.items():
        if module == old or module.startswith(f"{old}."):
            return new + module[len(old) :]
    return None
