"""Mixtures of experts: which tokens go where is said by values, which nobody has, so it is assumed.

Every expert is chosen by as many tokens as every other, or, with an imbalance, the experts of this rank by so many
times more, each of the others' tokens at most once per expert. The router, the dispatcher and the experts are
Megatron's; it is told the counts that it would have read from the device.
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

READS = "moe/token_dispatcher.py"
"""Where Megatron waits for the counts, once per mixture and pass: experts take as many tokens as come."""


def assume_balance(imbalance: float) -> None:
    """From now on in this process tokens go to experts as assumed."""
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    if not hasattr(moe_utils, "te_general_gemm"):  # Megatron 0.16 without TransformerEngine; None: a plain product
        moe_utils.te_general_gemm = None  # type: ignore[attr-defined]
    kind: Any = token_dispatcher.MoEAlltoAllTokenDispatcher
    construct, preprocess, permute = kind.__init__, kind.preprocess, token_dispatcher.permute

    def constructed(self: Any, *args: Any, **kwargs: Any) -> None:
        with _disable_current_modes():  # the order of chunks is read as numbers
            construct(self, *args, **kwargs)

    def preprocessed(self: Any, routing_map: torch.Tensor) -> torch.Tensor:
        counted = preprocess(self, routing_map)
        counted[0].item()  # the wait for the copies that are left out here
        with _disable_current_modes():
            return _tell(self, len(routing_map), imbalance)

    def permuted(tokens: torch.Tensor, *args: Any, num_out_tokens: Any = None, **kwargs: Any) -> Any:
        with SelectedByRouter.number(num_out_tokens):
            return permute(tokens, *args, num_out_tokens=num_out_tokens, **kwargs)

    kind.__init__, kind.preprocess = constructed, preprocessed
    token_dispatcher.permute = permuted


def assumptions(job: JobConfig, imbalance: float) -> tuple[str, ...]:
    """What is taken for granted of the experts of `job`, in words."""
    model = job.actor_train.model_args.architecture
    if model is None or model.moe is None:
        return ()
    size = job.actor_train.strategy_args.strategy_config.expert_model_parallel_size
    here = f"{model.moe.num_experts // size} of {model.moe.num_experts} experts on a rank"
    share = "as many tokens as the others" if imbalance == 1 else f"{imbalance:g} times their share of the tokens"
    return (f"{here}, which get {share}: an assumption (--expert-imbalance), routing depends on values",)


def balanced(tokens: int, topk: int, experts: int) -> Ints:
    """int64[experts]: how many of so many tokens choose each expert, as even as can be."""
    whole, rest = divmod(tokens * topk, experts)
    return whole + (np.arange(experts) < rest).astype(np.int64)


def _tell(dispatcher: Any, tokens: int, imbalance: float) -> torch.Tensor:
    """Gives `dispatcher` the counts that routing would have; returns the tokens of each of this rank's experts.

    All ranks of a group route as many tokens: planned micro-batches are alike in a rehearsal.
    """
    chosen = balanced(tokens, dispatcher.config.moe_router_topk, dispatcher.num_experts)
    ep_size, tp_size = dispatcher.ep_size, dispatcher.tp_size
    mine = chosen[dispatcher.local_expert_indices]
    if ep_size == tp_size == 1:  # no token comes from elsewhere
        coming = mine[None]
    else:
        coming = np.tile(np.minimum(np.ceil(mine * imbalance).astype(np.int64), tokens), (tp_size * ep_size, 1))
        dispatcher.input_splits = chosen.reshape(ep_size, -1).sum(1)
        by_rank = coming.sum(1).reshape(tp_size, ep_size)
        dispatcher.output_splits, dispatcher.output_splits_tp = by_rank[dispatcher.tp_rank], by_rank.sum(1)
    if dispatcher.num_local_experts > 1:
        dispatcher.num_global_tokens_per_local_expert = torch.from_numpy(coming)
    return torch.from_numpy(coming.sum(0))


class SelectedByRouter(TorchDispatchMode):
    """Above a FakeTensorMode: a selection by a router's map has as many entries as there are choices."""

    _number: int | None = None

    @classmethod
    @contextlib.contextmanager
    def number(cls, selected: int) -> Iterator[None]:
        """Inside, selections have so many entries."""
        cls._number = selected
        try:
            yield
        finally:
            cls._number = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        if func is torch.ops.aten.masked_select.default and self._number is not None:
            return args[0].new_empty(self._number)
        return func(*args, **(kwargs or {}))
