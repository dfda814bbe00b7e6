"""Weights, biases and padding masks of Megatron's MoE layers, and their unsupported settings."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import megatron.core
import torch


def router_loss_weights(config: Any, group: Any) -> tuple[float, float]:
    """Factors by which Megatron overweights the (auxiliary, z-) losses of routers with a padding mask. Collective.

    With `calculate_per_token_loss` gradients are divided by the step's tokens, so a router multiplies its losses by the
    tokens of its micro-batch: its rank's count times the size of `group` (tensor x context parallel). Two deviations:
    before 0.19 Megatron leaves out the size of the group; and it counts a masked micro-batch after an in-place
    all-reduce, so the rank's count is the group's. The second is measured here, on one token, not read off a version.
    """
    from megatron.core.transformer.moe.moe_utils import get_tokens_per_expert_and_token_count

    if not config.calculate_per_token_loss or group.size() == 1:
        return 1.0, 1.0
    ranks = float(group.size()) if tuple(map(int, megatron.core.__version__.split(".")[:2])) >= (0, 19) else 1.0
    one_token = torch.ones(1, 1, dtype=torch.bool, device=torch.cuda.current_device())
    _, counted, _ = get_tokens_per_expert_and_token_count(one_token, group, topk=1, with_padding_mask=True)
    return float(counted) * ranks / group.size(), ranks / group.size()


def fit_router_loss_log(config: Any) -> None:
    """Drops router losses that Megatron logged for a model with another number of layers.

    Its log is one per process, as long as the layers of the first model that wrote it (0.16 to 0.19): a policy with
    heads of multi-token prediction would write beyond that of its critic.
    """
    from megatron.core.transformer.moe import moe_utils

    layers = config.num_layers + (config.mtp_num_layers or 0)
    newer = getattr(moe_utils, "get_moe_metrics_tracker", None)
    log = moe_utils.get_moe_layer_wise_logging_tracker() if newer is None else newer().metrics
    for name, entry in list(log.items()):
        if len(entry["values"] if newer is None else entry.values) != layers:
            del log[name]


def draw_experts(gpt: Any) -> None:
    """Initialises this rank's experts from Megatron's expert-parallel generator, which differs between such ranks.

    Megatron does so on CUDA only. On the CPU one generator initialises all weights, so experts of different
    expert-parallel ranks would start equal.
    """
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker, get_expert_parallel_rng_tracker_name

    config = gpt.config
    with get_cuda_rng_tracker().fork(get_expert_parallel_rng_tracker_name()):
        for name, parameter in gpt.named_parameters():
            if not getattr(parameter, "allreduce", True):  # Megatron marks expert weights so
                draw = config.output_layer_init_method if "linear_fc2" in name else config.init_method
                draw(parameter)


def expert_biases(gpt: Any) -> list[tuple[str, torch.Tensor]]:
    """Names and expert biases of the routers of a GPTModel. They are buffers: checkpoints hold them, gradients do not.

    Megatron's `Router.expert_bias` is None where the config has no expert bias.
    """
    return [(name, buffer) for name, buffer in gpt.named_buffers() if name.endswith(".router.expert_bias")]


def keep_expert_biases_in_fp32(gpt: Any) -> None:
    """Gives expert biases and their token counts fp32 memory again, after the model was cast to its dtype.

    Megatron does so for the biases at the first forward pass, after loading has rounded them; bf16 cannot count
    beyond 256 tokens.
    """
    for module in gpt.modules():
        if getattr(module, "enable_expert_bias", False):
            module.expert_bias.data = module.expert_bias.data.float()
            module.local_tokens_per_expert.data = module.local_tokens_per_expert.data.float()


def freeze_routers(chunk: torch.nn.Module) -> None:
    """Excludes the weights and biases of routers from training; expert biases, which are buffers, move on.

    Call it before the chunk is wrapped for data parallelism: gradient buffers and optimizers are made for parameters
    that require a gradient then. Gradients still flow through the routers to the layers below.
    """
    for name, parameter in chunk.named_parameters():
        if ".router." in name:
            parameter.requires_grad_(False)


def routed_padding(mask: torch.Tensor, gpt: Any, layout: Any) -> torch.Tensor:
    """This rank's shard of a padding mask [rows, length] for the routers of this chunk.

    With sequence parallelism every tensor-parallel rank routes its part of each row. Megatron (0.16 to 0.20) shards the
    mask on the stage with the embedding, and passes it on unsharded on the others.
    """
    if gpt.pre_process or not layout.sequence_parallel:
        return mask
    return mask.chunk(layout.tp_size, dim=1)[layout.tp_rank]


@contextlib.contextmanager
def expert_biases_kept(chunks: Iterable[torch.nn.Module]) -> Iterator[Callable[[], None]]:
    """Yields a function that restores the routers' expert biases, for a step that is skipped.

    Megatron updates them in gradient finalisation, before it is known whether the optimizer steps. After an exception
    they are restored here.
    """
    routers: list[Any] = [m for chunk in chunks for m in chunk.modules() if getattr(m, "enable_expert_bias", False)]
    before = [(tensor, tensor.clone()) for m in routers for tensor in (m.expert_bias, m.local_tokens_per_expert)]

    @torch.no_grad()
    def restore() -> None:
        for tensor, values in before:
            tensor.copy_(values)

    try:
        yield restore
    except BaseException:
        restore()
        raise


def expert_problems(config: Any, *, packed: bool) -> list[str]:
    """Settings of a mixture of experts that planned micro-batches do not support, each with what to set instead.

    `packed` is whether the model takes packs instead of padded rows.
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
            "before Megatron-Core 0.18 recompute_method='block' passes no padding mask to the layers that are not "
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
