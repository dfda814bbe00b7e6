"""Layers of pipeline chunks: our arithmetic and our parser against Megatron's own functions."""

from __future__ import annotations

import itertools
import random
from types import SimpleNamespace
from typing import Any

import pytest
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout
from megatron.core.transformer.transformer_config import TransformerConfig
from pydantic import ValidationError

from roll_batching.errors import LayoutError
from roll_batching.modeling.cost import model_cost
from roll_batching.modeling.layer_layout import RankLayerLayout, layers_of_all_chunks
from roll_batching.settings import MegatronConfig
from roll_batching.settings.pipeline_split import parse_layout


def settings(pp: int, vpp: int | None = None, **keys: Any) -> MegatronConfig:
    sizes = {"pipeline_model_parallel_size": pp, "virtual_pipeline_model_parallel_size": vpp}
    return MegatronConfig.model_validate({**sizes, **keys})


def megatron(pp: int, vpp: int | None, layers: int, **keys: Any) -> Any:
    return TransformerConfig(
        num_layers=layers,
        hidden_size=8,
        num_attention_heads=1,
        pipeline_model_parallel_size=pp,
        virtual_pipeline_model_parallel_size=vpp,
        pipeline_dtype=__import__("torch").float32,
        **keys,
    )


def in_order(table: Any) -> list[int]:
    """Counts by stage and chunk, in the order of the layers."""
    return [stage[chunk] for chunk in range(len(table[0])) for stage in table]


FIRST, LAST = "num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage"
EMBEDDING, LOSS = "account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"
LAYOUT = "pipeline_model_parallel_layout"
KEYS: list[dict[str, Any]] = [
    {},
    *({FIRST: n} for n in (1, 2, 3, 4, 8)),
    *({LAST: n} for n in (1, 2, 3, 4, 8)),
    *({FIRST: a, LAST: b} for a, b in itertools.product((1, 2, 4), (1, 2, 3, 4))),
    {EMBEDDING: True},
    {LOSS: True},
    {EMBEDDING: True, LOSS: True},
    {FIRST: 2, LOSS: True},
]


def test_layers_by_chunk_are_megatrons_and_what_megatron_refuses_is_refused() -> None:
    possible = refused = 0
    for pp, vpp, layers, keys in itertools.product((2, 3, 4), (None, 2), range(2, 13), KEYS):
        try:
            theirs = layers_of_all_chunks(megatron(pp, vpp, layers, **keys))
            sizes = [len(held) for held in theirs]
            # It checks equal stages and some chunks only while it builds them.
            fits = [i for held in theirs for i in held] == list(range(layers))
        except (ValueError, AssertionError, ZeroDivisionError):
            fits = False
        if not fits:
            refused += 1
            with pytest.raises(LayoutError, match="num_layers|account_for"):
                settings(pp, vpp, **keys).chunk_layers(layers)
            continue
        possible += 1
        assert in_order(settings(pp, vpp, **keys).chunk_layers(layers)) == sizes, (pp, vpp, layers, keys)
    assert possible > 150 and refused > 300


def random_layout(draw: random.Random) -> str:
    pieces = []
    for _ in range(draw.randint(1, 6)):
        kind = draw.randrange(5)
        if kind == 0:
            inside = "".join(draw.choice(["t", "|", "t*2", ","]) for _ in range(draw.randint(1, 4)))
            pieces.append(f"({inside})*{draw.randint(0, 3)}")
        else:
            pieces.append(["t", "|", f"t*{draw.randint(0, 12)}", "|*2"][kind - 1])
    return "E" + "".join(pieces) + "L"


def test_layouts_are_read_as_megatron_reads_them() -> None:
    draw = random.Random(5)
    for text in [*(random_layout(draw) for _ in range(400)), "Et*3|(tt|)*29t|L", "Ettt,(tt|)*2,tL", "E|t|t|L"]:
        try:
            theirs = PipelineParallelLayerLayout.parse_str_to_list(text)
        except AssertionError:  # brackets around nothing
            with pytest.raises(ValueError, match="'\\('"):
                parse_layout(text)
            continue
        ours = parse_layout(text)
        assert ours == tuple(tuple(layer.name for layer in chunk) for chunk in theirs), text


@pytest.mark.parametrize(("text", "pp"), [("Et|tt|t|tL", 2), ("E|tt|tt|L", 2), ("Etttt|tL", 2), ("Et|t*2|tt*2|L", 4)])
def test_a_rank_has_the_layers_that_megatron_gives_it(text: str, pp: int) -> None:
    chunks = text.replace("tt*2", "ttt").replace("t*2", "tt").split("|")
    vpp = len(chunks) // pp
    layers = text.replace("tt*2", "ttt").replace("t*2", "tt").count("t")
    expected = [chunk.count("t") for chunk in chunks]
    config = settings(pp, **{LAYOUT: text})
    assert config.vpp_size == vpp and in_order(config.chunk_layers(layers)) == expected
    lists = [[{"E": "Embedding", "t": " decoder", "L": "loss"}[letter] for letter in chunk] for chunk in chunks]
    assert settings(pp, **{LAYOUT: lists}).chunk_layers(layers) == config.chunk_layers(layers)
    starts = [sum(expected[:i]) for i in range(len(expected))]
    for given, rank in itertools.product((text, lists), range(pp)):
        own = RankLayerLayout(given, SimpleNamespace(pp_size=pp, pp_rank=rank))  # type: ignore[arg-type]
        theirs = megatron(pp, vpp if vpp > 1 else None, layers, **{LAYOUT: own})
        assert theirs.virtual_pipeline_model_parallel_size == (vpp if vpp > 1 else None)
        for chunk in range(vpp):
            place = chunk * pp + rank
            assert own.get_num_layers_to_build(vp_stage=chunk) == expected[place]
            assert own.get_layer_offset(vp_stage=chunk) == starts[place]
            assert own.get_layer_id_list(vp_stage=chunk) == list(range(starts[place], starts[place] + expected[place]))
        assert [len(held) for held in layers_of_all_chunks(theirs)] == expected


def test_our_view_of_a_layout_equals_megatrons_without_virtual_stages() -> None:
    """Megatron's own answers without a parallel state, where a rank can be given."""
    own = RankLayerLayout("Et|ttt|L", SimpleNamespace(pp_size=3, pp_rank=1))  # type: ignore[arg-type]
    for rank in range(3):
        assert own.get_num_layers_to_build(pp_rank=rank) == super(RankLayerLayout, own).get_num_layers_to_build(
            pp_rank=rank
        )
        assert own.get_layer_offset(pp_rank=rank) == super(RankLayerLayout, own).get_layer_offset(pp_rank=rank)


@pytest.mark.parametrize("keys", [{FIRST: 1}, {LAYOUT: "Et|tt|t|tL"}, {EMBEDDING: True, "moe": [0, 1, 0, 1, 1]}])
def test_the_planners_cost_by_chunk_is_that_of_its_layers_and_the_head(keys: dict[str, Any]) -> None:
    def cost(**options: Any) -> Any:
        return model_cost(megatron(2, None, 5, **options), 61, SimpleNamespace(pp_size=2, tp_size=1, cp_size=1))

    freq = keys.pop("moe", None)
    experts = {} if freq is None else {"num_moe_experts": 4, "moe_layer_freq": freq, "moe_ffn_hidden_size": 24}
    if LAYOUT in keys:
        own = RankLayerLayout(keys[LAYOUT], SimpleNamespace(pp_size=2, pp_rank=1))  # type: ignore[arg-type]
        keys = {LAYOUT: own}
    found, even = cost(**keys, **experts), cost(**experts)
    assert even.chunks is None and (found.linear, found.quadratic) == (even.linear, even.quadratic)
    assert sum(found.chunks.linear) * 3 == found.linear and sum(found.chunks.quadratic) * 3 == found.quadratic
    per_layer = {FIRST: (1, 4), LAYOUT: (1, 2, 1, 1), EMBEDDING: (2, 3)}[next(iter(keys))]
    assert found.chunks.quadratic == tuple(found.quadratic // 3 // 5 * layers for layers in per_layer)
    head = 2 * 8 * 61
    if freq is None:
        assert (found.chunks.linear[-1] - head) * per_layer[0] == found.chunks.linear[0] * per_layer[-1]
    else:  # one mixture of two layers, and two of three
        dense, mixture = sorted((found.chunks.linear[-1] - head - found.chunks.linear[0], found.chunks.linear[0]))
        assert mixture > dense > 0


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ("", "needs one embedding"),
        ("Ett", "needs one loss"),
        ("ttL", "needs one embedding"),
        ("|Ett|L", "needs one embedding"),
        ("Ett|L|", "needs one loss"),
        ("EttE|L", "needs one embedding"),
        ("tE|L", "needs one embedding"),
        ("Ett|xL", "'x'"),
        ("Ett |L", "' '"),
        ("E((t|)*2)*2L", "'\\('"),
        ("E()*2|L", "'\\('"),
        ("E(tt|L", "'\\('"),
        ("Et*2*2|L", "'\\*'"),
        ("Et*9999999|L", "more than 131072"),
        ("Et*999999|L", "more than 131072"),
        ("E(t*999999)*999999|L", "more than 131072"),
        ("E" + "(t|)*900" * 200 + "L", "more than 131072"),
        ("Ett|m|L", "multi-token prediction"),
        ([["embedding"], ["mtp", "loss"]], "multi-token prediction"),
        ([["embedding", "encoder"], ["loss"]], "'encoder'"),
        ([["embedding", 3], ["loss"]], "valid string"),
        (7, "valid string|valid list"),
        (float("nan"), "valid string|valid list"),
        ([], "needs one embedding|index"),
        ([[]], "needs one embedding"),
    ],
)
def test_layouts_that_cannot_be_read_are_refused(layout: Any, message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        settings(2, **{LAYOUT: layout})


@pytest.mark.parametrize("value", [0, -1, 1.5, float("nan"), "two", 10**30])
@pytest.mark.parametrize("key", [FIRST, LAST])
def test_odd_numbers_of_layers_are_refused(key: str, value: Any) -> None:
    if value == 10**30:
        with pytest.raises(LayoutError, match=key):
            settings(2, **{key: value}).chunk_layers(4)
        return
    with pytest.raises(ValidationError, match=key):
        settings(2, **{key: value})
