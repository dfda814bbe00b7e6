"""`config.json` of text models beside vision encoders is translated as transformers reads it."""

from __future__ import annotations

import math

import pytest
import torch

from roll_batching.huggingface.config_json import translate
from roll_batching.huggingface.families import load_family, rules_of
from roll_batching.huggingface.tensors import Sizes, expected_tensors
from tests.huggingface.published_vision import WITH_VISION
from tests.huggingface.test_config_json import architecture_of, counted_by_transformers

pytestmark = pytest.mark.models


@pytest.mark.parametrize("name", WITH_VISION)
def test_text_models_beside_a_vision_encoder(name, report):
    """All tensors of the text model, by transformers, under the names of the whole directory."""
    from transformers import AutoConfig, AutoModel

    config = WITH_VISION[name]
    architecture, family = architecture_of(config), load_family(config["model_type"])
    tensors = expected_tensors(rules_of(family, architecture), Sizes.of(architecture))
    count = sum(math.prod(shape) for shape in tensors.values())
    text = AutoConfig.for_model(**config["text_config"]).to_dict()
    assert count == counted_by_transformers(text)
    assert not any(name.startswith(("model.layers", "model.embed")) for name in tensors)
    assert architecture == architecture_of(config | {"text_config": {**text, "architectures": None}})
    report(f"{name}: {len(tensors):,} tensors, {count:,} parameters of the text model")
    if not name.startswith("Qwen3.5"):
        return
    architecture = architecture_of(config, vision_encoder=True)
    with torch.device("meta"):
        encoder = AutoModel.from_config(AutoConfig.for_model(**config).vision_config)
    wanted = {f"model.visual.{key}": tuple(tensor.shape) for key, tensor in encoder.named_parameters()}
    assert expected_tensors(rules_of(family, architecture), Sizes.of(architecture)) == {**tensors, **wanted}


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
    for with_encoder in (False, inner is not None):
        found = translate({**config, **changes, "text_config": inner}, vision_encoder=with_encoder)
        assert words in "; ".join(found.problems)


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("part", "changes", "words"),
    [
        ("vision_config", {"deepstack_visual_indexes": [8]}, "vision_config.deepstack_visual_indexes: [8] is not"),
        ("vision_config", {"out_hidden_size": 3584}, "out_hidden_size: 3584 must be hidden_size of the text, 5120"),
        ("text_config", {"rope_parameters": {"mrope_interleaved": False}}, "mrope_interleaved must be true"),
    ],
)
def test_fields_of_an_encoder_are_read_on_request(part, changes, words):
    config = WITH_VISION["Qwen3.5-27B"]
    config = {**config, part: {**config[part], **changes}}
    assert translate(config).problems == []
    assert words in "; ".join(translate(config, vision_encoder=True).problems)
