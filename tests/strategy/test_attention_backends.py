"""Attention cores from outside, named in the configuration: equal to the reference, or refused with a way on."""

from __future__ import annotations

import importlib
import tempfile
from pathlib import Path
from typing import Any

import pytest

from tests.support.ranks import run_ranks

HERE = "tests.strategy.test_attention_backends:"
OWN = "tests.support.own_attention:"
BATCHES, CAP, LIMIT = 6, 48, 1e-5
TERMS = {"clip": (0.2, 0.28), "kl": 0.05, "entropy": 0.02}


def write_references(folder: str) -> None:
    """Loss and gradients of every batch, one process, stock attention."""
    import torch
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    from roll_batching.distributed.parallel_layout import make_layout, start_processes
    from roll_batching.planning import ParallelDims
    from tests.support.models import random_batch
    from tests.support.reference import gradients, policy_loss, stock_model

    make_layout(ParallelDims(), start_processes())
    model_parallel_cuda_manual_seed(0)
    model = stock_model()
    for seed in range(BATCHES):
        loss = policy_loss(model, random_batch(seed, 4 + seed, CAP), **TERMS)
        torch.save((float(loss), gradients(model, loss)), Path(folder) / f"reference{seed}.pt")


def compare(payload: tuple[str, str, dict[str, Any]]) -> tuple[float, float, str]:
    """Worst relative difference of loss and gradients from the reference in all modes, and what attended."""
    import torch

    from roll_batching.losses import PolicyLoss
    from roll_batching.samples import gather_lengths
    from roll_batching.strategy import MegatronTrainStrategy
    from tests.support.models import MODES, fill, random_batch, whole_gradients, worker_config, worst_difference

    folder, backend, megatron = payload
    loss = PolicyLoss(clip_low=0.2, clip_high=0.28, kl_coef=0.05, kl_bound=None, entropy_coef=0.02)
    worst = (0.0, 0.0)
    for mode in MODES:
        strategy = MegatronTrainStrategy(worker_config(mode, CAP, megatron={**megatron, "attention_backend": backend}))
        strategy.initialize()
        place = strategy.layout
        for seed in range(BATCHES):
            expected_loss, expected = torch.load(Path(folder) / f"reference{seed}.pt")
            batch = random_batch(seed, 4 + seed, CAP)
            plan = strategy.plan(gather_lengths(batch))
            fill(strategy.chunks, 61, place.tp_rank, place.tp_size)
            result = strategy.train_step(batch, plan, loss)
            found = whole_gradients(strategy.chunks, 61, place.tp_rank, False)
            gap = max(worst_difference(found, expected)[0], found["spread"])
            worst = max(worst[0], abs(result.loss - expected_loss) / abs(expected_loss)), max(worst[1], gap)
    attention = strategy.state.attention
    assert attention is not None
    return *worst, attention.name


LAYOUTS = {
    "one rank": {},
    "tp2": {"tensor_model_parallel_size": 2},
    "cp2": {"context_parallel_size": 2},
}


BACKENDS = {
    "MaskedSoftmax": "masked softmax",
    "RotatedByTheModel": "masked softmax behind rotation",
    "FlashOnTheCpu": "flash_attn on the CPU",
    "FlashFourOnTheCpu": "flash_attn_4 on the CPU",
}
CASES = [
    pytest.param(backend, name, layout, marks=[] if layout == "one rank" or "Flash" in backend else [pytest.mark.slow])
    for backend, name in BACKENDS.items()
    for layout in LAYOUTS
]


@pytest.mark.parametrize(("backend", "name", "layout"), CASES)
def test_a_core_from_outside_equals_the_reference(
    backend: str, name: str, layout: str, references: Path, report: Any
) -> None:
    payload = (str(references), OWN + backend, LAYOUTS[layout])
    loss, gradient, attended = run_ranks(2 if LAYOUTS[layout] else 1, HERE + "compare", payload)[0]
    report(f"{backend:18} {layout:8} loss {loss:.1e}, gradient {gradient:.1e}")
    assert attended == name
    assert max(loss, gradient) < LIMIT


@pytest.fixture(scope="module")
def references():
    with tempfile.TemporaryDirectory() as folder:
        run_ranks(1, HERE + "write_references", folder)
        yield Path(folder)


def generate_without_cache(_: None) -> tuple[list[list[list[int]]], list[str], bool]:
    """Greedy responses by the cache of our core, by a backend that has none, and by one that borrows ours.

    And what computed the last, and whether the model was as before afterwards.
    """
    from roll_batching.modeling.head import gpt_of
    from roll_batching.samples import gather_lengths
    from roll_batching.strategy import GenerationSettings, MegatronInferStrategy, generation
    from tests.support.models import fill, random_batch, worker_config

    recompute, recomputations = generation.RecomputingDecoder, 0

    def counted(*arguments: Any) -> Any:
        nonlocal recomputations
        recomputations += 1
        return recompute(*arguments)

    generation.RecomputingDecoder = counted
    prompts = random_batch(2, 5, 9)
    found = []
    for backend in ("auto", OWN + "MaskedSoftmax", OWN + "DecodedDensely"):
        strategy = MegatronInferStrategy(worker_config("packed", CAP, megatron={"attention_backend": backend}))
        strategy.initialize()
        fill(strategy.chunks, 61)
        out = strategy.generate(prompts, GenerationSettings(max_new_tokens=6, eos_token_id=5, greedy=True))
        found.append([row.tolist() for row in out.to_lists("input_ids")])
    gpt = gpt_of(strategy.chunks[0])
    kinds = [type(layer.self_attention.core_attention).__name__ for layer in gpt.decoder.layers]
    rows = strategy.compute_log_probs(out, strategy.plan(gather_lengths(out), forward=True)).to_lists("log_probs")
    drawn = out.to_lists("log_probs")
    gap = max(float((a - b)[b != 0].abs().max()) for a, b in zip(rows, drawn, strict=True) if bool((b != 0).any()))
    return found, [*kinds, gpt.position_embedding_type, str(recomputations)], gap < 1e-4


def test_a_core_without_a_cache_generates_the_same_tokens() -> None:
    (cached, recomputed, borrowed), after, agree = run_ranks(1, HERE + "generate_without_cache")[0]
    assert cached == recomputed == borrowed
    assert after == ["_MaskedSoftmax", "_MaskedSoftmax", "rope", "1"]  # one of three computed sequences again
    assert agree


def generate_with_shared_experts(backend: str) -> list[list[int]]:
    """Greedy responses of this rank, whose prompts need more passes under the cap than the other rank's."""
    from dataclasses import replace

    from roll_batching.strategy import GenerationSettings, MegatronInferStrategy
    from tests.support.models import ARCHITECTURE, fill, random_batch, worker_config

    architecture = {**ARCHITECTURE, "moe": {"num_experts": 4, "router_topk": 2, "ffn_hidden_size": 24}}
    megatron = {"expert_model_parallel_size": 2, "attention_backend": backend}
    strategy = MegatronInferStrategy(worker_config("packed", CAP, architecture=architecture, megatron=megatron))
    strategy.initialize()
    fill(strategy.chunks, 61)
    batching = replace(strategy.batching, infer=replace(strategy.batching.infer, max_tokens=16))
    strategy.state = replace(strategy.state, batching=batching)
    prompts = random_batch(2, 6, 9)
    mine = prompts.select([[0, 1, 2, 3, 4], [5]][strategy.layout.dp_rank])
    out = strategy.generate(mine, GenerationSettings(max_new_tokens=5, eos_token_id=5, greedy=True))
    return [row.tolist() for row in out.to_lists("input_ids")]


def test_ranks_that_share_experts_make_as_many_passes_without_a_cache() -> None:
    cached, recomputed = (
        run_ranks(2, HERE + "generate_with_shared_experts", backend, timeout=60)
        for backend in ("auto", OWN + "MaskedSoftmax")
    )
    assert cached == recomputed


def own_models(_: None) -> dict[str, Any]:
    """Losses of a step on a model of the caller's, by what attends; and what cannot be taken over."""
    from roll_batching.errors import ConfigError, LayoutError
    from roll_batching.losses import SFTLoss
    from roll_batching.modeling.rotary import RotarySettings
    from roll_batching.modeling.spec import core_attention
    from roll_batching.packing import PackLayout, packed_params
    from roll_batching.samples import gather_lengths
    from roll_batching.strategy import MegatronTrainStrategy
    from tests.strategy.test_from_parts import _batching, _start
    from tests.support.models import random_batch
    from tests.support.own_model import build

    _start()
    batch, found = random_batch(3, 6, 20), {}

    def step(attention: Any) -> float:
        parts = build("packed", rotate="core", attention=attention)
        strategy = MegatronTrainStrategy.from_parts(*parts, _batching("packed"), vocab_size=61)
        return strategy.train_step(batch, strategy.plan(gather_lengths(batch)), SFTLoss()).loss

    def said(call: Any) -> str:
        try:
            call()
        except (ConfigError, LayoutError) as error:
            return str(error)
        return "nothing"

    for attention in ("auto", "dense", OWN + "MaskedSoftmax"):
        found[attention] = step(attention)
    found["kernel"] = said(lambda: step(OWN + "OnlyHalf"))
    found["varlen"] = said(lambda: step("varlen"))
    chunks, optimizer = build("packed", rotate="core")
    gpt = chunks[0].module
    attention = gpt.decoder.layers[1].self_attention
    other = core_attention(gpt.config, RotarySettings(), attention=OWN + "MaskedSoftmax")
    attention.core_attention = other(config=gpt.config, layer_number=2, pg_collection=attention.pg_collection)
    found["mixed"] = said(lambda: MegatronTrainStrategy.from_parts(chunks, optimizer, _batching("packed")))
    found["rotary"] = said(lambda: core_attention(gpt.config, RotarySettings(), attention=OWN + "RotatedByTheModel"))
    strategy = MegatronTrainStrategy.from_parts(*build("packed", rotate="core"), _batching("packed"))
    pack = strategy.plan(gather_lengths(batch)).micro_batches[0][0]
    params = packed_params(PackLayout.of(pack), 0, strategy.device, attention=OWN + "MaskedSoftmax")
    ids = params.positions[None] % 61
    found["packs"] = said(lambda: strategy.chunks[0](ids, ids, None, packed_seq_params=params))
    return found


def test_models_of_the_callers_attend_as_they_were_built() -> None:
    found = run_ranks(1, HERE + "own_models")[0]
    losses = [found[name] for name in ("auto", "dense", OWN + "MaskedSoftmax")]
    assert max(losses) - min(losses) < 1e-6 * losses[0]
    assert "half computes in float16, not in float32" in found["kernel"]
    assert "half needs no-such-kernel, which is not installed: install no-such-kernel 2.0 or later" in found["kernel"]
    assert "varlen runs on cuda, not on cpu" in found["varlen"]
    assert "layers attend with dense and masked softmax" in found["mixed"]
    assert "does not rotate: leave rotary out" in found["rotary"]
    assert "DenseCore needs BucketSpans of a pack and got Tensor" in found["packs"]


@pytest.mark.parametrize(
    ("choice", "says"),
    [
        (
            "flash",
            "'flash' is unknown; choose one of auto, varlen, flash_attn, flash_attn_4, transformer_engine, dense",
        ),
        ("", "'' is unknown"),
        (OWN + "Nothing", "has no 'Nothing'"),
        ("tests.support.nowhere:Nothing", "cannot import"),
        ("tests.support.own_attention:math", "is a module without name, requirements"),
    ],
)
def test_what_is_no_backend_is_refused(choice: str, says: str) -> None:
    from roll_batching.errors import ConfigError
    from roll_batching.packing import attention_backend

    with pytest.raises(ConfigError, match=says):
        attention_backend(choice, "cpu")


@pytest.mark.parametrize(
    ("installed", "name"),
    [
        ({"torch": "2.13.0", "flash-attn": "2.8.3", "transformer-engine": "2.20.2"}, "varlen"),
        ({"torch": "2.9.1", "flash-attn": "2.8.3"}, "flash_attn"),
        ({"torch": "2.9.1", "flash-attn": "1.0.9"}, "dense"),
        ({"torch": "2.9.1"}, "dense"),
        ({"torch": "2.9.1", "flash-attn-4": "4.0.0b36"}, "dense"),
    ],
)
def test_auto_on_cuda_is_the_first_that_is_installed(
    installed: dict[str, str], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = importlib.import_module("roll_batching.packing.attention_backend")
    monkeypatch.setattr(module, "installed_versions", lambda names: {n: installed[n] for n in names if n in installed})
    assert module.default_attention.__wrapped__("cuda").name == name
    assert module.default_attention.__wrapped__("cpu").name == "dense"


def test_auto_follows_the_device() -> None:
    from roll_batching.packing import attention_backend

    assert attention_backend("auto", "cpu") is attention_backend("dense", "cpu")
    with pytest.raises(Exception, match="no attention backend is the default on tpu"):
        attention_backend("auto", "tpu")
