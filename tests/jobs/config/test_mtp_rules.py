"""Rules of heads of multi-token prediction: what is refused before a model is built, and at which key."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from roll_batching.jobs.config import ConfigFileError, config_from_dict
from tests.huggingface.published import PUBLISHED
from tests.jobs.config.jobs import changed

pytestmark = pytest.mark.config

LAYOUT = "actor_train.strategy_args.strategy_config"
ARCHITECTURE = "actor_train.model_args.architecture"
HEADS = f"{LAYOUT}.mtp_num_layers"


def test_heads_by_either_key() -> None:
    for key in (HEADS, f"{ARCHITECTURE}.mtp_num_layers"):
        role = config_from_dict(changed({key: 2})).actor_train
        given = role.strategy_args.strategy_config.mtp_num_layers
        assert role.model_args.architecture_to_build(given).mtp_num_layers == 2
        assert role.model_args.architecture_to_build(0).mtp_num_layers == 0, "a model that does not train"
    role = config_from_dict(changed({f"{ARCHITECTURE}.mtp_num_layers": 2, HEADS: 0})).actor_train
    assert role.model_args.architecture_to_build(0).mtp_num_layers == 0


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("changes", "blamed", "words"),
    [
        ({HEADS: -1}, HEADS, "greater than or equal to 0|at least 0"),
        ({HEADS: "one"}, HEADS, "integer|number"),
        ({HEADS: 1, f"{LAYOUT}.mtp_loss_scaling_factor": float("nan")}, f"{LAYOUT}.mtp_loss_scaling_factor", ""),
        (
            {HEADS: 1, f"{LAYOUT}.mtp_loss_scaling_factor": -0.1},
            f"{LAYOUT}.mtp_loss_scaling_factor",
            "at least 0|equal",
        ),
        ({HEADS: 1, f"{LAYOUT}.mtp_detach_heads": 3}, f"{LAYOUT}.mtp_detach_heads", "boolean|true or false"),
        ({f"{LAYOUT}.mtp_num_layer": 1}, f"{LAYOUT}.mtp_num_layer", "mtp_num_layers"),
        ({f"{LAYOUT}.mtp_detach_heads": True}, f"{LAYOUT}.mtp_detach_heads", "no effect without heads"),
        ({f"{LAYOUT}.mtp_loss_scaling_factor": 0.2}, f"{LAYOUT}.mtp_loss_scaling_factor", "no effect without heads"),
        ({HEADS: 1, "actor_train.model_args.lora_target": "all-linear"}, HEADS, "lora_target freezes the model"),
        ({HEADS: 1, f"{ARCHITECTURE}.sliding_window": 64}, HEADS, "not supported with sliding_window"),
        ({HEADS: 1, f"{LAYOUT}.transformer_impl": "transformer_engine"}, HEADS, "set transformer_impl: local"),
        (
            {
                HEADS: 1,
                f"{ARCHITECTURE}.tie_word_embeddings": True,
                f"{LAYOUT}.pipeline_model_parallel_size": 2,
                f"{ARCHITECTURE}.num_layers": 2,
            },
            HEADS,
            "tied embeddings need one pipeline stage",
        ),
    ],
)
def test_refused_with_its_key(changes: dict[str, Any], blamed: str, words: str) -> None:
    import re

    with pytest.raises(ConfigFileError) as caught:
        config_from_dict(changed(changes))
    found = {".".join(map(str, problem.path)): problem.message for problem in caught.value.problems}
    assert blamed in found, found
    assert re.search(words, found[blamed]), found


@pytest.mark.bad_input
def test_a_directory_must_have_the_heads(tmp_path: Path) -> None:
    name = next(name for name, config in PUBLISHED.items() if config.get("num_nextn_predict_layers") == 1)
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED[name]))
    given = {"pretrain": str(tmp_path), ARCHITECTURE: None, "reference.model_args.architecture": None}
    found: dict[int, str] = {}
    for heads in (1, 2):
        try:
            config_from_dict(changed({**given, HEADS: heads}))
        except ConfigFileError as error:
            found[heads] = str(error)
    assert "has 1 heads of multi-token prediction" in found[2]
    assert "heads of multi-token prediction" not in found.get(1, "")
