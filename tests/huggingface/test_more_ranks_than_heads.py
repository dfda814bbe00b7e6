"""More ranks than key-value heads (TP), and than groups of Mamba layers (CP): equal to transformers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from roll_batching.huggingface.families import load_family, rules_of
from roll_batching.huggingface.tensors import Sizes, local_shape, pieces
from roll_batching.jobs.config.layout_rules import model_fits
from roll_batching.settings import ArchitectureConfig, MegatronConfig
from tests.huggingface import tiny
from tests.huggingface.published import PUBLISHED
from tests.huggingface.published_nemotron import NEMOTRON
from tests.huggingface.test_config_json import architecture_of
from tests.huggingface.test_equality import EVERYTHING, TRAINED, _check
from tests.huggingface.test_export import check_equal
from tests.support.layouts import Layout
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.models

WANTED = {**TRAINED, "greedy": 6}


def write(folder: Path, name: str, **saving: Any) -> Any:
    """A tiny model `family, field=value, ...` of transformers."""
    family, *changes = name.split(", ")
    prefix, fields = tiny.MODELS[family]
    own = {key: int(value) for key, value in (change.split("=") for change in changes)}
    return tiny.write_model(folder, name, model=(prefix, fields | own), **saving)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], tuple[Path, Any]]]:
    made: dict[str, tuple[Path, Any]] = {}

    def model(name: str) -> tuple[Path, Any]:
        if name not in made:
            folder = tmp_path_factory.mktemp("models") / "model"
            made[name] = folder, write(folder, name)
        return made[name]

    yield model


def test_on_two_ranks(models: Any, report: Callable[[str], None]) -> None:
    """One key-value head under TP 2, with a cache and three steps; one group of Mamba layers under CP 2."""
    keys = ("qwen3, num_key_value_heads=1", Layout(tp=2, sp=True), WANTED)
    _check(models, [keys, ("nemotron_h, n_groups=1", Layout(cp=2), TRAINED)], report)


FOUR = Layout(tp=4, sp=True)
ATTENTION = [
    ("qwen3, num_key_value_heads=2", FOUR, WANTED),
    ("qwen2, num_key_value_heads=1", Layout(tp=4), WANTED),
    ("mistral_window, num_key_value_heads=2", Layout(tp=2, cp=2), TRAINED),
    ("mistral_window, num_key_value_heads=1", Layout(tp=2, sp=True, cp=2), TRAINED),
    ("gemma3, num_key_value_heads=1", FOUR, WANTED),
    ("qwen3, num_key_value_heads=1", Layout(tp=2, sp=True, pp=2), TRAINED),
]
MIXED = [
    ("qwen3_moe, num_key_value_heads=1", Layout(tp=2, sp=True, dp=2, ep=2, moe=True), TRAINED),
    ("minimax_m2, num_key_value_heads=2", Layout(tp=4, sp=True, moe=True), WANTED),
    ("qwen3_next, num_key_value_heads=2", FOUR, WANTED),
    ("nemotron_h, num_key_value_heads=2", FOUR, WANTED),
    ("nemotron_h, n_groups=1", Layout(cp=4), TRAINED),
    ("nemotron_h, n_groups=2", Layout(cp=4), TRAINED),
    ("nemotron_h_latent, n_groups=2, num_key_value_heads=1", Layout(tp=2, sp=True, cp=2, moe=True), TRAINED),
    ("nemotron_h, n_groups=2", Layout(cp=2, pp=2), TRAINED),
]


@pytest.mark.slow
def test_attention_on_four_ranks(models: Any, report: Callable[[str], None]) -> None:
    _check(models, ATTENTION, report)


@pytest.mark.slow
def test_experts_delta_nets_and_mamba_on_four_ranks(models: Any, report: Callable[[str], None]) -> None:
    _check(models, MIXED, report)


@pytest.mark.slow
def test_what_was_read_is_written_to_the_bit(tmp_path: Path, report: Callable[[str], None]) -> None:
    """By files, and by the stream that engines get."""
    import torch

    cases = []
    for number, (name, layout, _) in enumerate([ATTENTION[0], ATTENTION[4], MIXED[2], MIXED[6]]):
        source = tmp_path / f"{number}"
        write(source, name, dtype=torch.bfloat16, max_shard_size="20KB")
        tiny.write_tokenizer(source)
        cases.append((str(source), layout, {"export": str(tmp_path / f"{number}-written")}))
    run_ranks(4, "tests.huggingface.ranks:answers", cases, timeout=600)  # compares the stream
    for source, layout, wanted in cases:
        check_equal(Path(wanted["export"]), Path(source))
        report(f"{layout} written to the bit")


@pytest.mark.parametrize("ranks", [2, 4, 8, 16])
@pytest.mark.parametrize("name", ["Qwen3-Next-80B-A3B-Instruct", "NVIDIA-Nemotron-3-Super-120B-A12B-BF16"])
def test_shards_cover_every_tensor_once(name: str, ranks: int) -> None:
    """Of the projections of attention with two key-value heads, rows in ascending order."""
    config = {**PUBLISHED, **NEMOTRON}[name]
    architecture = architecture_of(config)
    sizes = Sizes.of(architecture)
    rules = rules_of(load_family(config["model_type"]), architecture)
    rule = next(rule for rule in rules.values() if rule.join in ("qkv", "gated_qkv"))
    covered: dict[str, list[range]] = {}
    for rank in range(ranks):
        end = 0
        for piece in pieces(rule, sizes, rank, ranks):
            assert piece.at.start == end
            end = piece.at.stop
            assert piece.rows.stop - piece.rows.start == piece.at.stop - piece.at.start
            covered.setdefault(piece.name, []).append(range(piece.rows.start, piece.rows.stop))
        assert end == local_shape(rule, sizes, ranks)[0]
    for tensor, shape in rule.theirs:
        rows = [row for part in covered[tensor] for row in part]
        assert sorted(rows) == list(range(math.prod(sizes.shape(shape[:1]))))


def problems(tp: int, cp: int = 1, divide: str = "heads", **changes: Any) -> list[str]:
    """What the rules say of a small hybrid under TP and CP."""
    hybrid = {"pattern": "M*", "mamba_num_heads": 8, "mamba_head_dim": 4, "mamba_num_groups": 2, "mamba_state_dim": 4}
    values: dict[str, Any] = {"vocab_size": 64, "hidden_size": 48, "num_layers": 2, "num_attention_heads": 12}
    values |= {"num_query_groups": 2, "ffn_hidden_size": 48} | changes
    values["hybrid"] = hybrid | changes.get("hybrid", {})
    sizes = {"tensor_model_parallel_size": tp, "context_parallel_size": cp}
    layout = MegatronConfig.model_validate(sizes | {"recurrent_context_parallel": divide})
    return [str(one) for one in model_fits("actor_train", ArchitectureConfig.model_validate(values), layout)]


@pytest.mark.bad_input
def test_sizes_that_fit() -> None:
    assert not problems(2) and not problems(1, 2) and not problems(1, 4) and not problems(2, 4)
    assert not problems(4, hybrid={"mamba_num_groups": 4})
    assert not problems(1, 3, divide="auto") and not problems(2, 8, divide="sequence")


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("sizes", "changes", "words"),
    [
        ((3, 1), {}, "2 query groups and TP = 3 ranks: one must be a multiple of the other"),
        ((12, 1), {"kv_channels": 2, "num_query_groups": 1}, "the rows of 1 keys and values of 2 channels do not"),
        ((4, 1), {}, "2 groups of Mamba layers do not divide among TP = 4 ranks; lower TP"),
        ((1, 3), {}, "2 groups of Mamba layers on each of TP = 1 ranks and CP = 3: one must be a multiple"),
        ((2, 8), {}, "8 heads of Mamba layers do not divide among TP x CP = 16 ranks; set recurrent_context_parallel"),
    ],
)
def test_sizes_that_do_not_fit(sizes: tuple[int, int], changes: dict[str, Any], words: str) -> None:
    assert any(words in problem for problem in problems(*sizes, **changes)), problems(*sizes, **changes)


def test_one_rank_of_few_units(models: Any, report: Callable[[str], None]) -> None:
    _check(models, [("nemotron_h, n_groups=1", Layout(), EVERYTHING)], report)
