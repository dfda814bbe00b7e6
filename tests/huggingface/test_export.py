"""A model that is written: the bits that were read, in every layout, and what training made of it."""

from __future__ import annotations

import filecmp
import json

import pytest
import torch

from tests.huggingface import tiny
from tests.support.layouts import Layout
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.models

LAYOUTS = [Layout(tp=2, sp=True, pp=2), Layout(pp=2, vpp=2, cp=2), Layout(tp=2, dp=2, distopt=True)]
UNEVEN = [
    Layout(tp=2, sp=True, pp=2, layers=4, first=1),
    Layout(pp=2, vpp=2, dp=2, distopt=True, layers=4, pattern="Ett|t|t|L"),
    Layout(pp=4, layers=4, pattern="E|tt|tt|L"),
]
EXPERT_LAYOUTS = [Layout(tp=2, sp=True, dp=2, ep=2, moe=True)]


def tensors(folder):
    """All tensors of a directory, and the files that they lie in."""
    from safetensors.torch import load_file

    index = folder / "model.safetensors.index.json"
    files = set(json.loads(index.read_text())["weight_map"].values()) if index.exists() else {"model.safetensors"}
    assert {file.name for file in folder.glob("*.safetensors")} == files
    return {name: tensor for file in files for name, tensor in load_file(folder / file).items()}, files


def check_equal(written, read):
    found, files = tensors(written)
    expected, _ = tensors(read)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype is tensor.dtype and torch.equal(found[name], tensor), name
    for name in ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        assert filecmp.cmp(written / name, read / name, shallow=False)
    assert not list(written.parent.glob("*.partial"))
    return files


@pytest.mark.parametrize(
    ("names", "layouts"),
    [
        (["qwen3", "qwen2"], LAYOUTS),
        (["deepseek_v3", "qwen3_next"], EXPERT_LAYOUTS),
        pytest.param(["qwen3_moe", "glm4_moe", "minimax_m2"], EXPERT_LAYOUTS, marks=pytest.mark.slow),
        (["nemotron_h"], [Layout(tp=2, sp=True, dp=2)]),
        pytest.param(["nemotron_h_moe", "nemotron_h_latent"], EXPERT_LAYOUTS, marks=pytest.mark.slow),
        pytest.param(["qwen3", "qwen2"], UNEVEN, marks=pytest.mark.slow),
        (["gpt_oss"], [Layout(pp=2, dp=2, ep=2, moe=True)]),
        pytest.param(["gemma3", "gemma3_vision", "qwen3_5_vision"], [Layout(tp=2, pp=2)], marks=pytest.mark.slow),
        (["qwen3_5_moe_vision"], EXPERT_LAYOUTS),
    ],
    ids=[
        "dense",
        "experts",
        "more experts",
        "hybrid",
        "hybrid with experts",
        "uneven stages",
        "stacked experts",
        "vision encoders",
        "vision encoders and experts",
    ],
)
def test_what_was_read_is_written_to_the_bit(tmp_path, names, layouts, report):
    for name in names:
        tiny.write_model(tmp_path / name, name, torch.bfloat16, max_shard_size="20KB")
        tiny.write_tokenizer(tmp_path / name)
    cases = [
        (str(tmp_path / name), layout, {"export": str(tmp_path / f"{name}-{n}")})
        for name in names
        for n, layout in enumerate(layouts)
    ]
    (first, *_) = run_ranks(4, "tests.huggingface.ranks:answers", cases, timeout=300)
    for (source, layout, wanted), answer in zip(cases, first, strict=True):
        files = check_equal(tmp_path / wanted["export"], tmp_path / source)
        sizes = answer["streamed"]
        assert len(sizes) > 3 and max(sizes) <= max(20_000, *(t.nbytes for t in tensors(tmp_path / source)[0].values()))
        report(
            f"{source.rsplit('/', 1)[1]:10} {layout!s:28} written in {len(files)} files, streamed in {len(sizes)} "
            "buckets of 20 KB, equal to the bit"
        )


def test_what_was_trained_is_loaded_by_transformers(tmp_path, report):
    from transformers import AutoModelForCausalLM

    tiny.write_model(tmp_path / "model", "llama3")
    tiny.write_tokenizer(tmp_path / "model")
    wanted = {"steps": 2, "rate": 1e-3, "export": str(tmp_path / "trained"), "again": True}
    (answers,) = run_ranks(1, "tests.huggingface.ranks:answers", [(str(tmp_path / "model"), Layout(), wanted)])
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "trained", dtype=torch.float32)
    with torch.no_grad():
        expected = tiny.log_probs(model.eval())
    gap = max(float((a - b).abs().max()) for a, b in zip(answers[0]["again"], expected, strict=True) if len(a))
    moved = max(
        float((a - b).abs().max()) for a, b in zip(answers[0]["again"], answers[0]["log_probs"], strict=True) if len(a)
    )
    report(f"llama3 trained, written, loaded by transformers: log-probs {gap:.1e} (training moved them by {moved:.1e})")
    assert gap < 1e-5 and moved > 1e-2


def test_what_an_uneven_pipeline_trained_is_written_to_the_bit(tmp_path, report):
    """Loaded, trained and written by stages of one and three layers; read by transformers, and by equal stages."""
    from transformers import AutoModelForCausalLM

    tiny.write_model(tmp_path / "model", "qwen3")
    tiny.write_tokenizer(tmp_path / "model")
    uneven, first, second = Layout(pp=2, layers=4, first=1), str(tmp_path / "first"), str(tmp_path / "second")
    cases = [
        (str(tmp_path / "model"), uneven, {"steps": 2, "rate": 1e-3, "export": first, "again": True}),
        (first, Layout(pp=2), {"export": second}),
        (first, Layout(tp=2), {}),
    ]
    (answers, _) = run_ranks(2, "tests.huggingface.ranks:answers", cases)
    check_equal(tmp_path / "second", tmp_path / "first")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "first", dtype=torch.float32)
    with torch.no_grad():
        expected = tiny.log_probs(model.eval())
    rows = zip(answers[0]["again"], answers[1]["log_probs"], answers[2]["log_probs"], expected, strict=True)
    gap = max(float((one - row[-1]).abs().max()) for row in rows for one in row[:-1] if len(one))
    moved = max(float((a - b).abs().max()) for a, b in zip(answers[0]["log_probs"], expected, strict=True) if len(a))
    report(f"qwen3 trained by 1 + 3 layers, written, loaded again: log-probs {gap:.1e} (training moved {moved:.1e})")
    assert gap < 1e-5 and moved > 1e-2


SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("gpt_oss", "qwen3_next", "nemotron_h_latent")]


@pytest.mark.parametrize("name", ["deepseek_v3", *SLOW])
def test_a_checkpoint_has_expert_biases_and_attention_sinks(name, tmp_path, report):
    """Saved with expert parallelism, loaded into pipeline stages over the untrained model.

    Recurrent layers are divided over tensor-parallel ranks, of which the other layout has none.
    """
    tiny.write_model(tmp_path / "model", name)
    tiny.write_tokenizer(tmp_path / "model")
    is_recurrent = name in ("qwen3_next", "nemotron_h_latent")
    first_layout = Layout(tp=2, sp=True, moe=True) if is_recurrent else Layout(dp=2, ep=2, moe=True)
    for place, layout in (("one", first_layout), ("other", Layout(pp=2))):
        payload = (str(tmp_path / "model"), layout, str(tmp_path / "saved"), str(tmp_path / place), place == "other")
        run_ranks(2, "tests.huggingface.ranks:checkpointed", payload)
    saved, loaded, first = (tensors(tmp_path / place)[0] for place in ("one", "other", "model"))
    assert saved.keys() == loaded.keys() and all(torch.equal(saved[key], loaded[key]) for key in saved)
    changed = sum(not torch.equal(saved[key], first[key]) for key in saved)
    report(f"{name}: {len(saved)} tensors, {changed} of them trained, equal from {first_layout} to pp2")
    assert changed > len(saved) / 2


def test_layers_of_multi_token_prediction_are_copied(tmp_path, report):
    """They stay as they were, beside layers that training has changed. Other unknown tensors are errors."""
    from safetensors.torch import load_file, save_file

    tiny.write_model(tmp_path / "model", "deepseek_v3", torch.bfloat16)
    tiny.write_tokenizer(tmp_path / "model")
    tiny.edit_config(tmp_path / "model", num_nextn_predict_layers=1, num_mtp_layers=None)
    file = tmp_path / "model" / "model.safetensors"
    heads = {
        "eh_proj.weight": torch.randn(32, 64),
        "enorm.weight": torch.randn(32),
        "mlp.gate.weight": torch.ones(8, 32),
    }
    tensors_of = load_file(file)
    save_file(tensors_of | {f"model.layers.4.{name}": value for name, value in heads.items()}, file, {"format": "pt"})
    wanted = {"steps": 1, "rate": 1e-3, "export": str(tmp_path / "trained")}
    case = (str(tmp_path / "model"), Layout(), wanted)
    run_ranks(1, "tests.huggingface.ranks:trained_and_written", case)
    written, read = tensors(tmp_path / "trained")[0], tensors(tmp_path / "model")[0]
    assert written.keys() == read.keys()
    same = sorted(name for name in read if torch.equal(written[name], read[name]))
    copied = [name for name in read if name.startswith("model.layers.4.")]
    biases = [name for name in read if name.endswith("e_score_correction_bias")]
    assert len(copied) == 3 and len(biases) == 3
    assert set(copied) | set(biases) <= set(same) and len(same) < len(read) / 2
    report(f"{len(copied)} tensors of multi-token prediction and {len(biases)} expert biases stay, of {len(read)}")
    tiny.edit_config(tmp_path / "model", num_nextn_predict_layers=0)
    with pytest.raises(AssertionError, match=r"model\.layers\.4\.eh_proj\.weight is not part of this model"):
        run_ranks(1, "tests.huggingface.ranks:trained_and_written", case)


@pytest.mark.slow
@pytest.mark.bad_input
def test_values_beyond_the_precision_of_the_files_are_named_on_all_ranks(tmp_path, report):
    """Those of the last stage: both ranks hear of them, whether files are written or tensors streamed."""
    tiny.write_model(tmp_path / "model", "qwen3", torch.float16)
    tiny.write_tokenizer(tmp_path / "model")
    payload = (str(tmp_path / "model"), Layout(pp=2), str(tmp_path / "written"))
    first, second = run_ranks(2, "tests.huggingface.ranks:beyond_fp16", payload)
    assert first == second and len(first) == 2
    for text in first:
        assert "rank 1: CheckpointError: model.norm.weight has values beyond fp16" in text
    assert not (tmp_path / "written").exists()
    report("; ".join(first))


@pytest.mark.bad_input
def test_a_folder_that_is_there_is_left_alone(tmp_path, report):
    tiny.write_model(tmp_path / "model", "llama3")
    case = (str(tmp_path / "model"), Layout(), {"export": str(tmp_path / "model")})
    with pytest.raises(AssertionError, match="exists: give another path"):
        run_ranks(1, "tests.huggingface.ranks:answers", [case])
    assert len(list(tmp_path.iterdir())) == 1
