"""Copies everything but the output layer from a policy to a critic of the same shape and parallel layout."""

from __future__ import annotations

from typing import Any

import torch

from roll_batching.errors import LayoutError
from roll_batching.modeling.experts import expert_biases
from roll_batching.modeling.head import gpt_of
from roll_batching.modeling.pretrained import VALUE_HEAD
from roll_batching.strategy.infer import MegatronInferStrategy
from roll_batching.strategy.train import MegatronTrainStrategy
from roll_batching.strategy.weights import has_same_stages


@torch.no_grad()
def copy_trunk(policy: MegatronInferStrategy, critic: MegatronTrainStrategy) -> None:
    """Copies the policy's weights into the critic, whose value head stays. Collective.

    Raises `LayoutError` on all ranks for another layout, or parameters that the policy does not have.
    """
    policy.gather_parameters()
    critic.gather_parameters()
    with critic.layout.team.agree("copying the policy's weights to the critic"):
        if policy.layout.dims != critic.layout.dims or not has_same_stages(policy.state, critic.state):
            raise LayoutError("the policy and the critic have different parallel layouts: give both the same")
        pairs = [pair for chunks in zip(policy.chunks, critic.chunks, strict=True) for pair in _pairs(*chunks)]
    for source, target in pairs:
        target.copy_(source)
    if critic.optimizer is not None:
        critic.optimizer.reload_model_params()  # else its next step would undo the copy from its fp32 copies


def _pairs(policy_chunk: Any, critic_chunk: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The tensors of a chunk of the policy and those of the critic that receive them."""
    policy, critic = gpt_of(policy_chunk), gpt_of(critic_chunk)
    sources = dict((*policy.named_parameters(), *expert_biases(policy)))
    targets = {name: x for name, x in (*critic.named_parameters(), *expert_biases(critic)) if name != VALUE_HEAD}
    wrong = [name for name, x in targets.items() if name not in sources or sources[name].shape != x.shape]
    if wrong:
        raise LayoutError(f"{wrong[0]} of the critic is not in the policy: give both the same architecture")
    return [(sources[name], target) for name, target in targets.items()]
