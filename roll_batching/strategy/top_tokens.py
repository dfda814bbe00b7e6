"""The most likely tokens of a model at each position, as a teacher gives them to a student."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from roll_batching.errors import LossError
from roll_batching.planning import Plan
from roll_batching.samples import FieldSpec, SampleBatch
from roll_batching.strategy.step_result import share_columns

if TYPE_CHECKING:
    from roll_batching.strategy.infer import MegatronInferStrategy


def top_log_probs(
    strategy: MegatronInferStrategy, local: SampleBatch, plan: Plan, k: int, masks: Sequence[str] | None = None
) -> SampleBatch:
    """The `k` most likely next tokens of the model at each position, in the order of `local`. Collective.

    Arguments are those of `MegatronInferStrategy.forward`.

    Returns:
        A batch with `local`'s ids and lengths and the next_token fields `top_log_probs` [tokens, k], fp32, over the
        whole vocabulary, descending, and `top_ids` [tokens, k], int32. Both are 0 where no mask counts.

    Raises:
        RankError: on all ranks, before the model runs for wrong input of any, or for outputs that are not finite.
    """
    with strategy._consensus("top_log_probs") as facts:
        strategy._head().require(("log_probs",), "top_log_probs")
        size = strategy.state.vocab_size
        if isinstance(k, bool) or not isinstance(k, int) or k < 1 or (size is not None and k > size):
            of = "" if size is None else f" to {size}, the vocabulary of the model"
            raise LossError(f"top_log_probs(k={k!r}): give a number of tokens from 1{of}")
        facts.equal("k and masks", (k, masks))
        packs = strategy._pack(facts, local, plan, masks)
    head = strategy._head()
    results = strategy._collect(plan, packs, lambda output, pack, chunk: head.top_log_probs(output, pack, chunk, k))
    columns = share_columns(strategy.state, local, plan, packs, results, 2 * k)
    fields = {"top_log_probs": columns[:, :k].contiguous(), "top_ids": columns[:, k:].to(torch.int32)}
    return strategy._require_finite(
        SampleBatch(local.ids, local.lengths, fields, dict.fromkeys(fields, FieldSpec("next_token")))
    )
