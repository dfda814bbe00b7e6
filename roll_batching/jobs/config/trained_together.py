"""Features that the suite `TOGETHER` trains in pairs, against the same model on one rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import combinations

from roll_batching.jobs.config import features as f
from roll_batching.jobs.config.support import PACKING_REFUSALS, REFUSALS
from roll_batching.settings import support as s
from roll_batching.settings.megatron_config import MegatronConfig

TOGETHER = "strategy/test_what_goes_together.py"
"""The slow suite, below `tests`."""


def _layout(name: str, key: str, is_on: Callable[[MegatronConfig], object]) -> s.Feature:
    return s.Feature(name, f"strategy_args.strategy_config.{key}", lambda parts: is_on(parts.layout))


ROUTER_LOSS = s.Feature(
    "the z-loss of routers",
    "model_args.architecture.moe.z_loss_coeff",
    lambda parts: s.EXPERTS.is_on(parts) and parts.architecture.moe.z_loss_coeff,
)
TIED = s.Feature(
    "tied embeddings",
    "model_args.architecture.tie_word_embeddings",
    lambda parts: parts.architecture.tie_word_embeddings,
)
TENSOR = _layout(
    "tensor parallelism", "tensor_model_parallel_size", lambda layout: layout.tensor_model_parallel_size > 1
)
SEQUENCE = _layout(
    "sequence parallelism",
    "sequence_parallel",
    lambda layout: layout.sequence_parallel and layout.tensor_model_parallel_size > 1,
)
PIPELINE = _layout(
    "pipeline parallelism", "pipeline_model_parallel_size", lambda layout: layout.pipeline_model_parallel_size > 1
)
VIRTUAL_STAGES = _layout("virtual stages", "virtual_pipeline_model_parallel_size", lambda layout: layout.vpp_size > 1)
UNEVEN_STAGES = _layout(
    "stages of unequal size", "pipeline_model_parallel_layout", lambda layout: layout.has_uneven_stages
)
CONTEXT = _layout("context parallelism", "context_parallel_size", lambda layout: layout.cp_size > 1)
EXPERT_PARALLEL = _layout(
    "expert parallelism", "expert_model_parallel_size", lambda layout: layout.expert_model_parallel_size > 1
)
DISTRIBUTED_OPTIMIZER = _layout(
    "the distributed optimizer", "use_distributed_optimizer", lambda layout: layout.use_distributed_optimizer
)
OVERLAPPED = _layout("overlapped gradient reduction", "overlap_grad_reduce", lambda layout: layout.overlap_grad_reduce)
RECOMPUTED_LAYERS = _layout(
    "recomputed layers", "recompute_granularity", lambda layout: layout.recompute_granularity == "full"
)
RECOMPUTED_ATTENTION = _layout(
    "recomputed attention", "recompute_granularity", lambda layout: layout.recompute_granularity == "selective"
)

TRAINED_TOGETHER = (
    *(s.EXPERTS, ROUTER_LOSS, s.MOVING_BIASES, s.LATENT, s.HYBRID, s.HEADS, s.DELTA_NETS, s.OUTPUT_GATES),
    *(s.SANDWICH_NORMS, s.SINKS, s.ALL_BIASES, s.WINDOWS, s.QUERY_NORMS, TIED, s.GROUPED_QUERIES),
    *(s.MORE_RANKS_THAN_HEADS, s.ADAPTERS, s.FROZEN, s.VALUE_HEAD),
    *(TENSOR, SEQUENCE, PIPELINE, VIRTUAL_STAGES, UNEVEN_STAGES, CONTEXT, EXPERT_PARALLEL, DISTRIBUTED_OPTIMIZER),
    *(OVERLAPPED, RECOMPUTED_LAYERS, RECOMPUTED_ATTENTION, f.SIZE_PER_PACK, f.SHARED_PACKS),
)
"""Features of a role; `TOGETHER` trains each pair that is not refused and has a meaning."""
TRAINED_OF_JOBS = (
    *((f.SHARED_PREFIXES, other) for other in (f.REPLAY, f.CRITIC, f.KTO)),
    *((f.CP_PER_PACK, other) for other in (f.TEACHER, f.CRITIC, f.KTO)),
    *((f.UNPACKED, other) for other in (f.REPLAY, f.TEACHER, f.CRITIC, f.KTO, f.ADAPTERS)),
    *((f.ADAPTERS, other) for other in (f.REPLAY, f.TEACHER, f.KTO)),
)
"""Pairs of features of a job that `TOGETHER` trains."""
# Pairs that `TOGETHER` leaves out, since the one feature has no meaning beside the other.
_MEANINGLESS = (
    (s.HEADS, s.VALUE_HEAD),  # a critic has no heads
    (CONTEXT, f.SIZE_PER_PACK),
    (RECOMPUTED_LAYERS, RECOMPUTED_ATTENTION),
    (s.MORE_RANKS_THAN_HEADS, s.LATENT),
    # Routers sum over computed tokens. Shared prefixes are computed once, so the sums differ from those on one rank.
    (ROUTER_LOSS, f.SHARED_PACKS),
    (s.MOVING_BIASES, f.SHARED_PACKS),
)


def trained_pairs() -> Iterator[tuple[s.Feature, s.Feature]]:
    """Pairs that `TOGETHER` trains."""
    yield from TRAINED_OF_JOBS
    rows = (*REFUSALS, *PACKING_REFUSALS, *s.ROLE_REFUSALS)
    refused = [(row.feature, row.other) for row in rows]
    # By name: the features of the three tables are tested on different settings.
    left_out = {frozenset((feature.name, other.name)) for feature, other in (*refused, *_MEANINGLESS)}
    for feature, other in combinations(TRAINED_TOGETHER, 2):
        if frozenset((feature.name, other.name)) not in left_out:
            yield feature, other
