"""verl's settings: names of their sections, and their defaults (`data/verl.yaml`)."""

from __future__ import annotations

from typing import Any

from roll_batching.tools.conversion.foreign_file import Tables

VERL = Tables("verl")
ACTOR, ROLLOUT, MODEL = (f"actor_rollout_ref.{name}" for name in ("actor", "rollout", "model"))
ASYNC = "verl's asynchronous trainers are not converted: async_generation_ratio lets rollouts run ahead"


def defaults_of(supervised: bool, megatron: bool) -> dict[str, Any]:
    """Verl's defaults by dotted key, of a run of one engine."""
    engine, model = ("engine", "model") if supervised else (f"{ACTOR}.megatron", MODEL)
    optimizer = VERL.defaults("optimizer", f"{'megatron' if megatron else 'fsdp'}_optimizer")
    defaults = VERL.defaults("sft" if supervised else "rl", "both")
    defaults |= {f"{'optim' if supervised else f'{ACTOR}.optim'}.{name}": value for name, value in optimizer.items()}
    if not megatron:
        return defaults | {f"{model}.enable_gradient_checkpointing": True}
    return defaults | {f"{engine}.{name}": value for name, value in VERL.defaults("megatron_layout").items()}
