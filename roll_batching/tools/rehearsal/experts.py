"""Mixture-of-experts layers under fake tensors: routing is assumed to be balanced.

Routing depends on tensor values, and fake tensors have none. Every expert gets the same number of tokens. With an
imbalance, the experts of this rank get that multiple of their share, but no token twice. Megatron's router, dispatcher
and experts run; only the counts that Megatron would read from the device are replaced.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from roll_batching.jobs.config import JobConfig
from roll_batching.planning.arrays import Ints

EXPERT_COUNT_READS = "moe/token_dispatcher.py"
"""File in which dropless Megatron reads the token counts from the device, once per layer and pass."""


def assume_balanced_routing(imbalance: float) -> None:
    """Patch Megatron so that tokens go to experts as assumed, for the rest of the process."""
    from megatron.core.transformer.moe import token_dispatcher

    kind: Any = token_dispatcher.MoEAlltoAllTokenDispatcher
    construct, preprocess, permute = kind.__init__, kind.preprocess, token_dispatcher.permute

    def patched_init(self: Any, *args: Any, **kwargs: Any) -> None:
        with _disable_current_modes():  # reads the chunk order as Python numbers
            construct(self, *args, **kwargs)

    def patched_preprocess(self: Any, routing_map: torch.Tensor) -> torch.Tensor:
        counts = preprocess(self, routing_map)
        counts[0].item()  # stands for the device-to-host copies that are skipped here
        with _disable_current_modes():
            return _set_counts(self, len(routing_map), imbalance)

    def patched_permute(tokens: torch.Tensor, *args: Any, num_out_tokens: Any = None, **kwargs: Any) -> Any:
        with RouterSelectionMode.selecting(num_out_tokens):
            return permute(tokens, *args, num_out_tokens=num_out_tokens, **kwargs)

    kind.__init__, kind.preprocess = patched_init, patched_preprocess
    token_dispatcher.permute = patched_permute


def routing_notes(config: JobConfig, imbalance: float) -> tuple[str, ...]:
    """Notes on the assumed routing of `config`; empty without experts."""
    model = config.actor_train.model_args.architecture
    if model is None or model.moe is None:
        return ()
    size = config.actor_train.strategy_args.strategy_config.expert_model_parallel_size
    experts = f"{model.moe.num_experts // size} of {model.moe.num_experts} experts on a rank"
    share = "an equal share of the tokens" if imbalance == 1 else f"{imbalance:g} times an equal share of the tokens"
    return (f"{experts} get {share}: assumed (--expert-imbalance), because routing depends on tensor values",)


def balanced_counts(tokens: int, topk: int, experts: int) -> Ints:
    """int64 `[experts]`: tokens per expert under balanced routing of `tokens` tokens to `topk` experts each."""
    whole, rest = divmod(tokens * topk, experts)
    return whole + (np.arange(experts) < rest).astype(np.int64)


def _set_counts(dispatcher: Any, tokens: int, imbalance: float) -> torch.Tensor:
    """Set the split sizes of `dispatcher`; returns int64 `[local experts]`, the tokens of this rank's experts.

    All ranks of the group route `tokens` tokens, because the micro-batches of a rehearsal are equal.
    """
    chosen = balanced_counts(tokens, dispatcher.config.moe_router_topk, dispatcher.num_experts)
    ep_size, tp_size = dispatcher.ep_size, dispatcher.tp_size
    local = chosen[dispatcher.local_expert_indices]
    if ep_size == tp_size == 1:  # all tokens are this rank's
        received = local[None]
    else:
        received = np.tile(np.minimum(np.ceil(local * imbalance).astype(np.int64), tokens), (tp_size * ep_size, 1))
        dispatcher.input_splits = chosen.reshape(ep_size, -1).sum(1)
        by_rank = received.sum(1).reshape(tp_size, ep_size)
        dispatcher.output_splits, dispatcher.output_splits_tp = by_rank[dispatcher.tp_rank], by_rank.sum(1)
    if dispatcher.num_local_experts > 1:
        dispatcher.num_global_tokens_per_local_expert = torch.from_numpy(received)
    return torch.from_numpy(received.sum(0))


class RouterSelectionMode(TorchDispatchMode):
    """Gives `masked_select` by a router's map the known number of entries; enter above a FakeTensorMode."""

    _entries: int | None = None

    @classmethod
    @contextlib.contextmanager
    def selecting(cls, entries: int) -> Iterator[None]:
        """Inside, masked selections have `entries` entries."""
        cls._entries = entries
        try:
            yield
        finally:
            cls._entries = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        if func is torch.ops.aten.masked_select.default and self._entries is not None:
            return args[0].new_empty(self._entries)
        return func(*args, **(kwargs or {}))
