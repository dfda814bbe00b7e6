"""Abuses of frozen layers, mixtures of experts, and checkpoints in which one rank fails."""

from __future__ import annotations

from typing import Any

from tests.campaigns.abuse.directories import earlier
from tests.campaigns.abuse.runner import DONE, FAILED, REFUSED, SAVING, TRAIN, Abuse
from tests.campaigns.abuse.scenes import RESUMING, not_begun

PREFIX = "actor_train.model_args.freeze_module_prefix"
FROZEN: dict[str, Any] = {PREFIX: "embedding,decoder.layers.0"}
LAYOUT = "actor_train.strategy_args.strategy_config"
EXPERTS: dict[str, Any] = {
    "actor_train.model_args.architecture.moe": {"num_experts": 4, "router_topk": 2, "ffn_hidden_size": 32}
}
FAILING = """
import torch.distributed as dist
from roll_batching.losses import LossOutput
from megatron.core.dist_checkpointing.strategies import torch as strategies
class Fails:
    masks = ("response_mask",)
    def token_loss(self, tokens):
        if dist.get_rank() == RANK:
            def fail(*arguments, **options):
                raise OSError(5, "Input/output error")
            strategies.mcore_to_pyt_state_dict = fail
        return LossOutput(-tokens.mean(tokens.log_probs))
"""
"""Loss after which Megatron's save fails on one rank, between two collectives."""
TOLD = "and the other ranks cannot be told: Input/output error (EIO)"


def _resumed(name: str, override: str, code: int, *words: str, steps: int | None = None) -> Abuse:
    return Abuse(
        name=f"frozen: {name}",
        code=code,
        settings={**FROZEN, **RESUMING},
        arguments=(*TRAIN, override),
        words=words,
        scene=earlier("frozen", FROZEN, steps=steps),
        warnings=int(code == DONE),  # the changed max_steps
    )


def _fails(rank: int, **settings: Any) -> Abuse:
    kind = "asynchronous save" if settings else "save"
    return Abuse(
        name=f"frozen: rank {rank} fails inside Megatron's {kind}",
        code=FAILED,
        settings={**FROZEN, **SAVING, "loss_function": "failing:Fails", **settings},
        files={"failing.py": FAILING.replace("RANK", str(rank))},
        words=(f"failed on rank {rank}, {TOLD}",),
    )


FREEZING = [
    _resumed("resumed with the same layers", "max_steps=3", DONE, steps=3),
    _resumed("resumed with other layers", f"{PREFIX}=decoder.layers.1", FAILED, "optimizer state of other trained"),
    _resumed("resumed with none", f"{PREFIX}=null", FAILED, "Freeze the same ones"),
    Abuse(name="frozen: saved in the background", code=DONE, settings={**FROZEN, **SAVING, "async_save": True}),
    Abuse(
        name="frozen: all of one pipeline stage",
        code=DONE,
        settings={**SAVING, **FROZEN, LAYOUT: {"pipeline_model_parallel_size": 2}},
    ),
    _fails(0),
    _fails(1),
    _fails(1, async_save=True),
    Abuse(name="experts: over two ranks", code=DONE, settings={**EXPERTS, LAYOUT: {"expert_model_parallel_size": 2}}),
    Abuse(
        name="experts: TransformerEngine's on the CPU",
        code=REFUSED,
        settings={**EXPERTS, LAYOUT: {"transformer_impl": "transformer_engine"}},
        words=("the job cannot run here", "set transformer_impl: local"),
        scene=not_begun,
    ),
]
