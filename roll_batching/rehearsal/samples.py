"""Samples without contents: right lengths, and every field that a loss may read."""

from __future__ import annotations

from collections.abc import Collection

import torch

from roll_batching.data import FieldSpec, SampleBatch
from roll_batching.planning import Plan

_TOKENS = {"input_ids": torch.int64, "response_mask": torch.bool}
_NEXT_TOKENS = ("old_log_probs", "ref_log_probs", "rollout_log_probs")
_OF_SAMPLES = ("advantages", "rewards")


def samples_of(
    plan: Plan, dp_rank: int, *, token_advantages: bool = False, without: Collection[str] = ()
) -> SampleBatch:
    """The samples that `plan` gives a data-parallel rank, every token of them a response's.

    `token_advantages`: advantages per token. `without`: fields that the job does not make.
    """
    indices = plan.rank_samples(dp_rank)
    lengths = torch.from_numpy(plan.lengths[indices].copy())
    tokens = int(lengths.sum())
    fields: dict[str, torch.Tensor] = {
        "input_ids": torch.zeros(tokens, dtype=torch.int64),
        "response_mask": torch.ones(tokens, dtype=torch.bool),
    }
    kinds: dict[str, str] = {"input_ids": "token", "response_mask": "token"}
    for name in _NEXT_TOKENS:
        fields[name], kinds[name] = torch.zeros(tokens), "next_token"
    for name in _OF_SAMPLES:
        fields[name], kinds[name] = torch.zeros(len(lengths)), "sample"
    if token_advantages:
        fields["advantages"], kinds["advantages"] = torch.zeros(tokens), "next_token"
    kept = {name: value for name, value in fields.items() if name not in without}
    specs = {name: FieldSpec(kinds[name]) for name in kept}  # type: ignore[arg-type]
    return SampleBatch(torch.from_numpy(plan.ids[indices].copy()), lengths, kept, specs)
