"""The choice of kernels by device and installed libraries, and its notice."""

from __future__ import annotations

from typing import Any

import pytest

ALWAYS = {"bias_activation_fusion"}
ENGINE = {"transformer-engine": "2.20.2", "transformer-engine-torch": "2.20.2"}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], set[str]]] = {
    "cpu": ({"device": "cpu"}, {"versions": ENGINE, "weight_gradient_kernel": True}, set()),
    "cuda": ({}, {}, ALWAYS),
    "apex": ({}, {"weight_gradient_kernel": True}, ALWAYS | {"gradient_accumulation_fusion"}),
    "a model that rotates": ({"rotates": False}, {}, ALWAYS),
    "a model that rotates, with TransformerEngine": (
        {"rotates": False},
        {"versions": ENGINE},
        ALWAYS | {"apply_rope_fusion"},
    ),
    "experts": ({"experts": True}, {"versions": ENGINE}, ALWAYS),
    "experts of TransformerEngine": (
        {"experts": True, "layers": "transformer_engine", "rotates": False},
        {"versions": ENGINE},
        ALWAYS | {"apply_rope_fusion", "moe_grouped_gemm", "moe_permute_fusion", "moe_router_fusion"},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_fusions_follow_device_and_installed_libraries(case: str) -> None:
    from roll_batching.modeling.kernels import fusions
    from roll_batching.modeling.requirements import Installed

    model, installed, on = CASES[case]
    asked: dict[str, Any] = {"device": "cuda", "layers": "local", "rotates": True, "experts": False, **model}
    here = Installed(**{"compute_capability": (9, 0), **installed})
    found = fusions(**asked, installed=here)
    assert {name for name, reason in found.items() if not reason} == on
    assert {"moe_grouped_gemm", "moe_router_fusion"} <= found.keys() or not asked["experts"]


def test_the_notice_names_what_is_on_and_why_the_rest_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    from roll_batching.modeling import kernels
    from roll_batching.modeling.requirements import Installed
    from roll_batching.settings import ArchitectureConfig, MegatronConfig
    from tests.support.models import ARCHITECTURE

    def notice(versions: dict[str, str], **strategy: Any) -> str:
        here = Installed(versions=versions, compute_capability=(9, 0))
        monkeypatch.setattr(kernels.Installed, "here", lambda *args: here)
        chosen = kernels.choose_kernels(
            MegatronConfig(**strategy), ArchitectureConfig(**ARCHITECTURE), torch.device("cuda")
        )
        on = {name for name, value in chosen.options.items() if value}
        (said,) = [part for part in chosen.notice.split("; ") if part.startswith("fused: ")]
        assert set(said.removeprefix("fused: ").split(", ")) == on
        return chosen.notice

    text = notice({}, attention_backend="varlen")
    assert "attention: varlen (as configured); layers: local (TransformerEngine is not installed)" in text
    assert "not fused: apply_rope_fusion (the attention core rotates itself)" in text
    assert "transformer_impl: transformer_engine takes those of the 2.20.2" in notice(ENGINE)
    text = notice(ENGINE, transformer_impl="transformer_engine")
    assert "attention: transformer_engine (part of its layers); layers: transformer_engine (as configured)" in text


VARIABLES = ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN")
CHOICES = {
    ("1", "0", "0"): "flash",
    ("1", None, None): "auto",
    (None, "0", None): "flash",
    ("0", None, None): "fused",
    (None, None, "1"): "auto",
    ("0", "0", "1"): "unfused",
    ("0", "0", "0"): "local",
    (None, None, None): "auto",
    ("1", "1", "0"): None,
    ("yes", None, None): None,
}


@pytest.mark.parametrize("values", CHOICES)
def test_the_variables_of_transformer_engine_choose_as_megatron_lets_them(
    values: tuple[str | None, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    from types import SimpleNamespace

    from megatron.core.models.common.language_module.language_module import LanguageModule

    from roll_batching.errors import LayoutError
    from roll_batching.modeling.kernels import engine_attention

    given = {name: value for name, value in zip(VARIABLES, values, strict=True) if value is not None}
    if CHOICES[values] is None:
        with pytest.raises(LayoutError, match="set one of them to 1 and the other two to 0"):
            engine_attention(given)
        return
    chosen = engine_attention(given)
    assert chosen.name == CHOICES[values]
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    model = SimpleNamespace(config=SimpleNamespace(attention_backend=chosen, flash_attention_version=None))
    LanguageModule._set_attention_backend(model)  # type: ignore[arg-type]
