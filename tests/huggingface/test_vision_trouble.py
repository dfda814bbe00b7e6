"""Images that do not fit, models that do not take them, and settings that an encoder is not tested with."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.huggingface import tiny, vision
from tests.support.layouts import Layout
from tests.support.ranks import meet, part, run_ranks

pytestmark = [pytest.mark.models, pytest.mark.bad_input]

HERE = "tests.huggingface.test_vision_trouble:"


def message_of(action: Callable[[], Any]) -> str:
    """The error of `action`, or nothing."""
    from roll_batching.errors import RollBatchingError

    try:
        action()
    except RollBatchingError as error:
        return str(error)
    return ""


HOMES = torch.tensor([0, 0, 1, 1, 1, 1])
"""Data-parallel ranks of the samples 0, 4, 1, 2, 3 and 5, as ranks have them: the first has no images."""


def home_of(dp_rank: int) -> Any:
    """The samples of a data-parallel rank."""
    return vision.batch().select([0, 4] if dp_rank == 0 else [1, 2, 3, 5])


def troubled(payload: tuple[str, str]) -> dict[str, str]:
    """Messages by name, of passes over bad batches on every rank."""
    directory, text = payload
    meet(0)
    found = troubled_images(directory)
    part()
    meet(1)
    found |= images_for_a_text_model(text)
    part()
    return found


def images_for_a_text_model(directory: str) -> dict[str, str]:
    """Messages of a model without an encoder."""
    from roll_batching.losses import SFTLoss
    from roll_batching.samples import distribute, gather_lengths
    from roll_batching.strategy import GenerationSettings
    from tests.huggingface.ranks import strategy_of

    strategy = strategy_of(directory, Layout(dp=2))
    home = home_of(strategy.layout.dp_rank)
    plan = strategy.plan(gather_lengths(home), home_rank=HOMES)
    given, settings = distribute(home, plan), GenerationSettings(max_new_tokens=2, eos_token_id=5, greedy=True)
    return {
        "text model": message_of(lambda: strategy.train_step(given, plan, SFTLoss())),
        "text model's prompts": message_of(lambda: strategy.generate(given, settings)),
    }


def troubled_images(directory: str) -> dict[str, str]:
    """Messages of a model with an encoder."""
    from roll_batching.losses import SFTLoss
    from roll_batching.planning import plan_step
    from roll_batching.samples import distribute, gather_lengths
    from roll_batching.samples.image_fields import IMAGE_SCHEMA
    from roll_batching.strategy import GenerationSettings

    found = {}
    strategy = vision.strategy_of(directory, Layout(dp=2))
    home, homes = home_of(strategy.layout.dp_rank), HOMES
    table = gather_lengths(home)
    plan = strategy.plan(table, home_rank=homes)
    local = distribute(home, plan)
    floats = {**local.fields, "pixel_values": local["pixel_values"].double() / 255}
    found["floats"] = message_of(lambda: strategy.train_step(replace(local, fields=floats), plan, SFTLoss()))
    if strategy.layout.dp_rank:
        grids = local["image_grid_thw"].clone()
        grids[0, 1:] = grids[0, 1:] * 2
        wrong = replace(local, fields={**local.fields, "image_grid_thw": grids})
    else:
        wrong = local
    found["one rank"] = message_of(lambda: strategy.train_step(wrong, plan, SFTLoss()))
    lone = local.without([name for name in IMAGE_SCHEMA if name in ("pixel_values", "image_patches")])
    found["lone fields"] = message_of(lambda: strategy.compute_log_probs(lone, plan))
    # The first sample with an image keeps 6 tokens, of which the last three are inside it.
    short = plan_step(
        table.lengths,
        replace(strategy.constraints(), max_tokens=6, oversize="truncate"),
        ids=table.ids,
        home_rank=homes.numpy(),
    )
    found["cut"] = message_of(lambda: strategy.train_step(local, short, SFTLoss()))
    found["prompts"] = message_of(
        lambda: strategy.generate(wrong, GenerationSettings(max_new_tokens=2, eos_token_id=5, greedy=True))
    )
    if strategy.layout.dp_rank == 0:  # ranks whose samples have no images may leave the fields out
        local = local.without(list(IMAGE_SCHEMA))
    found["text on one rank"] = message_of(lambda: strategy.train_step(local, plan, SFTLoss()))
    return found


EXPECTED = {
    "floats": r"pixel_values has torch.float64 .*give uint8 \[patches, 48\]",
    "one rank": r"rank 1: DataError: sample \d has \d+ patches in image_patches",
    "lone fields": "the field pixel_values is missing: samples with images have pixel_values, image_grid_thw",
    "cut": r"rank 1: DataError: sample \d is cut after 6 tokens, inside an image: leave it out",
    "prompts": r"rank 1: DataError: sample \d has \d+ patches in image_patches",
    "text on one rank": "^$",
    "text model": r"the batch has images \(pixel_values, .* and the model has no vision encoder",
    "text model's prompts": "and the model has no vision encoder",
}


def test_bad_batches(tmp_path: Any, report: Callable[[str], None]) -> None:
    vision.write_model(tmp_path / "vision")
    tiny.write_model(tmp_path / "text", "qwen2")
    everyone = run_ranks(2, f"{HERE}troubled", (str(tmp_path / "vision"), str(tmp_path / "text")))
    for found in everyone:
        assert found.keys() == EXPECTED.keys()
        for name, message in EXPECTED.items():
            assert re.search(message, found[name]), (name, found[name])
    for name, message in everyone[0].items():
        report(f"{name}: {message}")


def overlapped(directory: str) -> list[float]:
    """Losses of steps whose gradients are reduced during the backward pass; rank 0 never has an image."""
    from roll_batching.losses import SFTLoss
    from roll_batching.samples import distribute, gather_lengths
    from roll_batching.strategy import MegatronTrainStrategy
    from tests.huggingface.ranks import role

    config = role(directory, Layout(dp=2, distopt=True), training={"learning_rate": 1e-3})
    changes = {"overlap_grad_reduce": True}
    megatron = config.strategy_args.strategy_config.model_copy(update=changes)
    args = config.strategy_args.model_copy(update={"strategy_config": megatron})
    strategy = MegatronTrainStrategy(config.model_copy(update={"strategy_args": args}))
    strategy.initialize()
    losses = []
    for _ in range(3):
        home = home_of(strategy.layout.dp_rank)
        plan = strategy.plan(gather_lengths(home), home_rank=HOMES)
        losses.append(strategy.train_step(distribute(home, plan), plan, SFTLoss()).loss)
    return losses


@pytest.mark.slow
def test_overlapped_reduction_with_ranks_and_packs_without_images(tmp_path: Any, report: Callable[[str], None]) -> None:
    model = vision.write_model(tmp_path / "model")
    expected = vision.expected_losses(model, 3, 1e-3)
    for losses in run_ranks(2, f"{HERE}overlapped", str(tmp_path / "model")):
        gap = max(abs(a - b) for a, b in zip(losses, expected, strict=True))
        report(f"three steps of AdamW with overlapped reduction: {gap:.1e}")
        assert gap < 1e-5


ARCHITECTURE = {
    "vocab_size": 61,
    "hidden_size": 32,
    "num_layers": 2,
    "num_attention_heads": 4,
    "add_qkv_bias": True,
    "vision": {
        "depth": 1,
        "hidden_size": 32,
        "intermediate_size": 24,
        "num_heads": 2,
        "patch_size": 4,
        "window_size": 16,
        "fullatt_block_indexes": [0],
        "mrope_section": [2, 1, 1],
        "image_token_id": 57,
        "video_token_id": 58,
        "vision_start_token_id": 59,
        "vision_end_token_id": 60,
    },
}


def settings(**changes: Any) -> dict[str, Any]:
    return {**ARCHITECTURE, **changes}


def vision_settings(**changes: Any) -> dict[str, Any]:
    return settings(vision={**ARCHITECTURE["vision"], **changes})  # type: ignore[dict-item]


@pytest.mark.parametrize(
    ("architecture", "message"),
    [
        (settings(mtp_num_layers=1), "mtp_num_layers is not supported with vision"),
        (settings(sliding_window=8), "sliding_window is not supported with vision"),
        (settings(hidden_dropout=0.1), "hidden_dropout is not supported with vision"),
        (settings(rotary_percent=0.5), "mrope_section has 4 pairs of channels, and RoPE turns 4 channels"),
        (vision_settings(mrope_section=[1, 1, 1]), "mrope_section has 3 pairs of channels, and RoPE turns 8"),
        (vision_settings(video_token_id=57), "give four different tokens"),
        (vision_settings(image_token_id=99), "give four different tokens of the vocabulary"),
        (vision_settings(window_size=7), "window_size must be at least"),
        (vision_settings(num_heads=3), "hidden_size must be a multiple of 4"),
        (vision_settings(image_std=[0.2, 0.0, 0.2]), "greater than 0"),
        (vision_settings(image_mean=[float("nan"), 0.0, 0.2]), "finite"),
        (vision_settings(dept=3), "Extra inputs"),
    ],
)
def test_contradictory_settings(architecture: dict[str, Any], message: str) -> None:
    from pydantic import ValidationError

    from roll_batching.settings import ArchitectureConfig

    assert ArchitectureConfig.model_validate(ARCHITECTURE).vision is not None
    with pytest.raises(ValidationError, match=message):
        ArchitectureConfig.model_validate(architecture)


def test_older_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    from roll_batching.settings import contradictions
    from roll_batching.settings.contradictions import encoder_problem

    assert encoder_problem() is None
    monkeypatch.setattr(contradictions.metadata, "version", lambda name: "4.57.1")
    assert "is version 4.57.1: install" in str(encoder_problem())


def test_layers_heads_and_precision_that_an_encoder_excludes() -> None:
    from roll_batching.settings import ArchitectureConfig, MegatronConfig, ModelArgs
    from roll_batching.settings.support import ROLE_REFUSALS, VISION, Parts, refused_pairs

    layout = MegatronConfig.model_validate({"fp8": "e4m3", "fp8_recipe": "tensorwise"})
    parts = Parts(
        ModelArgs(value_head=True),
        ArchitectureConfig.model_validate(ARCHITECTURE),
        layout,
        "transformer_engine",
        rotates=False,
    )
    rows = [row for row in refused_pairs(ROLE_REFUSALS, parts) if VISION in (row.feature, row.other)]
    assert [row.path[-1] for row in rows] == ["fp8", "vision", "vision", "value_head"]


def refused(_: None) -> dict[str, str]:
    """Messages of models that are not built."""
    from roll_batching.strategy import MegatronInferStrategy, MegatronTrainStrategy
    from tests.support.models import worker_config

    cases: dict[str, tuple[Any, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
        "critic": (MegatronInferStrategy, {}, {"value_head": True}, {}),
        "attention": (
            MegatronTrainStrategy,
            {"attention_backend": "tests.support.own_attention:RotatedByTheModel"},
            {},
            {},
        ),
        "sizes of context parallelism": (MegatronTrainStrategy, {"context_parallel_size": "auto"}, {}, {}),
    }
    found = {}
    for number, (name, (kind, megatron, model, role)) in enumerate(cases.items()):
        meet(number)
        config = worker_config("packed", 64, architecture=ARCHITECTURE)
        dumped = config.model_dump(exclude_unset=True)
        dumped["model_args"] |= model
        dumped["sequence_packing_args"] |= role
        dumped["strategy_args"]["strategy_config"] = megatron
        strategy = kind(type(config).model_validate(dumped))
        found[name] = message_of(strategy.initialize)
        del strategy
        part()
    return found


REFUSED = {
    "critic": "a critic with a vision encoder is not supported",
    "attention": "choose attention_backend dense, varlen or flash_attn",
    "sizes of context parallelism": "max_cp_size=2 gives each pack .* a vision encoder is tested with one",
}


def test_models_that_are_not_built(report: Callable[[str], None]) -> None:
    found, _ = run_ranks(2, f"{HERE}refused")
    for name, message in REFUSED.items():
        report(f"{name}: {found[name]}")
        assert re.search(message, found[name]), (name, found[name])
