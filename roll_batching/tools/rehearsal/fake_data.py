"""Samples and packs without contents: real lengths and shapes, for passes on fake tensors."""

from __future__ import annotations

from collections.abc import Callable

import torch

from roll_batching.losses.distillation import TEACHER_IDS, TEACHER_LOG_PROBS
from roll_batching.modeling.attention.varlen import VarlenSpans
from roll_batching.packing.batch import PackedBatch
from roll_batching.packing.prefetch import map_tensors
from roll_batching.planning import Plan
from roll_batching.samples import FieldSpec, SampleBatch
from roll_batching.samples.fields import FieldKind
from roll_batching.tools.rehearsal.flops import set_attention_pairs
from roll_batching.tools.rehearsal.images import keep_grids

_NEXT_TOKENS = ("old_log_probs", "ref_log_probs", "rollout_log_probs")
_OF_SAMPLES = ("advantages", "rewards", "reference_point")


def samples_of(plan: Plan, dp_rank: int, top_k: int = 0, *, token_advantages: bool = False) -> SampleBatch:
    """Samples that `plan` assigns to a data-parallel rank: real lengths, zeros as contents, and every field of a loss.

    All tokens are response tokens, and samples 2i and 2i + 1 are a pair. `top_k`: likely tokens of a teacher at each
    position; 0: none. `token_advantages`: advantages per token instead of per sample.
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
        "desirable": ids % 2 == 0,
    }
    kinds: dict[str, FieldKind] = {
        "input_ids": "token",
        "response_mask": "token",
        **dict.fromkeys(_NEXT_TOKENS, "next_token"),
        **dict.fromkeys(_OF_SAMPLES, "sample"),
        "pair": "sample",
        "chosen": "sample",
        "desirable": "sample",
    }
    if top_k:
        fields[TEACHER_LOG_PROBS] = torch.zeros(tokens, top_k)
        fields[TEACHER_IDS] = torch.zeros(tokens, top_k, dtype=torch.int32)
        kinds |= {TEACHER_LOG_PROBS: "next_token", TEACHER_IDS: "next_token"}
    if token_advantages:
        fields["advantages"], kinds["advantages"] = torch.zeros(tokens), "next_token"
    return SampleBatch(ids, lengths, fields, {name: FieldSpec(kind) for name, kind in kinds.items()})


def samples_of_critic(plan: Plan, dp_rank: int) -> SampleBatch:
    """The same samples with the fields of the critic's loss alone."""
    local = samples_of(plan, dp_rank).only(("input_ids", "response_mask"))
    names = ("returns", "old_values")
    return local.with_fields(
        {name: torch.zeros(local.num_tokens) for name in names}, {name: FieldSpec("next_token") for name in names}
    )


def fake_pack(pack: PackedBatch, device: torch.device, top_k: int = 0) -> PackedBatch:
    """Copy of `pack` with a fake tensor of the same shape and dtype on `device` for every tensor.

    Call it under a FakeTensorMode. Fields that share a tensor share the fake one. A teacher's fields have `top_k`
    tokens at each position, however many `pack` has: for the whole vocabulary they would fill the host's memory.
    """
    result = _copied(pack, lambda tensor: torch.empty(tensor.shape, dtype=tensor.dtype, device=device))
    for name in {TEACHER_LOG_PROBS, TEACHER_IDS} & set(result.fields):
        result.fields[name] = result.fields[name].new_empty(len(result.fields[name]), top_k)
    if pack.params.images is not None:
        result.params.images = keep_grids(result.params.images, pack.params.images)
    spans = pack.params.attention
    if isinstance(spans, VarlenSpans):
        set_attention_pairs(result.params.attention.cu_queries, _attention_pairs(spans))
    return result


def real_pack(pack: PackedBatch) -> PackedBatch:
    """Copy of `pack` in new memory, so that a recorder sees its allocation."""
    return _copied(pack, torch.clone)


def _copied(pack: PackedBatch, copy: Callable[[torch.Tensor], torch.Tensor]) -> PackedBatch:
    copies: dict[int, torch.Tensor] = {}

    def copied(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in copies:
            copies[id(tensor)] = copy(tensor)
        return copies[id(tensor)]

    result: PackedBatch = map_tensors(pack, copied)
    return result


def _attention_pairs(spans: VarlenSpans) -> int:
    """Number of query-key pairs under the causal mask; the last query of a span sees all its keys."""
    queries, keys = spans.cu_queries.long().diff(), spans.cu_keys.long().diff()
    return int((queries * keys - queries * (queries - 1) // 2).sum())
