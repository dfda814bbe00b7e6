"""What Megatron's mixtures of experts need from whoever runs packs through them.

Routers add losses and count tokens. Padding must stay out of both, on every pipeline stage, and a
micro-batch without a real token must add nothing.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import megatron.core
import torch


def router_loss_weights(config: Any, group: Any) -> tuple[float, float]:
    """How many times too strong Megatron makes the (auxiliary, z-) losses of routers that see a padding mask.

    With `calculate_per_token_loss` gradients are divided by the step's tokens, so a router multiplies its losses by
    those of its micro-batch: its own rank's count times the ranks of `group`, tensor x context parallel. Before 0.19
    it leaves out the ranks; and it counts a masked micro-batch after an all-reduce in place, so that the rank's
    count is the group's. The second is tried, not known: a collective call of `group`.
    """
    from megatron.core.transformer.moe.moe_utils import get_tokens_per_expert_and_token_count

    if not config.calculate_per_token_loss or group.size() == 1:
        return 1.0, 1.0
    ranks = float(group.size()) if tuple(map(int, megatron.core.__version__.split(".")[:2])) >= (0, 19) else 1.0
    one_token = torch.ones(1, 1, dtype=torch.bool, device=torch.cuda.current_device())
    _, counted, _ = get_tokens_per_expert_and_token_count(one_token, group, topk=1, with_padding_mask=True)
    return float(counted) * ranks / group.size(), ranks / group.size()


def draw_experts(gpt: Any) -> None:
    """Draws the weights of this rank's experts from Megatron's generator for them, which differs between such ranks.

    Megatron does so on CUDA alone: on the CPU all weights come from one generator, the same on ranks that share the
    experts, which then begin with equal ones.
    """
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker, get_expert_parallel_rng_tracker_name

    config = gpt.config
    with get_cuda_rng_tracker().fork(get_expert_parallel_rng_tracker_name()):
        for name, parameter in gpt.named_parameters():
            if not getattr(parameter, "allreduce", True):  # Megatron's mark of weights that other ranks do not have
                draw = config.output_layer_init_method if "linear_fc2" in name else config.init_method
                draw(parameter)


def routed_padding(mask: torch.Tensor, gpt: Any, layout: Any) -> torch.Tensor:
    """The part of a padding mask [rows, length] that the routers of this chunk see.

    With sequence parallelism every tensor-parallel rank routes its part of each row. Megatron (0.16 to 0.20)
    divides the mask where the embedding is and hands it on undivided elsewhere.
    """
    if gpt.pre_process or not layout.sequence_parallel:
        return mask
    return mask.chunk(layout.tp_size, dim=1)[layout.tp_rank]


@contextlib.contextmanager
def padding_uncounted(chunks: Iterable[torch.nn.Module]) -> Iterator[None]:
    """Inside, routers count and balance real tokens alone, and a micro-batch without any adds nothing.

    Megatron 0.16 to 0.19 combines the map [tokens, experts] of an expert bias with the mask [tokens], which fails, or,
    with as many tokens as experts, counts wrongly. Here the map is masked before Megatron counts it.

    Their auxiliary loss is 0 / 0 over no real token, and would make every gradient NaN. Evaluation mode, in which
    routers add no losses, is no way out: there layers are not recomputed in backward, and ranks that share experts
    wait for the tokens that a recomputed layer sends.
    """
    from megatron.core.transformer.moe import router as of_routers

    module: Any = of_routers
    balance = module.switch_load_balancing_loss_func
    routers: list[Any] = [m for chunk in chunks for m in chunk.modules() if getattr(m, "enable_expert_bias", False)]
    for router in routers:
        router._apply_expert_bias = functools.partial(_count, router._apply_expert_bias)
    module.switch_load_balancing_loss_func = functools.partial(_balance, balance)
    try:
        yield
    finally:
        module.switch_load_balancing_loss_func = balance
        for router in routers:
            del router._apply_expert_bias


@contextlib.contextmanager
def expert_biases_kept(chunks: Iterable[torch.nn.Module]) -> Iterator[Callable[[], None]]:
    """Inside, a step; gives what puts the routers' expert biases back, for a step that is skipped.

    Megatron moves them when gradients are whole, before anybody knows whether the optimizer will step. After an
    exception they are put back here.
    """
    routers: list[Any] = [m for chunk in chunks for m in chunk.modules() if getattr(m, "enable_expert_bias", False)]
    before = [(held, held.clone()) for m in routers for held in (m.expert_bias, m.local_tokens_per_expert)]

    @torch.no_grad()
    def put_back() -> None:
        for held, values in before:
            held.copy_(values)

    try:
        yield put_back
    except BaseException:
        put_back()
        raise


def _count(count: Any, routing_map: torch.Tensor, padding_mask: torch.Tensor | None = None) -> None:
    count(routing_map if padding_mask is None else routing_map & ~padding_mask[:, None])


def _balance(balance: Any, *, total_num_tokens: Any, **given: Any) -> torch.Tensor:
    """Megatron's auxiliary loss, 0 with gradients of 0 where no token is real; no host read."""
    if isinstance(total_num_tokens, torch.Tensor):
        total_num_tokens = total_num_tokens.clamp(min=1)
    loss: torch.Tensor = balance(total_num_tokens=total_num_tokens, **given)
    return loss


def expert_problems(config: Any, *, packed: bool) -> list[str]:
    """What about a mixture of experts cannot be trained on planned micro-batches, each with what to set.

    `packed` says whether the model takes packs, not rows.
    """
    if config.num_moe_experts is None:
        return []
    problems = []
    if config.moe_token_dispatcher_type == "allgather":
        problems.append(
            "moe_token_dispatcher_type='allgather' needs equal lengths on all ranks: set it to 'alltoall' or 'flex'"
        )
    version = tuple(map(int, megatron.core.__version__.split(".")[:2]))
    if config.recompute_granularity == "full" and config.recompute_method == "block" and version < (0, 18):
        problems.append(
            "before Megatron-Core 0.18 recompute_method='block' hands no padding mask to the layers that are not "
            "recomputed, whose routers then balance padding: set it to 'uniform'"
        )
    if config.tensor_model_parallel_size > 1 and not config.sequence_parallel:
        problems.append("Megatron trains experts with tensor parallelism only with sequence_parallel=True: set it")
    if getattr(config, "overlap_moe_expert_parallel_comm", False):
        problems.append("overlap_moe_expert_parallel_comm needs a schedule that is not supported for now: unset it")
    routing = config.moe_router_load_balancing_type
    kinds = [routing] if isinstance(routing, str) else list(routing)
    if "quantile_balancing" in kinds:
        problems.append("routers with quantile_balancing take no padding mask: use 'aux_loss' or 'none'")
    if "global_aux_loss" in kinds:
        problems.append(
            "global_aux_loss waits for all data-parallel ranks at each micro-batch, and a rank without samples takes "
            "no part: use 'aux_loss'"
        )
    if "seq_aux_loss" in kinds and packed:
        problems.append("seq_aux_loss would balance a whole pack as if it were one sequence: use 'aux_loss'")
    return problems
