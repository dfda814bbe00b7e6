"""A model family added from outside: one file with a `Family`, named by its dotted path in `model_args.family`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from roll_batching.jobs.config import ConfigFileError, config_from_dict
from tests.huggingface import own_family, ranks, tiny
from tests.support.layouts import Layout
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.models

OWN = "tests.huggingface.own_family:"
HERE = "tests.huggingface.test_own_family:"


@pytest.fixture
def directory(tmp_path: Path) -> tuple[Path, Any]:
    """A model directory of Seed-OSS, and the model of transformers."""
    folder = tmp_path / "seed_oss"
    return folder, tiny.write_model(folder, "seed_oss", model=own_family.TINY)


def job(directory: Any, family: str | None = OWN + "SEED_OSS") -> Any:
    model = {} if family is None else {"family": family}
    return config_from_dict({"pretrain": directory, "actor_train": {"model_args": model}})


def load_and_export(payload: tuple[str, str, Layout]) -> tuple[int, list[torch.Tensor]]:
    """On a rank: loads the directory as the own family, writes it again; log-probs of this rank's share."""
    from roll_batching.strategy import MegatronTrainStrategy

    directory, written, layout = payload
    role = ranks.role(directory, layout)
    model = type(role.model_args).model_validate({"model_name_or_path": directory, "family": OWN + "SEED_OSS"})
    strategy = MegatronTrainStrategy(role.model_copy(update={"model_args": model}))
    strategy.initialize()
    strategy.export(written)
    return strategy.layout.dp_rank, ranks.log_probs(strategy)


@pytest.mark.parametrize("layout", [Layout(), Layout(tp=2, sp=True)], ids=str)
def test_it_loads_computes_what_transformers_computes_and_is_written_again(
    layout: Layout, directory: tuple[Path, Any], tmp_path: Path, report: Any
) -> None:
    from safetensors.torch import load_file

    folder, model = directory
    written = tmp_path / "written"
    answers = run_ranks(layout.ranks, HERE + "load_and_export", (str(folder), str(written), layout))
    with torch.no_grad():
        expected = tiny.log_probs(model)
    for dp_rank, rows in answers:
        own = expected[dp_rank :: layout.dp]
        gap = max(float((row - right).abs().max()) for row, right in zip(rows, own, strict=True) if len(row))
        report(f"seed_oss {layout}: log-probs {gap:.1e}")
        assert gap < 1e-4
    original = load_file(folder / "model.safetensors")
    (file,) = written.glob("*.safetensors")
    copy = load_file(file)
    assert copy.keys() == original.keys() and all(torch.equal(copy[name], original[name]) for name in original)


def test_its_architecture_comes_from_config_json(directory: tuple[Path, Any]) -> None:
    config = job(str(directory[0]))
    for role in config.roles.values():
        architecture = role.model_args.architecture
        assert role.model_args.family == OWN + "SEED_OSS"
        assert architecture is not None and architecture.add_qkv_bias and architecture.head_dim == 16


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("family", "changes", "words"),
    [
        (None, {}, "model_type 'seed_oss' is not supported: the families are llama, "),
        (None, {}, "write its Family and name it in model_args.family as package.module:NAME"),
        (OWN + "SEED_OSS", {"attention_out_bias": True}, "attention_out_bias: True is not supported, only False"),
        (OWN + "SEED_OSS", {"attention_bias": False}, "attention_bias: False is not supported, only True"),
        (OWN + "SEED_OSS", {"model_type": "llama"}, "is for 'seed_oss'; the model_type is 'llama'"),
        (OWN + "NOT_A_FAMILY", {}, "is a str: name a huggingface.families.Family"),
        (OWN + "MISSING", {}, "has no 'MISSING'"),
        ("nowhere.at_all:FAMILY", {}, "cannot import 'nowhere.at_all'"),
        ("seed_oss", {}, "write it as package.module:name"),
    ],
)
def test_errors_name_the_field_or_the_family(
    family: str | None, changes: dict[str, Any], words: str, directory: tuple[Path, Any]
) -> None:
    tiny.edit_config(directory[0], **changes)
    with pytest.raises(ConfigFileError) as caught:
        job(str(directory[0]), family)
    assert words in str(caught.value)


@pytest.mark.bad_input
def test_a_family_without_a_directory_is_an_error() -> None:
    with pytest.raises(ConfigFileError, match="family: has no effect without a model directory") as caught:
        job(None)
    assert str(caught.value).count("has no effect without a model directory") == 1
