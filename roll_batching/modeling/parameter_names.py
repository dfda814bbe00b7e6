"""Names of a model's parameters in the whole model, over all pipeline stages and experts."""

from __future__ import annotations

import re
from typing import Any

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
