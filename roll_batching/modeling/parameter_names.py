"""Names of a model's parameters in the whole model, over all pipeline stages and experts."""

from __future__ import annotations

import re
from typing import Any

import torch

_LAYER = re.compile(r"decoder\.layers\.(\d+)\.")
_EXPERT = re.compile(r"(local_experts\.|experts\.linear_fc[12]\.weight)(\d+)")


def global_name(gpt: Any, name: str) -> str:
    """The parameter name `name` with the indices of layer and expert in the whole model."""
    layer = _LAYER.match(name)
    if layer is not None:
        number = gpt.decoder.layers[int(layer[1])].layer_number - 1
        name = f"decoder.layers.{number}.{name[layer.end() :]}"
    elif not name.startswith("mtp."):
        return name
    experts = gpt.config.num_moe_experts
    if experts is None:
        return name
    first = gpt.pg_collection.ep.rank() * (experts // gpt.config.expert_model_parallel_size)
    return _EXPERT.sub(lambda match: f"{match[1]}{int(match[2]) + first}", name)


# ---- frozen embedding


def require_embedding_gradients(gpt: Any) -> None:
    """Lets gradients reach the output of a frozen embedding; does nothing on stages without one.

    Recomputation drops the graph of inputs that need no gradient: the first layers would get none.
    """
    if gpt.pre_process:
        gpt.embedding.register_forward_hook(_require_gradient)


def _require_gradient(module: Any, inputs: Any, output: torch.Tensor) -> torch.Tensor:
    return output.requires_grad_() if torch.is_grad_enabled() and not output.requires_grad else output
