"""A vision-language model of transformers, in any layout, gives the same log-probs, gradients and training steps."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.huggingface import vision
from tests.support.layouts import Layout
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.models

LIMIT = 1e-5
STEPS, RATE, NEW = 3, 1e-3, 4
TRAINED = {"steps": STEPS, "rate": RATE}


@pytest.fixture(scope="module", params=vision.FAMILIES)
def model(request: Any, tmp_path_factory: Any) -> tuple[Path, Any]:
    """A directory with the model, and the model."""
    folder = tmp_path_factory.mktemp("vision") / "model"
    return folder, vision.write_model(folder, request.param)


def fitting(layout: Layout, model: tuple[Path, Any]) -> Layout:
    """The layout, for a mixture with expert parallelism, and sequence parallelism beside tensor parallelism."""
    is_mixture = model[1].config.model_type.endswith("moe")
    return dataclasses.replace(layout, sp=layout.tp > 1, ep=layout.dp) if is_mixture else layout


def check(model: tuple[Path, Any], cases: list[tuple[Layout, dict[str, Any]]], report: Callable[[str], None]) -> None:
    """Compares cases with the same number of ranks with transformers."""
    from safetensors.torch import load_file

    folder, reference = model
    cases = [(fitting(layout, model), wanted) for layout, wanted in cases]
    payload = []
    written = Path(tempfile.mkdtemp(prefix="gradients-", dir=folder.parent))  # several tests have the same layout
    for number, (layout, wanted) in enumerate(cases):
        gradients = written / str(number)
        wishes = {} if "steps" in wanted else {"gradients": str(gradients)}
        payload.append((str(folder), layout, {**wishes, **wanted}))
    everyone = run_ranks(cases[0][0].ranks, "tests.huggingface.vision:answers", payload, timeout=600)
    copies = cases[0][1].get("copies", 1)
    with torch.no_grad():
        expected = vision.expected_log_probs(reference, copies)
    slopes = vision.expected_gradients(reference, copies)
    for number, (layout, wanted) in enumerate(cases):
        for mine in (of_rank[number] for of_rank in everyone):
            own = range(mine["dp_rank"], len(expected), layout.dp)
            pairs = zip(mine["log_probs"], own, strict=True)
            gap = max(float((row - expected[i]).abs().max()) for row, i in pairs if len(row))
            assert gap < LIMIT, (layout, gap)
            if copies > 1 and layout.ranks == 1:
                images = sum(isinstance(one, tuple) for parts in vision.SAMPLES for one in parts)
                assert images <= mine["encoded"] < 1.5 * images  # twice those of the group that two packs share
            if "new" in wanted:
                with torch.no_grad():
                    tokens = vision.expected_tokens(reference, wanted["new"])
                report(f"{layout!s:20} log-probs of sampling and of packs differ by {mine['gap']:.1e}")
                assert mine["tokens"] == [tokens[i] for i in own] and mine["gap"] < LIMIT
        if "steps" in wanted:
            losses = vision.expected_losses(reference, wanted["steps"], wanted["rate"])
            gap = max(abs(a - b) for a, b in zip(everyone[0][number]["losses"], losses, strict=True))
            report(f"{layout!s:20} {STEPS} steps of AdamW {gap:.1e} (losses {losses[0]:.3f} to {losses[-1]:.3f})")
            assert gap < LIMIT and losses[-1] < losses[0]
            continue
        found: dict[str, torch.Tensor] = {}
        for file in Path(payload[number][2]["gradients"]).glob("*.safetensors"):
            found |= load_file(file)
        assert found.keys() == slopes.keys()
        gaps = {name: float((found[name] - slopes[name]).abs().max()) for name in found}
        worst = max(gaps, key=lambda name: gaps[name])
        largest = max(float(slopes[name].abs().max()) for name in slopes if "visual." in name)
        report(f"{layout!s:20} {wanted.get('mode', 'packed'):8} log-probs {gap:.1e}, gradients {gaps[worst]:.1e} "
               f"({worst}; the encoder's up to {largest:.1e})")  # fmt: skip
        assert gaps[worst] < LIMIT and largest > 1e-2, worst


def test_packs_on_one_rank(model: Any, report: Callable[[str], None]) -> None:
    check(model, [(Layout(), {"new": NEW}), (Layout(), TRAINED)], report)


def test_two_ranks(model: Any, report: Callable[[str], None]) -> None:
    layouts = [Layout(tp=2, sp=True), Layout(pp=2), Layout(cp=2)]
    check(model, [(layout, {}) for layout in layouts], report)


MORE = (Layout(tp=2, sp=True, recompute=True), Layout(pp=2), Layout(cp=2), Layout(dp=2))
SHARED = [Layout(), *(pytest.param(layout, marks=pytest.mark.slow) for layout in MORE)]


@pytest.mark.parametrize("layout", SHARED, ids=str)
def test_prompts_with_images_are_computed_once(layout: Layout, model: Any, report: Callable[[str], None]) -> None:
    """Three samples each have a prompt and its images in common; they share packs, where these are encoded once."""
    check(model, [(layout, {"copies": 3})], report)


SAMPLED = [Layout(tp=2), Layout(tp=2, sp=True), Layout(pp=2), Layout(dp=2)]


@pytest.mark.slow
def test_responses(model: Any, report: Callable[[str], None]) -> None:
    """With a cache, with and without sequence parallelism; and without one, in a pipeline."""
    check(model, [(layout, {"new": NEW}) for layout in SAMPLED], report)


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a directory."""
    from safetensors.torch import load_file

    found: dict[str, torch.Tensor] = {}
    for file in folder.glob("*.safetensors"):
        found |= load_file(file)
    return found


def rewrite_tensors(folder: Path, family: str) -> None:
    """Names tensors as transformers 4.52 to 4.57 did, and transposes those of experts."""
    from safetensors.torch import save_file

    found = {}
    for name, tensor in tensors_of(folder).items():
        if family == "qwen2_5_vl":
            name = "model." + name if name.startswith("visual.") else name.replace("model.", "model.language_model.", 1)
        found[name] = tensor.mT.contiguous() if ".experts." in name else tensor
    save_file(found, folder / "model.safetensors")


@pytest.mark.parametrize("older", [False, True], ids=["transformers 5", "transformers 4.57"])
def test_files_come_back_to_the_bit(older: bool, model: Any, tmp_path: Path) -> None:
    """By export and by the stream of weight updates, in both layouts of files; transformers reads them."""
    import shutil

    from transformers import AutoModelForImageTextToText

    family, layout = model[1].config.model_type, Layout(pp=2)
    if family in ("qwen3_vl", "qwen3_5", "qwen3_5_moe") and older:
        pytest.skip("both versions write the same")
    if family.endswith("moe"):
        layout = Layout(tp=2, sp=True) if older else Layout(tp=2, sp=True, dp=2, ep=2)
    folder = tmp_path / "model"
    shutil.copytree(model[0], folder)
    if older:
        rewrite_tensors(folder, family)
    before = tensors_of(folder)
    payload = [(str(folder), layout, {"export": str(tmp_path / "new")})]
    run_ranks(layout.ranks, "tests.huggingface.vision:answers", payload)
    after = tensors_of(tmp_path / "new")
    assert before.keys() == after.keys() and all(torch.equal(after[name], before[name]) for name in before)
    assert (tmp_path / "new" / "config.json").read_bytes() == (folder / "config.json").read_bytes()
    read = AutoModelForImageTextToText.from_pretrained(tmp_path / "new")
    wanted = dict(model[1].named_parameters())
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in read.named_parameters())


@pytest.mark.slow
def test_checkpoints_in_another_layout(model: Any, tmp_path: Path, report: Callable[[str], None]) -> None:
    """With the optimizer's state, sharded or not."""
    target = "tests.huggingface.vision:checkpointed"
    payload = (str(model[0]), Layout(tp=2, sp=True), str(tmp_path / "checkpoint"), False)
    first, *rest = run_ranks(2, target, payload)[0]
    again = run_ranks(2, target, (str(model[0]), Layout(pp=2), str(tmp_path / "checkpoint"), True))[0]
    gap = max(abs(a - b) for a, b in zip(rest, again, strict=True))
    report(f"losses {first:.3f}, {rest[0]:.3f}, {rest[1]:.3f}; the last two from a checkpoint: {gap:.1e}")
    assert gap < LIMIT and rest[1] < rest[0] < first


@pytest.mark.slow
@pytest.mark.parametrize("layouts", [(Layout(tp=2, sp=True), Layout(pp=2)), (Layout(pp=2), Layout(tp=2))], ids=str)
def test_weights_in_another_layout(layouts: tuple[Layout, Layout], model: Any) -> None:
    with torch.no_grad():
        expected = vision.expected_log_probs(model[1])
    for dp_rank, rows in run_ranks(2, "tests.huggingface.vision:resharded", (str(model[0]), *layouts)):
        for row, number in zip(rows, range(dp_rank, len(expected), layouts[1].dp), strict=True):
            assert float((row - expected[number]).abs().max()) < LIMIT


@pytest.mark.slow
@pytest.mark.parametrize("prefix", ["visual", "vision_model"])
def test_frozen_encoders(prefix: str, model: Any) -> None:
    """By our name and ROLL's: the encoder stays, and all else moves."""
    for layout in (Layout(tp=2, sp=True), Layout(pp=2, recompute=True)):
        everyone = run_ranks(2, "tests.huggingface.vision:frozen", (str(model[0]), layout, prefix))
        for losses, moved in everyone:
            assert losses[1] < losses[0]
            assert not any(name.startswith("visual") for name in moved)
            assert any(name.startswith("decoder.layers.0") for name in moved)
        assert "embedding.word_embeddings.weight" in everyone[0][1]


@pytest.mark.slow
@pytest.mark.parametrize("layout", [Layout(tp=2, sp=True, recompute=True), Layout(pp=2), Layout(dp=2)], ids=str)
def test_adapters_of_the_text_model(layout: Layout, model: Any, tmp_path: Path, report: Callable[[str], None]) -> None:
    """The export with adapters is what was trained, and the encoder in it what it was."""
    from transformers import AutoModelForImageTextToText

    if model[1].config.model_type.startswith("qwen3_5"):
        pytest.skip("adapters are refused beside gated delta nets")
    is_mixture = model[1].config.model_type.endswith("moe")
    targets, to = "q_proj,v_proj,o_proj" if is_mixture else "all-linear", tmp_path / "new"
    payload = (str(model[0]), fitting(layout, model), targets, str(to))
    everyone = run_ranks(2, "tests.huggingface.vision:adapted", payload)
    before, after = tensors_of(model[0]), tensors_of(to)
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert {name.rsplit(".", 2)[1] for name in moved} >= {"q_proj", "v_proj", "o_proj"}
    assert not any("visual." in name or "norm" in name or "embed" in name for name in moved)
    with torch.no_grad():
        expected = vision.expected_log_probs(AutoModelForImageTextToText.from_pretrained(to).eval())
    gaps = [0.0]
    for rank, losses, rows in everyone:
        own = range(rank, len(expected), layout.dp)
        gaps += [float((row - expected[i]).abs().max()) for row, i in zip(rows, own, strict=True) if len(row)]
        assert losses[2] < losses[1] < losses[0]
    report(f"{layout!s:20} losses {losses}, the export's log-probs {max(gaps):.1e}")
    assert max(gaps) < LIMIT


@pytest.mark.bad_input
def test_adapters_of_stacked_experts_are_refused(tmp_path: Path) -> None:
    from tests.support.ranks import RanksFailed

    vision.write_model(tmp_path, "qwen3_vl_moe")
    with pytest.raises(RanksFailed, match="PEFT has no adapters: leave gate_proj, up_proj and down_proj out"):
        run_ranks(1, "tests.huggingface.vision:adapted", (str(tmp_path), Layout(), "q_proj,up_proj", ""))


MATRIX = [
    [
        (Layout(tp=2), {}),
        (Layout(dp=2), {}),
        (Layout(pp=2, vpp=2), {}),
        (Layout(tp=2, sp=True, recompute=True), {}),
        (Layout(dp=2, distopt=True), TRAINED),
    ],
    [
        (Layout(tp=2, sp=True, pp=2), {}),
        (Layout(tp=2, sp=True, cp=2, recompute=True), {}),
        (Layout(pp=2, dp=2), {}),
        (Layout(cp=4), {}),
        (Layout(pp=2, dp=2, distopt=True), TRAINED),
        (Layout(tp=2, sp=True, dp=2, distopt=True), TRAINED),
    ],
]


@pytest.mark.slow
@pytest.mark.parametrize("layouts", MATRIX, ids=["two ranks", "four ranks"])
def test_layouts(layouts: list[tuple[Layout, Any]], model: Any, report: Callable[[str], None]) -> None:
    check(model, layouts, report)


@pytest.mark.slow
def test_padded_and_dynamic_batches(model: Any, report: Callable[[str], None]) -> None:
    check(model, [(Layout(), {"mode": mode}) for mode in ("padded", "dynamic")], report)
    check(model, [(Layout(pp=2), {"mode": "padded"}), (Layout(cp=2), {"mode": "dynamic"})], report)


@pytest.mark.slow
def test_tied_embeddings(tmp_path: Path, report: Callable[[str], None]) -> None:
    tied = tmp_path / "model", vision.write_model(tmp_path / "model", tie_word_embeddings=True)
    check(tied, [(layout, {}) for layout in (Layout(pp=2, tied=True), Layout(tp=2, sp=True, tied=True))], report)
