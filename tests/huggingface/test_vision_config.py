"""`config.json` of text models beside vision encoders is translated as transformers reads it."""

from __future__ import annotations

import math

import pytest

from roll_batching.huggingface.config_json import translate
from roll_batching.huggingface.families import load_family, rules_of
from roll_batching.huggingface.tensors import Sizes, expected_tensors
from tests.huggingface.published_vision import WITH_VISION
from tests.huggingface.test_config_json import architecture_of, counted_by_transformers

pytestmark = pytest.mark.models


@pytest.mark.parametrize("name", WITH_VISION)
def test_text_models_beside_a_vision_encoder(name, report):
    """All tensors of the text model, by transformers, under the names of the whole directory."""
    from transformers import AutoConfig

    config = WITH_VISION[name]
    architecture, family = architecture_of(config), load_family(config["model_type"])
    tensors = expected_tensors(rules_of(family, architecture), Sizes.of(architecture))
    count = sum(math.prod(shape) for shape in tensors.values())
    text = AutoConfig.for_model(**config["text_config"]).to_dict()
    assert count == counted_by_transformers(text)
    assert not any(name.startswith(("model.layers", "model.embed")) for name in tensors)
    assert architecture == architecture_of(config | {"text_config": {**text, "architectures": None}})
    report(f"{name}: {len(tensors):,} tensors, {count:,} parameters of the text model")


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"text_config": None}, "text_config: None must be an object"),
        ({"text_config": {"model_type": "llama"}}, "text_config.model_type: 'llama' is not supported"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings contradicts text_config.tie_word_embeddings"),
        ({"audio_config": {}}, "audio_config: {} is an unknown field of model_type qwen3_5"),
        ({"text_config": {"attn_output_gate": False}}, "attn_output_gate: False is not supported, only True"),
        ({"text_config": {"mamba_ssm_dtype": "bfloat16"}}, "mamba_ssm_dtype: 'bfloat16' is not supported"),
        ({"architectures": ["Qwen3_5ForTokenClassification"]}, "only Qwen3_5ForConditionalGeneration is trained"),
    ],
)
def test_refused_beside_a_vision_encoder(changes, words):
    config = WITH_VISION["Qwen3.5-27B"]
    text = changes.get("text_config", {})
    inner = None if text is None else {**config["text_config"], "tie_word_embeddings": False, **text}
    assert words in "; ".join(translate({**config, **changes, "text_config": inner}).problems)
