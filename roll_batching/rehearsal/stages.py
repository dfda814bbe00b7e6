"""Kinds of pipeline stages that a rehearsal runs, and the layers of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from roll_batching.jobs.config import JobConfig
from roll_batching.jobs.config.critic_rules import uses_critic
from roll_batching.settings import ArchitectureConfig, MegatronConfig
from roll_batching.settings.pipeline_split import ChunkLayers

FEW, MORE = 2, 3
"""Layers per chunk of the two shallow models from which a deep one is extrapolated."""
WHOLE = 4
"""Largest number of layers per chunk that is rehearsed without extrapolation."""


@dataclass(frozen=True, kw_only=True)
class StageKind:
    """Pipeline stages that need the same memory, or less than one of them, which is rehearsed."""

    name: str
    stage: int
    """Number of the rehearsed one."""
    stages: int
    chunk_layers: tuple[int, ...]
    """Layers of each of its model chunks."""


def letters_of(split: ChunkLayers, architecture: ArchitectureConfig) -> tuple[str, ...]:
    """The letters of each stage's layers, in one order, where the layers have one part each; else empty texts."""
    if architecture.hybrid is None:
        return ("",) * len(split)
    pattern, first, letters = architecture.hybrid.pattern, 0, [""] * len(split)
    for chunk in range(len(split[0])):
        for stage, counts in enumerate(split):
            letters[stage] += "".join(sorted(pattern[first : first + counts[chunk]])) + "|"
            first += counts[chunk]
    return tuple(letters)


def stages_of(split: ChunkLayers, letters: Sequence[str] | None = None) -> list[StageKind]:
    """Kinds of pipeline stages: the first, the last, and the middle ones by their layers and the `letters` of these.

    The first middle stage of a kind represents it: under 1F1B it holds the activations of the most micro-batches.
    """
    last = len(split) - 1
    if last == 0:
        return [StageKind(name="the only stage", stage=0, stages=1, chunk_layers=split[0])]
    middle: dict[tuple[tuple[int, ...], str], list[int]] = {}
    for stage in range(1, last):
        middle.setdefault((split[stage], letters[stage] if letters else ""), []).append(stage)
    numbers = [[0], *middle.values(), [last]]
    return [StageKind(name=_name_of(one), stage=one[0], stages=len(one), chunk_layers=split[one[0]]) for one in numbers]


def _name_of(stages: list[int]) -> str:
    """Name of some stages, of which the first is rehearsed."""
    if len(stages) == 1:
        return f"stage {stages[0]}"
    follow = stages[-1] - stages[0] == len(stages) - 1
    listed = f"{stages[0]} to {stages[-1]}" if follow else ", ".join(map(str, stages))
    return f"stages {listed} ({stages[0]})"


def depths_of(
    chunk_layers: tuple[int, ...], split: ChunkLayers, megatron: MegatronConfig, architecture: ArchitectureConfig
) -> tuple[int | None, ...]:
    """Layers per chunk to rehearse for a stage with `chunk_layers`; None: the job's own model.

    Two small numbers where all layers and all chunks of a deep stage are equal. All stages of those shallow models have
    the same number of layers, also where the job's have not.
    """
    are_equal = megatron.recompute_method != "block" and (megatron.recompute_num_layers or 1) == 1
    if architecture.moe is not None and architecture.moe.layer_freq != 1:
        are_equal = False
    if any(one is not None for one in (architecture.window_layers, architecture.gated_delta_net, architecture.hybrid)):
        are_equal = False
    if are_equal and len(set(chunk_layers)) == 1 and chunk_layers[0] > WHOLE:
        return FEW, MORE
    is_even = len({count for stage in split for count in stage}) == 1
    return (chunk_layers[0] if is_even else None,)


def rehearsed_depths(
    config: JobConfig, kind: StageKind, split: ChunkLayers, megatron: MegatronConfig, architecture: ArchitectureConfig
) -> tuple[int | None, ...]:
    """`depths_of` the stage; all layers of the job's models where the critic has another shape than the policy."""
    if config.critic is not None and uses_critic(config) and config.critic.model_args.architecture != architecture:
        return (None,)
    return depths_of(kind.chunk_layers, split, megatron, architecture)
