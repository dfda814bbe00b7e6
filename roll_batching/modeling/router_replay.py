"""Router replay: routers take the experts of a batch's field instead of their own choice, or record their choice.

Megatron-Core asks an object at each router for the experts of a micro-batch (`router_replay`, from 0.16.1 on). Its own
class keeps them in one list of the process, in the order of construction; here each router has those of the pack that
is computed, cut to its layer and to the tokens of its rank. Weights of experts come from the current router: gradients
flow as without replay.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from roll_batching.distributed.parallel_layout import ParallelLayout
from roll_batching.errors import DataError, LayoutError
from roll_batching.modeling.head import gpt_of
from roll_batching.packing.batch import PackedBatch
from roll_batching.packing.pack_layout import PackLayout
from roll_batching.planning import Plan
from roll_batching.samples import SampleBatch
from roll_batching.samples.fields import EXPERTS_SPEC, ROUTED_EXPERTS
from roll_batching.samples.token_fields import token_place

UNSET = EXPERTS_SPEC.pad
"""Expert of a token whose router chooses: padding, and tokens outside all plans."""


def mixture_layers(config: Any) -> list[int]:
    """Indices from 0 on of the whole model's layers with experts, in order: axis 1 of the field."""
    if config.num_moe_experts is None:
        return []
    every = config.moe_layer_freq
    return [i for i in range(config.num_layers) if (i % every == 0 if isinstance(every, int) else every[i])]


def _routers(chunks: Sequence[Any]) -> list[tuple[Any, int, Any]]:
    """(chunk, index of the layer in the whole model, router) of the mixtures of this stage, in order."""
    return [
        (chunk, layer.layer_number - 1, layer.mlp.router)
        for chunk in chunks
        for layer in gpt_of(chunk).decoder.layers
        if hasattr(layer.mlp, "router")
    ]


def stage_columns(chunks: Sequence[Any]) -> list[int]:
    """Positions of this stage's mixture layers among all mixture layers of the model."""
    columns = {layer: column for column, layer in enumerate(mixture_layers(gpt_of(chunks[0]).config))}
    return [columns[layer] for _, layer, _ in _routers(chunks)]


def replay_obstacle(chunks: Sequence[Any], plan: Plan | None = None, *, rows_form: bool = False) -> str | None:
    """Why routers of this model cannot replay or record experts, and what to set; None if they can."""
    config = gpt_of(chunks[0]).config
    if config.num_moe_experts is None:
        return f"the model has no mixture of experts: leave out router_replay and the field {ROUTED_EXPERTS}"
    if getattr(config, "moe_router_fusion", False):
        return "moe_router_fusion chooses experts inside a kernel: set it to false"
    if config.moe_router_load_balancing_type == "sinkhorn":
        return "sinkhorn routing chooses by itself: set moe_router_load_balancing_type to aux_loss or none"
    if rows_form:
        return "rows_form orders tokens by position, not by sample: use a model that takes packs"
    if plan is not None and plan.blocks is not None:
        return "packs have their own context-parallel sizes: set context_parallel_size to a number"
    if plan is not None and plan.slices is not None:
        return "packs are cut into slices: set pipeline_slices to 1"
    if any(not hasattr(router, "router_replay") for _, _, router in _routers(chunks)):
        return "routers of this Megatron-Core cannot be told their experts: install 0.16.1 or later"
    return None


def require_replay(chunks: Sequence[Any], plan: Plan | None = None, *, rows_form: bool = False) -> None:
    """Raises `LayoutError` if routers of this model cannot replay or record experts."""
    if (obstacle := replay_obstacle(chunks, plan, rows_form=rows_form)) is not None:
        raise LayoutError(f"experts cannot be replayed: {obstacle}")


def check_experts(batch: SampleBatch, chunks: Sequence[Any]) -> None:
    """Raises `DataError` for a field `routed_experts` that no router of this model could have chosen.

    Names the sample, the token and the layer of a wrong value.
    """
    config, field, spec = gpt_of(chunks[0]).config, batch[ROUTED_EXPERTS], batch.schema[ROUTED_EXPERTS]
    layers = mixture_layers(config)
    expected_shape = (len(layers), config.moe_router_topk)
    if spec != EXPERTS_SPEC:
        raise DataError(f"{ROUTED_EXPERTS} is a {spec.kind} field with pad {spec.pad}: give FieldSpec('token', pad=-1)")
    if field.dtype not in (torch.int16, torch.int32, torch.int64):
        raise DataError(f"{ROUTED_EXPERTS} has {field.dtype}: give int16, int32 or int64, the ids of experts")
    if tuple(field.shape[1:]) != expected_shape:
        raise DataError(
            f"{ROUTED_EXPERTS} has the shape {list(field.shape)}, and the model takes [tokens, {expected_shape[0]} "
            f"layers with experts, {expected_shape[1]} experts per token]"
        )
    if not field.numel():
        return
    bad = ((field < UNSET) | (field >= config.num_moe_experts)).any(-1)
    problem = f"an expert outside 0 to {config.num_moe_experts - 1}"
    if not bool(bad.any()):
        bad, problem = (field < 0).any(-1) & (field >= 0).any(-1), "some experts and -1 for others"
    if not bool(bad.any()):
        problem = "an expert twice"
        for first in range(expected_shape[1]):  # pairs of few experts: cheaper than sorting each token's
            for second in range(first):
                bad |= (field[..., first] == field[..., second]) & (field[..., first] >= 0)
    if bool(bad.any()):
        token, layer = (int(x) for x in bad.nonzero()[0])
        sample, position = token_place(batch, token)
        raise DataError(
            f"{ROUTED_EXPERTS} of sample {sample}, token {position}, layer {layers[layer]} has {problem}: "
            f"{field[token, layer].tolist()}. Each token has {expected_shape[1]} different experts in each "
            f"layer, or {UNSET} in all places, where the router chooses"
        )


def replay_options(batch: SampleBatch, chunks: Sequence[Any], layout: ParallelLayout) -> dict[str, Any]:
    """Options of `StepPacks` for a batch with checked experts: those of this stage, and this rank's part of tokens."""
    columns = torch.tensor(stage_columns(chunks), dtype=torch.int64)
    field = batch[ROUTED_EXPERTS]
    part = (layout.tp_rank, layout.tp_size) if layout.sequence_parallel else (0, 1)
    return {"routed_experts": field.index_select(1, columns.to(field.device)), "token_part": part}


class _RouterExperts:
    """Experts of one router in one pass, in the place of Megatron's `RouterReplay`."""

    def __init__(self, chunk: Any, number: int, router: Any) -> None:
        self.chunk, self.number, self.router = chunk, number, router
        """The router is number `number` of the stage's routers, and belongs to `chunk`."""
        self.current: torch.Tensor | None = None
        """[tokens, top-k] of the micro-batch that the chunk computes; None: the router chooses."""
        self.unrecomputed: deque[torch.Tensor | None] = deque()
        """Experts of the micro-batches that a backward pass may still recompute, in order."""
        self.recorded: list[torch.Tensor] | None = None
        """[tokens, top-k] int16 of each micro-batch so far, where the pass records."""

    def get_replay_topk(
        self, scores: torch.Tensor, topk: int, num_groups: Any, group_topk: Any, default_compute_topk: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(scores of the experts, experts), both [tokens, top-k]; Megatron's router calls it."""
        replayed = self._experts_of_pass()
        # From 0.19 on Megatron sorts a token's experts in passes with gradient only. Sums over them round by their
        # order, which must be the same when they are recorded.
        with torch.enable_grad():
            _, experts = default_compute_topk(scores.detach(), topk, num_groups=num_groups, group_topk=group_topk)
        if replayed is not None:
            experts = torch.where(replayed < 0, experts, replayed.long())
        values = scores.gather(1, experts)
        if self.recorded is not None:
            self.recorded.append(experts.to(torch.int16))
        return values, experts

    def _experts_of_pass(self) -> torch.Tensor | None:
        # A layer that is recomputed runs inside the backward pass, when later micro-batches have passed this router.
        # Megatron's schedules run the backward passes of a chunk in the order of its forward passes.
        if torch._C._current_graph_task_id() != -1:
            return self.unrecomputed.popleft()
        if self.router.training and self.router.config.recompute_granularity is not None:
            self.unrecomputed.append(self.current)
        return self.current


class PassExperts:
    """Experts at all routers of this stage during one pass: replayed from the packs, or recorded.

    Args:
        chunks: the model chunks of this stage.
        record: keep the experts of every micro-batch.
    """

    def __init__(self, chunks: Sequence[Any], *, record: bool = False) -> None:
        self._chunks = chunks
        self._routers = [
            _RouterExperts(chunk, number, router) for number, (chunk, _, router) in enumerate(_routers(chunks))
        ]
        for routed in self._routers if record else ():
            routed.recorded = []

    @contextlib.contextmanager
    def installed(self) -> Iterator[PassExperts]:
        """Context in which the routers ask this object."""
        before = [router.router.router_replay for router in self._routers]
        for router in self._routers:
            router.router.router_replay = router
        try:
            yield self
        finally:
            for router, value in zip(self._routers, before, strict=True):
                router.router.router_replay = value

    def start(self, pack: PackedBatch, chunk: Any) -> None:
        """Gives the routers of `chunk` the experts of `pack`, whose forward pass begins."""
        for router in self._routers:
            if router.chunk is chunk:
                router.current = None if pack.routed_experts is None else pack.routed_experts[:, router.number]

    def add_recorded(
        self, outputs: SampleBatch, plan: Plan, packs: Sequence[PackLayout], place: ParallelLayout
    ) -> SampleBatch:
        """Adds the recorded experts of all layers to `outputs`, as `routed_experts`, int16 on the host. Collective.

        Tokens in no pack have -1. A token that samples share has the same experts in all of them.
        """
        config = gpt_of(self._chunks[0]).config
        columns = torch.tensor(stage_columns(self._chunks), dtype=torch.int64, device=place.device)
        shape = (len(mixture_layers(config)), config.moe_router_topk)
        flat = torch.full((outputs.num_tokens, *shape), UNSET, dtype=torch.int32, device=place.device)
        for pass_index, (mb, pack) in enumerate(zip(plan.micro_batches[place.dp_rank], packs, strict=True)):
            if mb.is_filler or not self._routers:
                continue
            # 1. Order of the router's tokens -> pack: this rank's context-parallel share, and of it the sequence shard.
            computed = torch.from_numpy(pack.local_tokens(place.cp_rank))
            if place.sequence_parallel:
                computed = computed.chunk(place.tp_size)[place.tp_rank]
            in_pack = flat.new_full((pack.tokens, len(columns), shape[1]), UNSET)
            experts = [router.recorded[pass_index] for router in self._routers if router.recorded is not None]
            in_pack[computed.to(place.device)] = torch.stack(experts, 1).to(torch.int32)
            # 2. Pack -> whole samples: each sample reads its shared prefix where another one computed it.
            unshared = pack.unshared
            if unshared is not pack:
                in_pack = in_pack[torch.from_numpy(pack.computed_tokens).to(place.device)]
            # 3. Whole samples -> `outputs`: real tokens only, and of all layers the columns of this stage.
            real = torch.from_numpy(unshared.real)
            rows = torch.from_numpy(unshared.source(outputs.offsets[outputs.rows_of(plan.ids[mb.samples])].numpy()))
            flat[rows[real].to(place.device)[:, None], columns] = in_pack[real.to(place.device)]
        # A rank has ids of at least 0 where it computed a token's layer and UNSET (-1) elsewhere, so MAX joins the
        # sequence shards, context-parallel shares and stages. Ranks that computed the same token have equal ids.
        for size, group in (
            (place.tp_size, place.tp_group),
            (place.cp_size, place.cp_group),
            (place.pp_size, place.pp_group),
        ):
            if size > 1 and flat.numel():
                dist.all_reduce(flat, dist.ReduceOp.MAX, group=group)
        fields = {ROUTED_EXPERTS: flat.to(torch.int16).cpu()}
        return outputs.with_fields(fields, {ROUTED_EXPERTS: EXPERTS_SPEC})
