"""`config.json` and image processor of vision-language models: as transformers reads them, and errors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from roll_batching.huggingface.config_json import translate
from roll_batching.huggingface.families import load_family, rules_of
from roll_batching.huggingface.tensors import Sizes, expected_tensors
from roll_batching.settings.model import ModelArgs, describe_model
from tests.campaigns.peer_configs.jobs import FACTS
from tests.huggingface import vision
from tests.huggingface.test_config_json import architecture_of

pytestmark = pytest.mark.models

MROPE = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]}


def nested() -> dict[str, Any]:
    """What transformers writes for the defaults of its class, with the width that these need."""
    from transformers import Qwen2_5_VLConfig

    config = Qwen2_5_VLConfig(vision_config={"out_hidden_size": 8192}, text_config={"rope_parameters": MROPE})
    config.architectures = ["Qwen2_5_VLForConditionalGeneration"]
    written: dict[str, Any] = json.loads(config.to_json_string(use_diff=False))
    return written


def flat(config: dict[str, Any]) -> dict[str, Any]:
    """The same as on the hub: the text model's fields at the top, in the spelling of transformers 4."""
    text = {name: value for name, value in config["text_config"].items() if name not in ("rope_parameters", "dtype")}
    rope = {"rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}, "rope_theta": 1e6}
    beside = {name: value for name, value in config.items() if name != "text_config"}
    return {**text, **beside, **rope, "vision_token_id": 151654, "torch_dtype": "bfloat16"}


def test_both_spellings_have_the_tensors_of_transformers(report: Any) -> None:
    from transformers import AutoConfig, Qwen2_5_VLForConditionalGeneration

    config = nested()
    architecture = architecture_of(config)
    assert architecture == architecture_of(flat(config))
    assert architecture.vision.mrope_section == (16, 24, 24)
    family = load_family("qwen2_5_vl")
    found = expected_tensors(rules_of(family, architecture), Sizes.of(architecture))
    known = {name: value for name, value in config.items() if name not in ("transformers_version", "architectures")}
    with torch.device("meta"):
        model = Qwen2_5_VLForConditionalGeneration(AutoConfig.for_model(**known))
    wanted = {vision.hub_name(name, model): tuple(tensor.shape) for name, tensor in model.named_parameters()}
    assert found == wanted
    report(f"{len(found):,} tensors, {sum(torch.Size(shape).numel() for shape in found.values()):,} parameters")


@pytest.mark.parametrize("name", ["Qwen3-VL-4B-Thinking", "Qwen3-VL-32B-Thinking", "Qwen3-VL-30B-A3B-Instruct"])
def test_published_models_have_the_tensors_of_transformers(name: str, report: Any) -> None:
    """Experts' matrices are transposed in transformers 5."""
    from transformers import AutoConfig, AutoModelForImageTextToText

    config = FACTS["configs"][f"Qwen/{name}"]
    architecture, family = architecture_of(config), load_family(config["model_type"])
    found = expected_tensors(rules_of(family, architecture), Sizes.of(architecture))
    known = {name: value for name, value in config.items() if name != "architectures"}
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(AutoConfig.for_model(**known))
    wanted = {name: tuple(tensor.shape) for name, tensor in model.named_parameters()}
    wanted = {name: (shape[0], *shape[:0:-1]) if ".experts." in name else shape for name, shape in wanted.items()}
    assert found == wanted
    written = json.loads(model.config.to_json_string(use_diff=False)) | {"architectures": config["architectures"]}
    assert architecture_of(written) == architecture
    report(f"{name}: {len(found):,} tensors, {sum(torch.Size(shape).numel() for shape in found.values()):,} parameters")


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("part", "changes", "words"),
    [
        ("vision_config", {"deepstack_visual_indexes": [24]}, "must be ascending layers below depth=24"),
        ("vision_config", {"deepstack_visual_indexes": [5, 3]}, "must be ascending layers"),
        ("vision_config", {"num_position_embeddings": 2300}, "num_position_embeddings must be a square"),
        ("vision_config", {"window_size": 112}, "vision_config.window_size: 112 is an unknown field"),
        ("text_config", {"rope_scaling": {"mrope_interleaved": False}}, "rope_scaling.mrope_interleaved must be true"),
        ("text_config", {"rope_scaling": {"mrope_section": [24, 24, 16]}}, "height and width take turns with time"),
        ("text_config", {"num_hidden_layers": 2}, "has outputs for 3 layers, and the model 2"),
    ],
)
def test_refused_fields_of_qwen3_vl(part: str, changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    config = FACTS["configs"]["Qwen/Qwen3-VL-4B-Thinking"]
    (tmp_path / "config.json").write_text(json.dumps({**config, part: {**config[part], **changes}}))
    found = describe_model(str(tmp_path))
    assert found is not None and words in "; ".join(found.problems), found.problems


@pytest.mark.bad_input
def test_stages_without_the_first_layers_are_refused() -> None:
    from roll_batching.settings import MegatronConfig
    from roll_batching.settings.support import ROLE_REFUSALS, Parts, refused_pairs

    architecture = architecture_of(FACTS["configs"]["Qwen/Qwen3-VL-4B-Thinking"])

    def errors(**layout: Any) -> list[str]:
        parts = Parts(ModelArgs(), architecture, MegatronConfig(**layout), "local")
        return [row.error(parts) for row in refused_pairs(ROLE_REFUSALS, parts)]

    assert errors(pipeline_model_parallel_size=12) == []
    (error,) = errors(pipeline_model_parallel_size=18)
    assert "pipeline_model_parallel_size: leaves the first model chunk fewer layers" in error
    assert errors(pipeline_model_parallel_size=2, num_layers_in_first_pipeline_stage=2) == [error]


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"vision_config": None}, "vision_config: None must be an object"),
        ({"vision_config": {"out_hidden_size": 1}}, "vision_config.out_hidden_size: 1 must be hidden_size"),
        ({"vision_config": {"hidden_act": "gelu"}}, "vision_config.hidden_act: 'gelu' is not supported"),
        ({"vision_config": {"in_channels": 1}}, "vision_config.in_channels: 1 is not supported"),
        ({"vision_config": {"deepstack": [1]}}, "vision_config.deepstack: .* is an unknown field"),
        ({"audio_config": {}}, "audio_config: {} is an unknown field"),
        ({"architectures": ["Qwen2_5_VLModel"]}, "only Qwen2_5_VLForConditionalGeneration is trained"),
    ],
)
def test_refused_fields(changes: dict[str, Any], words: str) -> None:
    import re

    config = nested()
    if isinstance(changes.get("vision_config"), dict):
        changes = {"vision_config": config["vision_config"] | changes["vision_config"]}
    for one in (config, flat(config)):
        assert re.search(words, "; ".join(translate({**one, **changes}).problems))


PROCESSOR = {"patch_size": 4, "merge_size": 2, "temporal_patch_size": 2, "image_mean": [0.5, 0.4, 0.3]}


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("file", "content", "words"),
    [
        ("preprocessor_config.json", PROCESSOR, ""),
        ("processor_config.json", {"image_processor": PROCESSOR}, ""),
        ("processor_config.json", {"image_processor": 3}, "image_processor: 3"),
        ("preprocessor_config.json", PROCESSOR | {"patch_size": 14}, "patch_size: 14 of its image processor"),
        ("preprocessor_config.json", PROCESSOR | {"do_normalize": False}, "do_normalize: False"),
        ("preprocessor_config.json", PROCESSOR | {"rescale_factor": "1/255"}, "rescale_factor: '1/255'"),
        ("preprocessor_config.json", PROCESSOR | {"rescale_factor": 1.0}, "rescale_factor: 1.0"),
        ("preprocessor_config.json", PROCESSOR | {"image_mean": "a"}, "image_mean: 'a' is not possible"),
        ("preprocessor_config.json", PROCESSOR | {"image_std": [0.1, 0.2]}, "image_std"),
    ],
)
def test_image_processors(file: str, content: dict[str, Any], words: str, tmp_path: Path) -> None:
    vision.write_model(tmp_path)
    (tmp_path / file).write_text(json.dumps(content))
    found = describe_model(str(tmp_path))
    assert found is not None
    if words:
        assert words in "; ".join(found.problems)
        return
    assert found.problems == [] and found.architecture["vision"]["image_mean"] == (0.5, 0.4, 0.3)


@pytest.mark.bad_input
def test_layers_of_full_attention_are_numbers(tmp_path: Path) -> None:
    vision.write_model(tmp_path)
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    config["vision_config"]["fullatt_block_indexes"] = 3
    file.write_text(json.dumps(config))
    found = describe_model(str(tmp_path))
    assert found is not None and "vision.fullatt_block_indexes: 3 is not possible" in "; ".join(found.problems)
