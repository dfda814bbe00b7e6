"""Layers of each pipeline stage and model chunk under Megatron's options for uneven pipelines.

Plain arithmetic for rules, plans and rehearsals, before there is a model. A model is built by Megatron's own functions
(`modeling/layers.py`), and a test compares the two.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

from roll_batching.errors import LayoutError

Layout = tuple[tuple[str, ...], ...]
"""Names of the layers of each model chunk, in the order of the model."""
ChunkLayers = tuple[tuple[int, ...], ...]
"""Decoder layers by pipeline stage and virtual stage."""

FIRST, LAST = "num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage"
EMBEDDING, LOSS = "account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"
LAYOUT = "pipeline_model_parallel_layout"

_LETTERS = {"E": "embedding", "t": "decoder", "L": "loss", "m": "mtp"}
_GROUP = re.compile(r"\(([^()]+)\)\*(\d{1,6})(?!\*)|(.)\*(\d{1,6})(?!\*)|(.)", re.DOTALL)
_INSIDE = re.compile(r"(.)\*(\d{1,6})(?!\*)|(.)", re.DOTALL)
_MOST_SYMBOLS = 2**17
"""Most layers and bars of a layout."""


class PipelineSettings(Protocol):
    """The fields of a `MegatronConfig` that this module reads by name; it reads the keys of the split by `getattr`."""

    @property
    def pipeline_model_parallel_size(self) -> int:
        """Pipeline-parallel size."""
        ...

    @property
    def virtual_pipeline_model_parallel_size(self) -> int | None:
        """Model chunks per stage, where they are given."""
        ...

    @property
    def vpp_size(self) -> int:
        """Model chunks per stage."""
        ...

    @property
    def layer_layout(self) -> Layout | None:
        """The parsed `pipeline_model_parallel_layout`."""
        ...


class SplitProblem(NamedTuple):
    """An invalid key of the pipeline split, and the text of its error."""

    key: str
    message: str


def parse_layout(layout: str | Sequence[Sequence[str]]) -> Layout:
    """The chunks of a `pipeline_model_parallel_layout`. Raises ValueError with what is wrong.

    As text: `E` embedding, `t` decoder layer, `L` loss, `|` between chunks, `t*3` and `(t|)*3` for repetition; commas
    mean nothing. As lists: one per chunk, of "embedding", "decoder" and "loss".
    """
    if isinstance(layout, str):
        chunks = [[_LETTERS[letter] for letter in chunk] for chunk in _unrolled(layout).split("|")]
    else:
        chunks = [[name.strip().lower() for name in chunk] for chunk in layout]
    for name in {name for chunk in chunks for name in chunk}:
        if name not in _LETTERS.values():
            raise ValueError(f"has a layer {name!r}; layers are embedding, decoder and loss")
        if name == "mtp":
            raise ValueError(
                "has a layer of multi-token prediction (m, mtp); leave it out, with its bar where it stands alone: "
                "heads (mtp_num_layers) lie before the loss"
            )
    order = [name for chunk in chunks for name in chunk]
    for name, end, place in (("embedding", 0, "first"), ("loss", -1, "last")):
        letter = next(letter for letter, meaning in _LETTERS.items() if meaning == name)
        if order.count(name) != 1 or not chunks[end] or chunks[end][end] != name:
            raise ValueError(f"needs one {name} ({letter}), as the {place} layer of its {place} chunk")
    return tuple(tuple(chunk) for chunk in chunks)


def _unrolled(text: str) -> str:
    """A layout as letters and bars alone."""
    result, size = [], 0
    for match in _GROUP.finditer(text.replace(",", "")):
        inside, repeats, letter, times, single = match.groups()
        if inside is not None:
            part, count = "".join(_repeated(one, text) for one in _INSIDE.finditer(inside)), int(repeats)
        else:
            part, count = letter or single, int(times or 1)
        size += len(part) * count
        if size > _MOST_SYMBOLS:
            raise ValueError(f"has more than {_MOST_SYMBOLS} layers")
        for symbol in part:
            _require_known(symbol, text)
        result.append(part * count)
    return "".join(result)


def _repeated(match: re.Match[str], text: str) -> str:
    letter, times, single = match.groups()
    count = int(times or 1)
    if count > _MOST_SYMBOLS:
        raise ValueError(f"has more than {_MOST_SYMBOLS} layers")
    return str(letter or single) * count


def _require_known(symbol: str, text: str) -> None:
    if symbol not in _LETTERS and symbol != "|":
        raise ValueError(
            f"has {symbol!r} at a place where Megatron reads E, t, L or |: write t*3 for three decoder layers, "
            '(tt|)*3 for three chunks of two, as in "Et*3|(t*4|)*2t*3L"'
        )


def split_keys(config: PipelineSettings) -> list[str]:
    """The keys of the split that `config` sets."""
    return [key for key in (LAYOUT, FIRST, LAST, EMBEDDING, LOSS) if getattr(config, key) not in (None, False)]


def split_problems(config: PipelineSettings, num_layers: int | None = None) -> Iterator[SplitProblem]:
    """The first problem of the pipeline split of `config`; `num_layers` where it is known."""
    keys = split_keys(config)
    if not keys:
        return
    pp, vpp = config.pipeline_model_parallel_size, config.vpp_size
    if pp == 1:
        for key in keys:
            if key not in (EMBEDDING, LOSS):  # which change nothing then
                text = "divides layers among pipeline stages, and pipeline_model_parallel_size is 1; leave it out"
                yield SplitProblem(key, text)
                return
    elif LAYOUT in keys:
        yield from _layout_problems(config, keys, num_layers)
    elif {FIRST, LAST} & set(keys) and {EMBEDDING, LOSS} & set(keys):
        yield SplitProblem(
            keys[0],
            f"excludes {keys[-1]}, in Megatron, too; keep one of the two, or write a pipeline_model_parallel_layout",
        )
    elif {FIRST, LAST} & set(keys):
        yield from _end_problems(config, keys, num_layers)
    elif num_layers is not None:
        counted = num_layers + len(keys)
        if counted % (pp * vpp):
            yield SplitProblem(
                keys[0],
                f"counts as a layer: {num_layers} layers and {len(keys)} of these keys are {counted}, which do not "
                f"divide into PP x VPP = {pp * vpp} equal parts; change PP or VPP, or write a {LAYOUT}",
            )


def _layout_problems(config: PipelineSettings, keys: list[str], num_layers: int | None) -> Iterator[SplitProblem]:
    pp, layout = config.pipeline_model_parallel_size, config.layer_layout
    assert layout is not None
    decoders = sum(chunk.count("decoder") for chunk in layout)
    vpp = config.virtual_pipeline_model_parallel_size
    if len(keys) > 1:
        yield SplitProblem(keys[1], f"excludes {LAYOUT}, which gives every layer its place; keep one of the two")
    elif len(layout) % pp:
        yield SplitProblem(
            LAYOUT,
            f"has {len(layout)} chunks, which do not divide among PP = {pp} stages; write {pp} chunks, or a multiple",
        )
    elif vpp not in (None, len(layout) // pp):
        yield SplitProblem(
            "virtual_pipeline_model_parallel_size",
            f"is {vpp}, and {LAYOUT} has {len(layout)} chunks on {pp} stages, {len(layout) // pp} each; leave it out",
        )
    elif num_layers is not None and decoders != num_layers:
        yield SplitProblem(LAYOUT, f"has {decoders} decoder layers, and the model {num_layers}; write {num_layers}")
    elif not all(layout):
        empty = layout.index(())
        text = f"leaves chunk {empty} (stage {empty % pp}) without any layer; give it one, or write fewer chunks"
        yield SplitProblem(LAYOUT, text)


def _end_problems(config: PipelineSettings, keys: list[str], num_layers: int | None) -> Iterator[SplitProblem]:
    pp, vpp = config.pipeline_model_parallel_size, config.vpp_size
    for key in keys:
        if getattr(config, key) % vpp:
            yield SplitProblem(
                key,
                f"is {getattr(config, key)}, which does not divide into VPP = {vpp} chunks; use a multiple of {vpp}, "
                f"or write a {LAYOUT}",
            )
            return
    if len(keys) == pp == 2 and vpp > 1:
        # Megatron's offset divides by the number of stages between them (0.16.1, 0.19.2).
        text = f"fails in Megatron together with {FIRST} where PP is 2 and VPP is {vpp}; leave it out: the rest is left"
        yield SplitProblem(LAST, text)
        return
    if num_layers is None:
        return
    remaining, stages = num_layers - sum(getattr(config, key) for key in keys), pp - len(keys)
    if remaining < 0 or bool(remaining) != bool(stages) or (stages and remaining % (stages * vpp)):
        chunks = f"{stages} other stages" if vpp == 1 else f"{stages} other stages of {vpp} chunks"
        yield SplitProblem(
            keys[0],
            f"and the model's {num_layers} layers leave {remaining} for {chunks}; they need "
            + (f"a multiple of {stages * vpp}, at least {stages * vpp}" if stages else "0: the sum of both keys"),
        )


def chunk_layers(config: PipelineSettings, num_layers: int) -> ChunkLayers:
    """Decoder layers of each stage's chunks. Raises `LayoutError` where the layers do not divide like that."""
    pp, vpp = config.pipeline_model_parallel_size, config.vpp_size
    for key, message in split_problems(config, num_layers):
        raise LayoutError(f"{key} {message}")
    if config.layer_layout is not None:
        return tuple(tuple(chunk.count("decoder") for chunk in config.layer_layout[stage::pp]) for stage in range(pp))
    first, last = (getattr(config, key) for key in (FIRST, LAST))
    ends = [count for count in (first, last) if count is not None]
    if ends:
        middle = (num_layers - sum(ends)) // max(pp - len(ends), 1)
        stages = [middle] * pp
        stages[0] = middle if first is None else first
        stages[-1] = middle if last is None else last
        return tuple((layers // vpp,) * vpp for layers in stages)
    embedding, loss = (bool(getattr(config, key)) for key in (EMBEDDING, LOSS))
    counted = num_layers + embedding + loss
    if counted % (pp * vpp):
        raise LayoutError(
            f"num_layers={num_layers} cannot be divided into {pp * vpp} pipeline chunks (pipeline {pp} x virtual "
            f"{vpp}): change one of them, or set num_layers_in_first_pipeline_stage or "
            "num_layers_in_last_pipeline_stage"
        )
    chunks = [[counted // (pp * vpp)] * vpp for _ in range(pp)]
    chunks[0][0] -= embedding
    chunks[-1][-1] -= loss
    return tuple(tuple(stage) for stage in chunks)
