"""`from_parts`: an existing Megatron model, optimizer and process groups under a strategy."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection

from roll_batching.distributed import consensus, host_group
from roll_batching.distributed.consensus import exchange
from roll_batching.distributed.parallel_layout import describe_layout
from roll_batching.errors import LayoutError
from roll_batching.losses.runner import has_router_losses
from roll_batching.megatron_patches.layers import define_router_gemm
from roll_batching.modeling.adoption import ADOPTED_ENGINE, adopt_model
from roll_batching.modeling.cost import planning_cost
from roll_batching.modeling.experts import router_loss_weights
from roll_batching.modeling.head import defer_head as defer
from roll_batching.modeling.head import gpt_of
from roll_batching.planning import BatchingSpec, CostModel, RolePlanner
from roll_batching.planning.arrays import integer_of, kind_of
from roll_batching.planning.cost_model import require_cost
from roll_batching.planning.prefixes import SHORTEST_PREFIX
from roll_batching.samples import SampleBatch, find_shared_prefixes, gather_lengths
from roll_batching.settings import BatchingConfig
from roll_batching.strategy.compatibility import attention_backends, check_compatibility
from roll_batching.strategy.model_state import ModelState, StepSettings, TrainingState
from roll_batching.strategy.pack_features import sharing_obstacle, sharing_of

logger = logging.getLogger(__name__)


def require_process_group() -> None:
    """Raises `LayoutError` unless torch.distributed is initialised."""
    if not dist.is_initialized():
        raise LayoutError("no process group: call torch.distributed.init_process_group and build the model first")


def list_of_chunks(chunks: Any) -> list[Any]:
    """`chunks` as a list; raises `LayoutError` for another type, such as a model that is not in a list."""
    if not isinstance(chunks, list | tuple | torch.nn.ModuleList):
        raise LayoutError(
            "model_chunks must be a list of model chunks, one per virtual stage, and is "
            f"{kind_of(chunks)}: pass [model]"
        )
    return list(chunks)


def state_from_parts(
    chunks: Sequence[Any],
    batching: BatchingConfig,
    settings: StepSettings,
    *,
    pg_collection: Any,
    vocab_size: int | None,
    cost: CostModel | None,
    training: TrainingState | None,
    defer_head: bool,
    problems: Sequence[str] = (),
) -> ModelState:
    """The checked state of chunks that the caller built; defers their output head if asked. Collective.

    Args:
        chunks: this stage's model chunks.
        batching: micro-batching of training and forward passes.
        settings: settings of the schedule.
        pg_collection: the model's process groups; None: those of Megatron's parallel state.
        vocab_size: real vocabulary, when the head has padded columns.
        cost: the planner's cost model; None derives one from the model's config.
        training: optimizer and schedule; None: no gradient will be computed.
        defer_head: swap the output layer's class, so that losses compute log-probs from hidden states.
        problems: of optimizer and schedule, listed with those found here.

    Raises:
        LayoutError: (one rank) or `RankError` (several) with all that cannot work.
    """
    settings, vocab_size = _agree_on_parts(chunks, batching, settings, pg_collection, vocab_size, cost)
    gpt, config = gpt_of(chunks[0]), gpt_of(chunks[0]).config
    with consensus(host_group(), "from_parts"):
        rotates_rows = not settings.rows_form and adopt_model(chunks)
    layout = describe_layout(
        vpp_size=len(chunks),
        sequence_parallel=config.sequence_parallel,
        device=next(gpt.parameters()).device,
        groups=pg_collection,
    )
    layout = replace(layout, fully_sharded=gathers_every_layer(getattr(chunks[0], "ddp_config", None)))
    state = ModelState(
        layout=layout,
        chunks=chunks,
        dtype=config.params_dtype,
        cost=cost or planning_cost(config, gpt.vocab_size, layout, settings.cluster),
        batching=batching,
        settings=settings,
        attention=next(iter(attention_backends(chunks)), None),
        rotates_rows=rotates_rows,
        vocab_size=vocab_size,
        pg_collection=pg_collection,
        training=training,
    )
    with consensus(layout.host_group, "from_parts"):
        check_compatibility(state, defer_head=defer_head, problems=problems)
    _warn_of_router_losses(state)
    if config.num_moe_experts is not None:
        define_router_gemm()
    for chunk in chunks if defer_head else ():
        _defer_head(chunk)
    return state


def gathers_every_layer(ddp_config: Any) -> bool:
    """Whether a DistributedDataParallelConfig shards parameters, so that ranks meet in every layer.

    Megatron FSDP does with its strategy "optim_grads_params"; `overlap_param_gather` gathers once per step.
    """
    return bool(
        getattr(ddp_config, "use_megatron_fsdp", False)
        and ddp_config.data_parallel_sharding_strategy == "optim_grads_params"
    )


def _agree_on_parts(
    chunks: Sequence[Any],
    batching: BatchingConfig,
    settings: StepSettings,
    pg_collection: Any,
    vocab_size: int | None,
    cost: CostModel | None,
) -> tuple[StepSettings, int | None]:
    """Settings and vocabulary, checked and equal on all ranks as the model is; with FP8, the packs' multiple."""
    with consensus(host_group(), "from_parts") as facts:
        _check_types(chunks, batching, settings, pg_collection, cost)
        if vocab_size is not None:
            vocab_size = integer_of("vocab_size", vocab_size, error=LayoutError)
        facts.equal("vocab_size", vocab_size)
        facts.equal("the model", _describe_architecture(gpt_of(chunks[0])))
        facts.equal("how passes are batched", batching)
        facts.equal("the settings", settings)
    config = gpt_of(chunks[0]).config
    if getattr(config, "fp8", None):
        from roll_batching.settings.fp8 import token_multiple  # few models train in FP8

        settings = replace(settings, pack_multiple=token_multiple(config.fp8, config.fp8_recipe))
    return settings, vocab_size


def _check_types(chunks: Sequence[Any], batching: Any, settings: Any, pg_collection: Any, cost: Any) -> None:
    if not chunks or not all(isinstance(chunk, torch.nn.Module) for chunk in chunks):
        raise LayoutError(
            "model_chunks must be a list of model chunks, one per virtual stage, and is "
            f"{[type(chunk).__name__ for chunk in chunks]}"
        )
    if len({id(chunk) for chunk in chunks}) < len(chunks):
        raise LayoutError("model_chunks holds the same chunk twice: pass each virtual stage's chunk once")
    attributes = ("config", "decoder", "post_process", "position_embedding_type")
    models = [gpt_of(chunk) for chunk in chunks]
    other_models = [type(model).__name__ for model in models if not all(hasattr(model, name) for name in attributes)]
    if other_models:
        raise LayoutError(f"{', '.join(other_models)} is not a GPTModel: pass model_chunks of GPTModel")
    if not isinstance(batching, BatchingConfig) or not isinstance(settings, StepSettings):
        raise LayoutError(
            f"batching is a {type(batching).__name__} and settings a {type(settings).__name__}: pass a BatchingConfig "
            "and a StepSettings"
        )
    batching.load_algorithms()
    if pg_collection is not None and not isinstance(pg_collection, ProcessGroupCollection):
        raise LayoutError(f"pg_collection is a {type(pg_collection).__name__}: pass a ProcessGroupCollection, or None")
    if cost is not None:
        require_cost(cost)


def _describe_architecture(gpt: Any) -> str:
    """Sizes that the chunks of one model have in common on all ranks, as text."""
    config = gpt.config
    names = ("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups", "kv_channels")
    sizes = [f"{name} {getattr(config, name)}" for name in (*names, "num_moe_experts", "params_dtype")]
    return ", ".join([*sizes, f"vocab_size {gpt.vocab_size}", f"positions {gpt.position_embedding_type}"])


def _warn_of_router_losses(state: ModelState) -> None:
    config = gpt_of(state.chunks[0]).config
    if state.training is None or not has_router_losses(config):
        return
    groups = state.pg_collection or ProcessGroupCollection.use_mpu_process_groups()
    auxiliary, z_loss = router_loss_weights(config, groups.tp_cp)
    if (auxiliary, z_loss) != (1.0, 1.0) and dist.get_rank() == 0:
        logger.warning(
            "with calculate_per_token_loss this Megatron-Core makes the routers' auxiliary loss %g times and their "
            "z-loss %g times as strong as their coefficients say: divide moe_aux_loss_coeff and moe_z_loss_coeff by "
            "that, or set calculate_per_token_loss=False",
            auxiliary,
            z_loss,
        )


def _defer_head(chunk: Any) -> None:
    # Under overlap_param_gather DDP's pre-forward hooks look modules up by object and class: swapping the output
    # layer's class with the hooks in place ends in a KeyError in a later forward pass.
    hooked = getattr(chunk, "use_forward_hook", False)
    if hooked:
        chunk.disable_forward_pre_hook()
    defer(gpt_of(chunk))
    if hooked:
        chunk.enable_forward_pre_hook()


# ---- proof of an adopted model


SIBLING_LIMITS = {torch.float32: 1e-3, torch.float64: 1e-6}
"""Relative differences of log-probs that `with_proof` allows, by dtype. A wrong position or mask makes 0.1 and more."""
_COARSE_LIMIT = 0.05
_PROMPT, _RESPONSE = SHORTEST_PREFIX + 2, 2


def with_proof(strategy: Any) -> ModelState:
    """The state of a strategy's adopted model, tried on siblings: their prefix shared, against each alone. Collective.

    It may not share prefixes, nor have sizes per pack, if they differ. That finds what no list of classes can: modules
    of others that count positions by the rows of a pack.
    """
    state = strategy.state
    layout, is_adopted = state.layout, state.rotates_rows or state.attention is ADOPTED_ENGINE
    if not is_adopted or sharing_obstacle(state) or (not sharing_of(state) and state.settings.max_cp_size == 1):
        return state
    gpt = gpt_of(state.chunks[0])
    if getattr(gpt.config, "fp8", None):
        return replace(
            state, adoption_fault=f"fp8={gpt.config.fp8} was not tried with the attention of a caller's model"
        )
    columns = state.vocab_size or gpt.vocab_size
    generator = torch.Generator().manual_seed(layout.dp_rank)
    prompt, *responses = (torch.randint(columns, (n,), generator=generator) for n in (_PROMPT, _RESPONSE, _RESPONSE))
    siblings = SampleBatch.from_lists(
        {"input_ids": [torch.cat([prompt, response]) for response in responses]},
        {"input_ids": "token"},
        ids=[2 * layout.dp_rank, 2 * layout.dp_rank + 1],
    )
    spec = BatchingSpec(mode="packed", max_tokens=64 * layout.tp_size * layout.cp_size)
    constraints = replace(state.settings, max_cp_size=1).constraints(layout, spec)

    def log_probs(batch: SampleBatch, shares: bool) -> torch.Tensor:
        table = gather_lengths(batch, layout.dp_group)
        if shares:
            table = find_shared_prefixes(batch, table, layout.dp_group)
        planner = RolePlanner(train=constraints, infer=constraints, cost=state.cost, share_prefixes=shares)
        return strategy.compute_log_probs(batch, planner.plan(table, home_rank=table.location))["log_probs"]

    apart = torch.cat([log_probs(siblings.select(torch.tensor([row])), False) for row in range(2)])
    gap = float((log_probs(siblings, True) - apart).norm() / apart.norm())
    largest = max(exchange(layout.host_group, "from_parts", lambda: gap))
    limit = SIBLING_LIMITS.get(state.dtype, _COARSE_LIMIT)
    if largest <= limit:
        return state
    fault = (
        f"log-probs differ by {largest:.1e} where two samples share a prefix (at most {limit:g} in {state.dtype}): a "
        "module of the model counts positions by the rows of a pack"
    )
    return replace(state, adoption_fault=fault)
