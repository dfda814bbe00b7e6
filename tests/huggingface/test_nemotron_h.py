"""Nemotron-H: published files, refusals, and equality with transformers in every layout."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from roll_batching.huggingface.config_json import translate
from roll_batching.huggingface.families import load_family, rules_of
from roll_batching.huggingface.tensors import Sizes, expected_tensors, local_shape, pieces
from roll_batching.settings import ArchitectureConfig
from tests.huggingface import tiny
from tests.huggingface.published_nemotron import NEMOTRON
from tests.huggingface.test_config_json import architecture_of, counted_by_transformers
from tests.huggingface.test_equality import EVERYTHING, TRAINED, _check
from tests.support.layouts import Layout
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.models

NANO, SUPER = "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", "NVIDIA-Nemotron-3-Super-120B-A12B-BF16"
BILLIONS = {"NVIDIA-Nemotron-Nano-12B-v2": 12.3, NANO: 31.6, SUPER: 120.7}
"""Parameters; the publisher says 12, 31.6 and 120."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], tuple[Path, Any]]]:
    made: dict[str, tuple[Path, Any]] = {}

    def model(name: str) -> tuple[Path, Any]:
        if name not in made:
            folder = tmp_path_factory.mktemp("models") / name
            made[name] = folder, tiny.write_model(folder, name)
        return made[name]

    yield model


@pytest.mark.parametrize("name", NEMOTRON)
def test_published_files(name: str, report: Callable[[str], None]) -> None:
    architecture = architecture_of(NEMOTRON[name])
    assert architecture.hybrid is not None and architecture.norm_epsilon == 1e-5
    tensors = expected_tensors(rules_of(load_family("nemotron_h"), architecture), Sizes.of(architecture))
    count = sum(math.prod(shape) for shape in tensors.values())
    report(f"{name}: {len(tensors):,} tensors, {count:,} parameters")
    assert count == counted_by_transformers(NEMOTRON[name]) and round(count / 1e9, 1) == BILLIONS[name]


@pytest.mark.parametrize("name", NEMOTRON)
def test_the_spelling_of_transformers_means_the_same(name: str) -> None:
    from transformers import AutoConfig

    old = NEMOTRON[name]
    config = AutoConfig.for_model(**{key: value for key, value in old.items() if key != "transformers_version"})
    config.architectures = old["architectures"]
    new = json.loads(config.to_json_string(use_diff=False))
    assert "hybrid_override_pattern" not in new and "num_hidden_layers" not in new
    assert architecture_of(new) == architecture_of(old)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_shards_cover_every_tensor_once(ranks: int) -> None:
    fewer = {"hybrid_override_pattern": "ME*-", "num_hidden_layers": 4, "n_routed_experts": 2, "num_key_value_heads": 4}
    architecture = architecture_of(NEMOTRON[SUPER] | fewer | {"num_experts_per_tok": 2})
    sizes = Sizes.of(architecture)
    for rule in rules_of(load_family("nemotron_h"), architecture).values():
        covered: dict[str, int] = {}
        for rank in range(1 if rule.join == "copy" else ranks):
            end = 0
            for piece in pieces(rule, sizes, rank, ranks):
                assert piece.at.start == end
                end = piece.at.stop
                shape = dict((n, sizes.shape(s)) for n, s in rule.theirs)[piece.name]
                columns = piece.columns or slice(0, math.prod(shape[1:]))
                rows = piece.at.stop - piece.at.start
                covered[piece.name] = covered.get(piece.name, 0) + rows * (columns.stop - columns.start)
            assert end == local_shape(rule, sizes, ranks)[0]
        for tensor, shape in rule.theirs:
            assert covered[tensor] == math.prod(sizes.shape(shape)), tensor


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hybrid_override_pattern": "MXE"}, "hybrid_override_pattern: 'MXE' must have a letter"),
        ({"hybrid_override_pattern": None}, "hybrid_override_pattern: None must have a letter"),
        ({"hybrid_override_pattern": "*-", "num_hidden_layers": 2}, "has no M"),
        ({"num_hidden_layers": 51}, "num_hidden_layers: 51 contradicts the 52 layers"),
        ({"layers_block_type": ["mamba"] * 52}, "hybrid_override_pattern contradicts layers_block_type"),
        ({"layers_block_type": ["conv"]}, "layers_block_type must name mamba"),
        ({"layers_block_type": "mamba"}, "layers_block_type must name mamba"),
        ({"mlp_hidden_act": "silu"}, "mlp_hidden_act: 'silu' is not supported, only 'relu2'"),
        ({"use_conv_bias": False}, "use_conv_bias: False is not supported"),
        ({"use_bias": True}, "use_bias: True is not supported"),
        ({"attention_bias": True}, "attention_bias: True is not supported"),
        ({"n_shared_experts": 2}, "n_shared_experts: 2 is not supported, only 1"),
        ({"norm_topk_prob": False}, "norm_topk_prob: false"),
        ({"n_group": 8, "topk_group": 2}, "Megatron-Core ranks groups"),
        ({"time_step_limit": [0.0, 0.1]}, "time_step_limit: [0.0, 0.1] is not supported"),
        ({"norm_eps": 1e-6}, "layer_norm_epsilon and norm_eps are one field, and differ"),
        ({"sliding_window": 512}, "sliding_window: 512 is not supported"),
        ({"mamba_rms_norm": False}, "mamba_rms_norm: False is an unknown field"),
        ({"quantization_config": {"quant_algo": "FP8"}}, "quantization_config: {'quant_algo': 'FP8'}"),
    ],
)
def test_refused_fields(changes: dict[str, Any], words: str) -> None:
    assert any(words in problem for problem in translate(NEMOTRON[NANO] | changes).problems)


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hybrid": {"pattern": "M*"}}, "hybrid.pattern has 2 letters for 4 layers"),
        ({"hybrid": {"pattern": "M*-a"}}, "letters M, \\*, - and E only"),
        ({"hybrid": {"mamba_num_groups": 3}}, "mamba_num_heads must be a multiple of mamba_num_groups=3"),
        ({"hybrid": {"pattern": "M*-M"}}, "moe and the letter E"),
        ({"moe": None}, "moe and the letter E"),
        ({"moe": {"num_experts": 4}}, "moe.layer_freq must have 1 for each letter E"),
        ({"qk_layernorm": True}, "qk_layernorm has no effect with hybrid"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling has no effect with hybrid"),
        ({"rotary_percent": 0.5}, "rotary_percent has no effect with hybrid"),
        ({"activation": "gelu_tanh"}, "activation has no effect with hybrid"),
    ],
)
def test_refused_settings(changes: dict[str, Any], words: str) -> None:
    hybrid = {"pattern": "M*-E", "mamba_num_heads": 4, "mamba_head_dim": 4, "mamba_num_groups": 2, "mamba_state_dim": 4}
    values: dict[str, Any] = {
        **{"vocab_size": 9, "hidden_size": 8, "num_layers": 4, "num_attention_heads": 2, "hybrid": hybrid},
        "moe": {"num_experts": 4, "layer_freq": [0, 0, 0, 1]},
    }
    ArchitectureConfig.model_validate(values)
    if "hybrid" in changes:
        changes = {"hybrid": hybrid | changes["hybrid"]}
    with pytest.raises(ValidationError, match=words):
        ArchitectureConfig.model_validate(values | changes)


def test_one_rank(models: Any, report: Callable[[str], None]) -> None:
    """Log-probs, generation with a cache of states, and three training steps."""
    names = ("nemotron_h", "nemotron_h_moe", "nemotron_h_latent")
    _check(models, [(name, Layout(), EVERYTHING) for name in names], report)


def test_tensor_and_context_parallelism(models: Any, report: Callable[[str], None]) -> None:
    """Both divide the groups of Mamba layers."""
    _check(models, [("nemotron_h", Layout(tp=2, sp=True), TRAINED), ("nemotron_h", Layout(cp=2), TRAINED)], report)


@pytest.mark.slow
def test_pipelines_and_experts(models: Any, report: Callable[[str], None]) -> None:
    stages = Layout(pp=2, layers=8, first=3)
    virtual = Layout(pp=2, vpp=2, layers=8, pattern="Ett|tt|t|tttL")
    cases = [("nemotron_h", Layout(pp=2, vpp=2)), ("nemotron_h_moe", virtual), ("nemotron_h", stages)]
    experts = [Layout(dp=2, ep=2, moe=True), Layout(tp=2, sp=True, moe=True)]
    cases += [(name, layout) for name in ("nemotron_h_moe", "nemotron_h_latent") for layout in experts]
    _check(models, [(name, layout, TRAINED) for name, layout in cases], report)


@pytest.mark.slow
def test_tensor_with_context_and_expert_parallelism(models: Any, report: Callable[[str], None]) -> None:
    layouts = [Layout(tp=2, sp=True, cp=2, moe=True), Layout(tp=2, sp=True, dp=2, ep=2, moe=True)]
    _check(models, [("nemotron_h_latent", layout, TRAINED) for layout in layouts], report)


@pytest.mark.slow
@pytest.mark.parametrize("layout", [Layout(), Layout(tp=2, sp=True), Layout(cp=2), Layout(pp=2)], ids=str)
def test_every_gradient_is_that_of_transformers(
    layout: Layout, models: Any, tmp_path: Path, report: Callable[[str], None]
) -> None:
    """Steps of AdamW hide the scale of a gradient. Experts' gradients are exported as experts are."""
    from safetensors.torch import load_file

    name = "nemotron_h" if layout.ranks > 1 else "nemotron_h_latent"
    folder, model = models(name)
    run_ranks(layout.ranks, "tests.huggingface.ranks:gradients_written", (str(folder), layout, str(tmp_path / "found")))
    found = {}
    for file in (tmp_path / "found").glob("*.safetensors"):
        found |= load_file(file)
    tiny.write_gradients(model, tmp_path / "expected")
    expected = load_file(tmp_path / "expected" / "model.safetensors")
    assert found.keys() == expected.keys()
    gaps = {key: float((found[key] - expected[key]).norm() / expected[key].norm().clamp(min=1e-8)) for key in expected}
    worst = max(gaps, key=gaps.__getitem__)
    report(f"{name} {layout}: gradients differ by at most {gaps[worst]:.1e} ({worst})")
    assert gaps[worst] < 1e-5, gaps


@pytest.mark.parametrize("mode", ["padded", "dynamic"])
def test_other_modes_are_packed(mode: str, models: Any, report: Callable[[str], None]) -> None:
    folder, model = models("nemotron_h_moe")
    (rows,) = run_ranks(1, "tests.huggingface.ranks:log_probs_by", (str(folder), Layout(), "dense", mode))
    with torch.no_grad():
        pairs = zip(rows, tiny.log_probs(model), strict=True)
        gap = max(float((one - other).abs().max()) for one, other in pairs if len(one))
    report(f"nemotron_h_moe: {mode} log-probs differ from transformers by {gap:.1e}")
    assert gap < 1e-5
