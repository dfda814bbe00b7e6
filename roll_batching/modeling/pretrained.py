"""Loads the weights of a Hugging Face model directory into a Megatron model in any parallel layout."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from roll_batching.distributed import consensus
from roll_batching.distributed.parallel_layout import ParallelLayout
from roll_batching.errors import CheckpointError, LayoutError
from roll_batching.huggingface.config_json import translate
from roll_batching.huggingface.directory import CONFIG, directory_of, read_json
from roll_batching.huggingface.families import Family, head_name, rules_of, untrained_tensors
from roll_batching.huggingface.layer_rules import EMBEDDING, HEAD, copies_in_heads
from roll_batching.huggingface.stored import StoredTensors, ranges
from roll_batching.huggingface.tensors import Sizes, TensorRule, expected_tensors, local_shape, pieces
from roll_batching.modeling.adapters import global_name
from roll_batching.modeling.experts import expert_biases
from roll_batching.modeling.head import gpt_of
from roll_batching.settings import ArchitectureConfig

logger = logging.getLogger(__name__)

VALUE_HEAD = "output_layer.weight"
"""Name of a value head's weight."""
_MANTISSA_BITS = {"F64": 52, "F32": 23, "F16": 10, "BF16": 7}
"""Bits of the mantissa, by safetensors' names of dtypes."""


@dataclass(frozen=True, kw_only=True)
class PlacedParameter:
    """A parameter of this rank, its rule, and the ranks that share it."""

    name: str
    """Name in the whole model: layers and experts are numbered over all ranks."""
    parameter: torch.Tensor
    """A parameter, or a router's expert bias, which is a buffer."""
    rule: TensorRule
    rank: int
    """Tensor-parallel rank (of experts: expert-tensor-parallel rank)."""
    ranks: int
    """Size of `group`."""
    group: Any
    """The tensor-parallel group that shards the parameter."""
    expert_group: Any
    """The ranks that share the tensors of all experts, tensor-parallel ranks first; None for other parameters."""
    is_first_replica: bool
    """Whether this rank is the first of the data- and context-parallel ranks with the same shard."""
    parts: tuple[PlacedParameter, ...] = ()
    """This rank's experts, if one checkpoint tensor holds all experts; otherwise empty."""
    adapted: Any = None
    """The linear layer with adapters whose weight the parameter is; None for others."""

    def values(self) -> torch.Tensor:
        """The parameter, with its layer's adapters added."""
        if self.adapted is None:
            return self.parameter.detach()
        from roll_batching.modeling.adapters import merged_weight  # few models have adapters

        return merged_weight(self.adapted)


def placed_parameters(
    chunks: Sequence[Any], family: Family, architecture: ArchitectureConfig, *, value_head: bool = False
) -> Iterator[PlacedParameter]:
    """All parameters of this rank's chunks with their rules, for Megatron's local and TransformerEngine's layer spec.

    The parameters of a `value_head`, for which families have no rule, and of adapters are left out.
    Raises `LayoutError` naming all parameters without a rule or with another shape.
    """
    rules = rules_of(family, architecture)
    by_name = {**rules, **{rule.fused: rule for rule in rules.values() if rule.fused is not None}}
    sizes, unknown, parameters = Sizes.of(architecture), [], []
    for chunk in chunks:
        gpt = gpt_of(chunk)
        groups = gpt.pg_collection
        adapted = {f"{name}.weight": layer for name, layer in gpt.named_modules() if hasattr(layer, "adapter")}
        for local, parameter in (*gpt.named_parameters(), *expert_biases(gpt)):
            name, is_expert = global_name(gpt, local), ".experts." in local
            if ".adapter." in local:
                continue
            if value_head and name == VALUE_HEAD:
                continue
            if name not in by_name:
                unknown.append(name)
                continue
            shards, replicas = (groups.expt_tp, groups.expt_dp) if is_expert else (groups.tp, groups.dp_cp)
            parameter_place = PlacedParameter(
                name=name,
                parameter=parameter,
                rule=by_name[name],
                rank=shards.rank(),
                ranks=shards.size(),
                group=shards,
                expert_group=groups.tp_ep if is_expert else None,
                # The last stage of a model with heads has a copy of the embedding: the first one gives it.
                is_first_replica=replicas.rank() == 0 and not (name == EMBEDDING.ours and not gpt.pre_process),
                adapted=adapted.get(local),
            )
            shape = local_shape(parameter_place.rule, sizes, parameter_place.ranks)
            if tuple(parameter.shape) != shape:
                unknown.append(f"{name} {list(parameter.shape)} (expected {list(shape)})")
                continue
            parameters.append(parameter_place)
    if unknown:
        raise LayoutError(
            f"parameters without a counterpart in {family.architecture}: {', '.join(ranges(unknown))}. The model was "
            "not built from its config.json"
        )
    yield from parameters


def family_of(path: Path, own: str | None = None) -> Family:
    """The family of the model directory `path`; `own` is `ModelArgs.family`.

    Raises CheckpointError for a `config.json` that is not supported. A job's rules refuse it earlier; a strategy that
    was given `architecture` beside the directory has no such rules.
    """
    translation = translate(read_json(path / CONFIG), own)
    if translation.problems or translation.family is None:
        raise CheckpointError(f"{path / CONFIG}: {'; '.join(translation.problems)}")
    family = translation.family
    shapes = StoredTensors(path).shapes if family.other_prefixes or family.stacks_gated_experts else {}
    if family.other_prefixes and any(name.startswith(new) for name in shapes for _, new in family.other_prefixes):
        family = replace(family, prefixes=family.other_prefixes)
    if family.stacks_gated_experts:
        # Either matrix may be square, and tell nothing; not both.
        hidden, stacks = translation.architecture["hidden_size"], {"experts.gate_up_proj": 2, "experts.down_proj": 1}
        ends = [shape[at] for name, shape in shapes.items() for end, at in stacks.items() if name.endswith(end)]
        if all(width == hidden for width in ends):
            family = replace(family, mixture=tuple(rule.with_outputs_first() for rule in family.mixture))
    return family


@torch.no_grad()
def load_pretrained(
    chunks: Sequence[Any],
    architecture: ArchitectureConfig,
    name: str,
    layout: ParallelLayout,
    own_family: str | None = None,
    value_head: bool = False,
) -> None:
    """Loads the parameters of `chunks` from the model directory `name`; each rank reads its shards only. Collective.

    `own_family` is `ModelArgs.family`. A `value_head` keeps its values: the directory's output layer is not read.
    Raises RankError, the same on all ranks, for files that cannot be read, and, before any parameter changes, for
    tensors that are missing, of another shape or unknown.
    """
    with consensus(layout.host_group, f"loading {name}"):
        path = directory_of(name)
        family = family_of(path, own_family)
        parameters = list(placed_parameters(chunks, family, architecture, value_head=value_head))
        stored = StoredTensors(path)
        sizes = Sizes.of(architecture)
        expected = expected_tensors(rules_of(family, architecture), sizes)
        untrained = untrained_tensors(family, architecture, read_json(path / CONFIG), stored.shapes)
        redundant = [head_name(family)] if architecture.tie_word_embeddings else []
        copies = copies_in_heads(family, architecture, stored.shapes)
        problems = stored.misfits(expected, [*redundant, *untrained, *copies])
        if problems and architecture.mtp_num_layers:
            problems.append(
                f"mtp_num_layers: {architecture.mtp_num_layers} asks for heads of multi-token prediction; where the "
                "files lack them, leave it out"
            )
        if problems:
            raise CheckpointError(f"the tensors in {path} do not match its {CONFIG}: {'; '.join(problems)}")
    if untrained and dist.get_rank() == 0:
        logger.warning("%s: %s is not trained; an export copies it", name, ranges(untrained))
    _warn_of_rounding(stored, parameters, name)
    with consensus(layout.host_group, f"loading {name}"):
        try:
            for parameter in parameters:
                _load(parameter, stored, sizes, [] if value_head else redundant)
        finally:
            stored.close()


def _warn_of_rounding(stored: StoredTensors, parameters: Sequence[PlacedParameter], name: str) -> None:
    """Warns on rank 0 if the model's dtype is less precise than the files'."""
    dtype = parameters[0].parameter.dtype
    finer = sorted(
        {
            stored.dtypes[name]
            for placed in parameters
            for name, _ in placed.rule.theirs
            if _MANTISSA_BITS.get(stored.dtypes[name], 0) > -math.log2(torch.finfo(placed.parameter.dtype).eps)
        }
    )
    if finer and dist.get_rank() == 0:
        logger.warning(
            "the files of %s are in %s and the model in %s (model_args.dtype): weights are rounded", name, finer, dtype
        )


def _load(placed: PlacedParameter, stored: StoredTensors, sizes: Sizes, redundant: Sequence[str]) -> None:
    """Reads a parameter's slices from the files. Tensors `redundant` must repeat the embedding, or CheckpointError."""
    parameter, end = placed.parameter, 0
    for piece in pieces(placed.rule, sizes, placed.rank, placed.ranks):
        target = parameter[piece.at]
        if piece.of_expert:
            for _, values in stored.read(piece.name, piece.rows):
                target.copy_(piece.select(values[0]))
            end = piece.at.stop
            continue
        for region, values in stored.read(piece.name, piece.rows, piece.columns):
            target[region].copy_(values)
        end = piece.at.stop
        for head in redundant if placed.rule.ours in (EMBEDDING.ours, HEAD.ours) else ():
            if head in stored.shapes and not all(
                torch.equal(values.to(target), target[region]) for region, values in stored.read(head, piece.rows)
            ):
                raise CheckpointError(
                    f"{stored.path}: {head} differs from {piece.name}, but {CONFIG} has tie_word_embeddings: true. "
                    f"Remove {head} from the files, or set tie_word_embeddings to false"
                )
    parameter[end:].zero_()  # padding of the vocabulary
    if parameter.dtype is torch.float16 and not bool(parameter.isfinite().all()):
        raise CheckpointError(
            f"{stored.path}: {placed.rule.theirs[0][0]} has values beyond fp16: set model_args.dtype to bf16 or fp32"
        )
