"""Abuses of LoRA adapters: directories in PEFT's format, and checkpoints of other adapters."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.campaigns.abuse.directories import FROM_MODEL, earlier, edited_json, nothing_written, truncated, with_nan
from tests.campaigns.abuse.runner import FAILED, RUN, TRAIN, Abuse, Lost
from tests.campaigns.abuse.scenes import RESUMING

LORA: dict[str, Any] = {
    **FROM_MODEL,
    "actor_train.model_args": {"lora_target": "all-linear", "lora_rank": 4, "lora_alpha": 8},
}
"""Settings of a small job with adapters."""
BEGINNING = (*TRAIN, "actor_train.model_args.adapter_name_or_path=given")
CONFIG, FILE = "given/adapter_config.json", "given/adapter_model.safetensors"
FIRST = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"


def _given(change: Callable[[Path], object]) -> Any:
    """The adapters that an earlier run exported, in the folder `given`, changed; there is no run."""

    @contextlib.contextmanager
    def scene(home: Path) -> Iterator[Lost]:
        with earlier("adapters", LORA, model="qwen3")(home):
            shutil.copytree(home / RUN / "adapter", home / "given")
            shutil.rmtree(home / "runs")
            change(home)
            yield lambda: nothing_written(home)

    return scene


def _adapted(name: str, change: Callable[[Path], object], *words: str, code: int = FAILED, **options: Any) -> Abuse:
    options = {"settings": LORA, "arguments": BEGINNING, "scene": _given(change), **options}
    return Abuse(name=f"adapters: {name}", code=code, words=words, **options)


def _resumed(name: str, override: str, *words: str) -> Abuse:
    return Abuse(
        name=f"adapters: {name}",
        code=FAILED,
        settings={**LORA, **RESUMING},
        arguments=(*TRAIN, override),
        words=words,
        scene=earlier("adapters", LORA, model="qwen3"),
    )


ADAPTERS = [
    _adapted(
        "of another rank", edited_json(CONFIG, r=2), "adapter_config.json does not fit", "r is 2, and lora_rank is 4"
    ),
    _adapted(
        "an unknown key of PEFT's",
        edited_json(CONFIG, use_qalora=True),
        "adapter_config.json does not fit",
        "use_qalora is True",
    ),
    _adapted(
        "made for changed base weights",
        edited_json(CONFIG, init_lora_weights="pissa"),
        "init_lora_weights is 'pissa'",
    ),
    _adapted("NaN", with_nan(FIRST, FILE), FIRST, "NaN or infinities"),
    _adapted("a truncated file", truncated(FILE), "adapter_model.safetensors cannot be read"),
    _adapted(
        "of other targets",
        lambda home: None,
        "is unknown",
        arguments=(
            *BEGINNING,
            "actor_train.model_args.lora_target=q_proj,v_proj",
        ),
    ),  # fmt: skip
    _adapted(
        "a path with .. that leads nowhere",
        lambda home: None,
        "../given",
        code=FAILED,
        arguments=(*TRAIN, "actor_train.model_args.adapter_name_or_path=../given"),
    ),
    _resumed("resumed with another rank", "actor_train.model_args.lora_rank=8", "lora_rank is 4 there and 8 here"),
    _resumed("resumed with other targets", "actor_train.model_args.lora_target=q_proj", "lora_target is "),
]
