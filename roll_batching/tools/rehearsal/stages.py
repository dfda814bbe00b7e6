"""Chooses the pipeline stages and model depths to rehearse; extrapolates deep models, and FP8 copies of weights."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from roll_batching.jobs.config import JobConfig, WorkerConfig
from roll_batching.jobs.config.auto_caps import with_value
from roll_batching.jobs.config.layout_rules import differing_keys
from roll_batching.jobs.config.objective_rules import wants_reference
from roll_batching.jobs.config.rl_rules import uses_critic
from roll_batching.jobs.config.task_rules import uses_teacher
from roll_batching.modeling.head import gpt_of
from roll_batching.settings import ArchitectureConfig, MegatronConfig
from roll_batching.settings.fp8 import fp8_layers
from roll_batching.settings.pipeline_split import ChunkLayers
from roll_batching.tools.rehearsal.task import PhasePeak, RankReport, TrainingBatch

FEW, MORE = 2, 3
"""Layers per chunk of the two shallow models from which a deep one is extrapolated."""
WHOLE = 4
"""Largest number of layers per chunk that is rehearsed without extrapolation."""


@dataclass(frozen=True, kw_only=True)
class StageKind:
    """A group of like pipeline stages. One of them is rehearsed for all: the one that needs the most memory."""

    numbers: tuple[int, ...]
    """Stage numbers of the group; the first one is rehearsed."""
    chunk_layers: tuple[int, ...]
    """Layers of each model chunk."""
    size: int
    """Number of stages of the pipeline."""

    @property
    def name(self) -> str:
        """Name for reports."""
        return _name_of(self.numbers, self.size)

    @property
    def stage(self) -> int:
        """Number of the rehearsed stage."""
        return self.numbers[0]

    @property
    def stages(self) -> int:
        """Number of stages in the group."""
        return len(self.numbers)


@dataclass(frozen=True, kw_only=True)
class RankKind:
    """Ranks that hold the same kind of stage of every model. The first one is rehearsed for all."""

    name: str
    rank: int
    stages: int
    """Number of the policy's pipeline stages of these ranks that no earlier kind of ranks represents."""
    policy: StageKind


def letters_of(split: ChunkLayers, architecture: ArchitectureConfig) -> tuple[str, ...]:
    """Layer letters of each stage (`HybridConfig.pattern`), sorted within a chunk; empty texts for other models."""
    if architecture.hybrid is None:
        return ("",) * len(split)
    pattern, first, letters = architecture.hybrid.pattern, 0, [""] * len(split)
    for chunk in range(len(split[0])):
        for stage, counts in enumerate(split):
            letters[stage] += "".join(sorted(pattern[first : first + counts[chunk]])) + "|"
            first += counts[chunk]
    return tuple(letters)


def stages_of(split: ChunkLayers, letters: Sequence[str] | None = None) -> list[StageKind]:
    """Groups pipeline stages: the first, the last, and middle ones with equal layers and equal `letters`.

    The first middle stage of a kind represents it: under 1F1B it holds the activations of the most micro-batches.
    """
    last = len(split) - 1
    if last == 0:
        return [StageKind(numbers=(0,), chunk_layers=split[0], size=1)]
    middle: dict[tuple[tuple[int, ...], str], list[int]] = {}
    for stage in range(1, last):
        middle.setdefault((split[stage], letters[stage] if letters else ""), []).append(stage)
    numbers = [[0], *middle.values(), [last]]
    return [StageKind(numbers=tuple(group), chunk_layers=split[group[0]], size=len(split)) for group in numbers]


def rank_kinds(policy: Sequence[StageKind], frozen: Mapping[str, Sequence[StageKind]], world: int) -> list[RankKind]:
    """Groups the ranks by the kinds of stages that they hold, of the policy and of `frozen` models.

    `frozen`: kinds of stages by role; those in the same pipeline as the policy do not divide a group.
    """
    others = {
        name: kinds for name, kinds in frozen.items() if kinds[0].size > 1 and _numbers(kinds) != _numbers(policy)
    }
    pipelines = (policy, *others.values())
    ranks: dict[tuple[int, ...], list[int]] = {}
    # Stages are the outermost dimension of ranks: the stage of a pipeline changes at multiples of this step only.
    for rank in range(0, world, world // math.lcm(*(kinds[0].size for kinds in pipelines))):
        stages = [rank * kinds[0].size // world for kinds in pipelines]
        key = tuple(
            next(at for at, kind in enumerate(kinds) if stage in kind.numbers)
            for kinds, stage in zip(pipelines, stages, strict=True)
        )
        ranks.setdefault(key, []).append(rank)
    result: list[RankKind] = []
    represented: set[int] = set()
    for key, members in ranks.items():
        names = []
        for role, kinds in zip(("", *others), pipelines, strict=True):
            size = kinds[0].size
            stages = list(dict.fromkeys(rank * size // world for rank in members))
            names.append(f"{role}'s {_name_of(stages, size)}" if role else _name_of(stages, size))
        policy_stages = {rank * policy[0].size // world for rank in members}
        stages_here = len(policy_stages - represented)
        represented |= policy_stages
        result.append(RankKind(name=", ".join(names), rank=members[0], stages=stages_here, policy=policy[key[0]]))
    return result


def _numbers(kinds: Sequence[StageKind]) -> list[tuple[int, ...]]:
    return [kind.numbers for kind in kinds]


def _name_of(stages: Sequence[int], size: int) -> str:
    """Name for reports of the stages `stages` of a pipeline of `size` stages."""
    if size == 1:
        return "the only stage"
    if len(stages) == 1:
        return f"stage {stages[0]}"
    follow = stages[-1] - stages[0] == len(stages) - 1
    listed = f"{stages[0]} to {stages[-1]}" if follow else ", ".join(map(str, stages))
    return f"stages {listed} ({stages[0]})"


def depths_of(
    chunk_layers: tuple[int, ...], split: ChunkLayers, megatron: MegatronConfig, architecture: ArchitectureConfig
) -> tuple[int | None, ...]:
    """Numbers of layers per chunk with which to rehearse a stage of `chunk_layers`; (None,): as many as the job has.

    A deep stage with equal layers and equal chunks is rehearsed with two small numbers, and extrapolated. All stages of
    the shallow models have the same number of layers, even if the stages of the job differ.
    """
    are_equal = megatron.recompute_method != "block" and (megatron.recompute_num_layers or 1) == 1
    if architecture.vision is not None:
        are_equal = False  # with few layers the encoder may set the peak, with many the layers
    if architecture.moe is not None and architecture.moe.layer_freq != 1:
        are_equal = False
    if any(
        part is not None for part in (architecture.window_layers, architecture.gated_delta_net, architecture.hybrid)
    ):
        are_equal = False
    if are_equal and len(set(chunk_layers)) == 1 and chunk_layers[0] > WHOLE:
        return FEW, MORE
    is_even = len({count for stage in split for count in stage}) == 1
    return (chunk_layers[0] if is_even else None,)


def frozen_roles(config: JobConfig) -> dict[str, WorkerConfig]:
    """Frozen roles that the job builds, by name. Under adapters the reference is the policy's base, and not built."""
    roles: dict[str, WorkerConfig] = {}
    if config.reference is not None and wants_reference(config) and config.actor_train.model_args.lora_target is None:
        roles["reference"] = config.reference
    if config.teacher is not None and uses_teacher(config):
        roles["teacher"] = config.teacher
    return roles


def rehearsed_depths(
    config: JobConfig, kind: StageKind, split: ChunkLayers, megatron: MegatronConfig, architecture: ArchitectureConfig
) -> tuple[int | None, ...]:
    """`depths_of` the stage; (None,), all layers, if some are frozen or another model differs in shape or layout."""
    if config.actor_train.model_args.freeze_module_prefix is not None:
        return (None,)
    others = [config.critic if uses_critic(config) else None, *frozen_roles(config).values()]
    for role in others:
        if role is None:
            continue
        if role.model_args.architecture != architecture or differing_keys(role, config.actor_train):
            return (None,)
    return depths_of(kind.chunk_layers, split, megatron, architecture)


# ---- extrapolation from two shallow models


def extrapolate_layers(few: RankReport, more: RankReport, layers: tuple[int, int, float]) -> RankReport:
    """Extrapolates the report of a rank with `layers[2]` layers from those with `layers[0]` and `layers[1]` layers."""
    shallow, deeper, target = layers
    share = (target - shallow) / (deeper - shallow)

    def extrapolate(a: float, b: float) -> float:
        return a + (b - a) * share

    def by_key(a: Mapping[str, float], b: Mapping[str, float]) -> dict[str, float]:
        return {
            key: max(extrapolate(a.get(key, 0), b.get(key, 0)), 0) for key in (*a, *(key for key in b if key not in a))
        }

    def peak(phase: str) -> PhasePeak:
        a, b = few.peaks[phase], more.peaks[phase]
        return PhasePeak(
            phase=phase,
            bytes=extrapolate(a.bytes, b.bytes),
            kinds=by_key(a.kinds, b.kinds),
            holders=by_key(a.holders, b.holders),
        )

    def batch(a: TrainingBatch, b: TrainingBatch) -> TrainingBatch:
        return replace(b, model_flops=extrapolate(a.model_flops, b.model_flops))

    calls = by_key({k: v[0] for k, v in few.collectives.items()}, {k: v[0] for k, v in more.collectives.items()})
    sizes = by_key({k: v[1] for k, v in few.collectives.items()}, {k: v[1] for k, v in more.collectives.items()})
    reads = by_key(dict(few.host_reads), dict(more.host_reads))
    return replace(
        more,
        parameters=extrapolate(few.parameters, more.parameters),
        layer_weights=extrapolate(few.layer_weights, more.layer_weights),
        kept=by_key(few.kept, more.kept),
        peaks={phase: peak(phase) for phase in more.peaks if phase in few.peaks},
        flops=by_key(few.flops, more.flops),
        collectives={key: (round(calls[key]), sizes[key]) for key in calls},
        host_reads={key: round(count) for key, count in reads.items()},
        training=batch(few.training, more.training),
        critic=None if few.critic is None or more.critic is None else batch(few.critic, more.critic),
        seconds=few.seconds + more.seconds,
    )


# ---- TransformerEngine's layers


ROLES = ("actor_train", "actor_infer", "reference", "critic", "teacher")
COPIES_PER_WEIGHT = {"tensorwise": 2.0, "blockwise": 2.0, "mxfp8": 2.0 + 2 / 32}
"""Bytes per weight of its FP8 copies, by recipe: one copy by rows and one by columns, and the scales of mxfp8.

TransformerEngine keeps them from the first micro-batch of a step to the last (`_fp8_workspaces`), and until the next
step. A tensorwise copy has no second part on Blackwell.
"""
_LOCAL: dict[str, Any] = {"transformer_impl": "local", "fp8": None, "fp8_recipe": None, "first_last_layers_bf16": False}


def uses_transformer_engine(config: JobConfig) -> bool:
    """Whether the policy's layers are TransformerEngine's."""
    return config.actor_train.strategy_args.strategy_config.transformer_impl == "transformer_engine"


def with_local_layers(config: JobConfig) -> JobConfig:
    """Copy of `config` with Megatron's local layers, without FP8, in place of TransformerEngine's."""
    for role in ROLES:
        settings = getattr(config, role)
        layout = None if settings is None else settings.strategy_args.strategy_config
        if layout is None or layout.transformer_impl != "transformer_engine":
            continue
        attention = "auto" if layout.attention_backend == "transformer_engine" else layout.attention_backend
        local = layout.model_copy(update={**_LOCAL, "attention_backend": attention})
        config = with_value(config, f"{role}.strategy_args.strategy_config", local)
    return config


def transformer_engine_notes(config: JobConfig) -> tuple[str, ...]:
    """Assumptions of a rehearsal of TransformerEngine's layers, for its report."""
    if not uses_transformer_engine(config):
        return ()
    notes = ["TransformerEngine's layers are rehearsed as Megatron's local ones, whose kernels are counted"]
    if config.actor_train.strategy_args.strategy_config.fp8 is not None:
        notes.append(
            "FP8: activations are counted in bf16, which is more than TransformerEngine keeps of the inputs of linear "
            "layers; FLOPs are those of bf16, and no time is predicted from them"
        )
    return tuple(notes)


def layer_weights(chunks: Sequence[Any]) -> int:
    """Number of weights in the linear layers of all decoder layers, without routers."""
    return sum(
        parameter.numel()
        for chunk in chunks
        for name, parameter in gpt_of(chunk).decoder.layers.named_parameters()
        if parameter.dim() == 2 and ".router." not in name  # not convolutions
    )


def copies_in_fp8(megatron: MegatronConfig, split: ChunkLayers, stage: int, weights: float) -> float:
    """Bytes of the FP8 copies of the weights of pipeline stage `stage`.

    `weights`: number of weights of all its layers. Layers that stay in bf16 (first and last) have no copies.
    """
    if megatron.fp8_recipe is None:
        return 0.0
    held, first = [], 0
    for chunk in range(len(split[0])):
        for number, counts in enumerate(split):
            if number == stage:
                held.append(range(first, first + counts[chunk]))
            first += counts[chunk]
    count, num_layers = sum(map(len, held)), sum(map(sum, split))
    in_fp8 = sum(fp8_layers(megatron, layers, num_layers) for layers in held)
    return COPIES_PER_WEIGHT[megatron.fp8_recipe] * weights * in_fp8 / max(count, 1)
