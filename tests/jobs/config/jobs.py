"""A valid job of two roles, and copies of it with changes."""

from __future__ import annotations

import copy
from typing import Any

from tests.support.tiny_job import with_changes

MODEL = {
    "vocab_size": 128,
    "hidden_size": 64,
    "num_layers": 4,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "ffn_hidden_size": 96,
}
BASE = {
    "actor_train": {
        "model_args": {"architecture": MODEL},
        "device_mapping": "list(range(0,8))",
        "use_sequence_packing": True,
        "sequence_packing_args": {"max_packed_sequence_length_train": 1024},
        "strategy_args": {"strategy_name": "megatron_train", "strategy_config": {}},
    },
    "reference": {"strategy_args": {"strategy_name": "megatron_infer"}},
}


def changed(changes: dict[str, Any]) -> dict[str, Any]:
    """The job with other values at dotted paths."""
    return with_changes(copy.deepcopy(BASE), changes, separator=".")
