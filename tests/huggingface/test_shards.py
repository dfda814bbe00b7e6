"""Tensor-parallel shards of a family's rules cover every tensor of its files once."""

from __future__ import annotations

import math

import pytest

from roll_batching.huggingface.families import load_family, rules_of
from roll_batching.huggingface.tensors import Sizes, local_shape, pieces
from tests.huggingface.published import PUBLISHED
from tests.huggingface.test_config_json import architecture_of

SHARDED = ["Llama-3.2-1B", "Qwen3-30B-A3B", "GLM-4.5-Air", "DeepSeek-V3", "Qwen3-Next-80B-A3B-Instruct"]


@pytest.mark.parametrize("name", SHARDED)
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_shards_cover_every_tensor_once(name, ranks):
    """The vocabulary of Llama 3.2 plus 3 divides among no ranks."""
    config = PUBLISHED[name] | {"num_hidden_layers": 1, "vocab_size": PUBLISHED[name]["vocab_size"] + 3}
    fewer = {"num_experts": 2} if "num_experts" in config else {}
    if "n_routed_experts" in config:
        fewer = {"n_routed_experts": 16, "first_k_dense_replace": 0}
    if "full_attention_interval" in config:
        fewer |= {"num_hidden_layers": 2, "full_attention_interval": 2, "num_key_value_heads": 4}
    architecture = architecture_of(config | fewer)
    sizes = Sizes.of(architecture)
    for rule in rules_of(load_family(config["model_type"]), architecture).values():
        covered: dict[str, int] = {}
        for rank in range(1 if rule.join == "copy" else ranks):
            end = 0
            for piece in pieces(rule, sizes, rank, ranks):
                assert piece.at.start == end
                end = piece.at.stop
                shape = dict((n, sizes.shape(s)) for n, s in rule.theirs)[piece.name]
                width = math.prod(shape[1:])
                columns = piece.columns or slice(0, width)
                covered[piece.name] = covered.get(piece.name, 0) + (end - piece.at.start) * (
                    columns.stop - columns.start
                )
            assert end == local_shape(rule, sizes, ranks)[0] or rule.join == "vocabulary"
        for tensor, shape in rule.theirs:
            count = 1
            for size in sizes.shape(shape):
                count *= size
            assert covered[tensor] == count, tensor
