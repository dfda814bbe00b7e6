"""Samples without contents: right lengths, and every field that a loss may read."""

from __future__ import annotations

import torch

from roll_batching.planning import Plan
from roll_batching.samples import FieldSpec, SampleBatch
from roll_batching.samples.fields import FieldKind

_NEXT_TOKENS = ("old_log_probs", "ref_log_probs", "rollout_log_probs")
_OF_SAMPLES = ("advantages", "rewards")


def samples_of(plan: Plan, dp_rank: int, *, token_advantages: bool = False) -> SampleBatch:
    """The samples that `plan` gives a data-parallel rank, every token of them a response's; each two are a pair.

    `token_advantages`: advantages per token.
    """
    indices = plan.rank_samples(dp_rank)
    lengths = torch.from_numpy(plan.lengths[indices].copy())
    ids, count, tokens = torch.from_numpy(plan.ids[indices].copy()), len(lengths), int(lengths.sum())
    fields: dict[str, torch.Tensor] = {
        "input_ids": torch.zeros(tokens, dtype=torch.int64),
        "response_mask": torch.ones(tokens, dtype=torch.bool),
        **{name: torch.zeros(tokens) for name in _NEXT_TOKENS},
        **{name: torch.zeros(count) for name in _OF_SAMPLES},
        "pair": ids // 2,
        "chosen": ids % 2 == 0,
    }
    kinds: dict[str, FieldKind] = {
        "input_ids": "token",
        "response_mask": "token",
        **dict.fromkeys(_NEXT_TOKENS, "next_token"),
        **dict.fromkeys(_OF_SAMPLES, "sample"),
        "pair": "sample",
        "chosen": "sample",
    }
    if token_advantages:
        fields["advantages"], kinds["advantages"] = torch.zeros(tokens), "next_token"
    return SampleBatch(ids, lengths, fields, {name: FieldSpec(kind) for name, kind in kinds.items()})
