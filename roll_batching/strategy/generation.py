"""Sampling from the model with a key-value cache in our own attention core.

Prompts are prefilled once each and their cache is repeated for the group. Rows end at their own
length; finished ones are taken out of the batch. Log-probs of the sampled tokens are recorded, and
equal those of a packed forward pass to rounding.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from roll_batching.data import FieldSpec, SampleBatch
from roll_batching.errors import DataError, LayoutError
from roll_batching.modeling.decode import DecodeParams, KeyValueCache
from roll_batching.modeling.head import gpt_of, head_attached

if TYPE_CHECKING:
    from roll_batching.strategy.infer import MegatronInferStrategy

_WIDTH_STEP = 16
"""Visible keys grow in steps of this many positions, so that shapes repeat."""
_COMPACT_BELOW = 0.75
"""Finished rows are taken out when fewer than this share of rows still runs."""


@dataclass(frozen=True, kw_only=True)
class GenerationSettings:
    """How responses are sampled."""

    max_new_tokens: int
    eos_token_id: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """Sample among this many likeliest tokens; 0: all."""
    greedy: bool = False
    seed: int = 0
    num_return_sequences: int = 1
    """Responses per prompt, on consecutive rows."""

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1 or self.num_return_sequences < 1 or self.temperature <= 0:
            raise DataError(
                f"max_new_tokens={self.max_new_tokens}, num_return_sequences={self.num_return_sequences} and "
                f"temperature={self.temperature} must be at least 1, at least 1 and above 0"
            )


class _Sampler:
    """Next tokens and their log-probs from full-vocabulary logits."""

    def __init__(self, settings: GenerationSettings, vocab_size: int, device: torch.device, seed: int) -> None:
        self.settings, self.vocab_size = settings, vocab_size
        self.generator = torch.Generator(device=device).manual_seed(seed)

    def __call__(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[rows, vocabulary] -> tokens [rows], log-probs [rows] of the untruncated distribution."""
        wide = logits[:, : self.vocab_size]
        wide = wide if wide.dtype is torch.float64 else wide.float()
        log_probs = (wide / self.settings.temperature).log_softmax(-1)
        if self.settings.greedy:
            tokens = log_probs.argmax(-1)
        else:
            kept = self._truncate(log_probs)
            tokens = torch.multinomial(kept.exp(), 1, generator=self.generator)[:, 0]
        return tokens, log_probs.gather(1, tokens[:, None])[:, 0]

    def _truncate(self, log_probs: torch.Tensor) -> torch.Tensor:
        top_k, top_p = self.settings.top_k, self.settings.top_p
        if top_k and top_k < log_probs.shape[-1]:
            bound = log_probs.topk(top_k, -1).values[:, -1:]
            log_probs = log_probs.masked_fill(log_probs < bound, float("-inf"))
        if top_p < 1.0:
            ordered, index = log_probs.softmax(-1).sort(-1, descending=True)
            beyond = ordered.cumsum(-1) - ordered >= top_p
            log_probs = log_probs.masked_fill(beyond.scatter(1, index, beyond), float("-inf"))
        return log_probs


@torch.no_grad()
def generate(strategy: MegatronInferStrategy, prompts: SampleBatch, settings: GenerationSettings) -> SampleBatch:
    """Samples `num_return_sequences` responses to each of this data-parallel rank's prompts.

    Args:
        strategy: an initialised strategy; tensor-parallel ranks call with the same prompts.
        prompts: samples with a token field `input_ids`; may be empty.
        settings: sampling settings; `seed` and the data-parallel rank seed the draws.

    Returns:
        Prompts and responses, `num_return_sequences` consecutive rows per prompt, ids 0, 1, ..., with the
        fields `input_ids` (token), `response_mask` (token, bool) and `log_probs` (next_token: of the
        sampled tokens, 0 elsewhere; fp32, or fp64 for an fp64 model).

    Raises:
        LayoutError: under virtual pipelining or context parallelism.
    """
    layout = strategy.layout
    if layout.vpp_size > 1 or layout.cp_size > 1 or layout.pp_size > 1:
        raise LayoutError(
            f"generate is not possible with pipeline {layout.pp_size}, virtual {layout.vpp_size} and context parallel "
            f"size {layout.cp_size}: roll out with an engine, or in a job without them"
        )
    chunk = strategy.chunks[0]
    gpt = gpt_of(chunk)
    vocab_size = strategy.vocab_size or gpt.vocab_size
    sampler = _Sampler(settings, vocab_size, layout.device, settings.seed * 1_000_003 + layout.dp_rank)
    rows: list[torch.Tensor] = [row.to(layout.device) for row in prompts.to_lists("input_ids")] if len(prompts) else []
    with _decoding(layout.device), head_attached(gpt):
        if not rows:
            return _as_batch([], [], [])
        lengths = torch.tensor([len(row) for row in rows], device=layout.device)
        capacity = int(lengths.max()) + settings.max_new_tokens
        cache = KeyValueCache(capacity)
        padded = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
        logits = _prefill(chunk, gpt, padded, lengths, cache)
        repeat = torch.arange(len(rows), device=layout.device).repeat_interleave(settings.num_return_sequences)
        cache.select(repeat)
        tokens, log_probs = _decode(chunk, gpt, logits[repeat], lengths[repeat], cache, sampler, settings)
    prompts_of = [rows[i] for i in repeat.tolist()]
    return _as_batch(prompts_of, tokens, log_probs)


@contextlib.contextmanager
def _decoding(device: torch.device) -> Any:
    if device.type == "cuda":
        yield
        return
    from roll_batching.modeling import cpu_platform

    with cpu_platform.paused():
        yield


def _whole(logits: torch.Tensor, gpt: Any) -> torch.Tensor:
    group = gpt.pg_collection.tp
    if group.size() == 1:
        return logits
    parts = [torch.empty_like(logits) for _ in range(group.size())]
    dist.all_gather(parts, logits.contiguous(), group=group)
    return torch.cat(parts, -1)


def _prefill(
    chunk: Any, gpt: Any, padded: torch.Tensor, lengths: torch.Tensor, cache: KeyValueCache
) -> torch.Tensor:
    """Logits after each prompt's last token, [prompts, vocabulary]."""
    count, width = padded.shape
    positions = torch.arange(width, device=padded.device)[:, None].expand(width, count)
    params = DecodeParams(qkv_format="sbhd", cache=cache, positions=positions)
    logits = chunk(padded, positions.t(), None, packed_seq_params=params)
    last = logits[torch.arange(count, device=padded.device), lengths - 1]
    return _whole(last, gpt)


def _decode(
    chunk: Any,
    gpt: Any,
    logits: torch.Tensor,
    lengths: torch.Tensor,
    cache: KeyValueCache,
    sampler: _Sampler,
    settings: GenerationSettings,
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Responses with their end token where it came, and the log-probs of their tokens, per row."""
    count, device = len(lengths), lengths.device
    tokens = torch.zeros(count, settings.max_new_tokens, dtype=torch.int64, device=device)
    kept = torch.float64 if logits.dtype is torch.float64 else torch.float32
    log_probs = torch.zeros(count, settings.max_new_tokens, dtype=kept, device=device)
    sizes = torch.zeros(count, dtype=torch.int64, device=device)
    live, positions = torch.arange(count, device=device), lengths.clone()
    running = torch.ones(count, dtype=torch.bool, device=device)
    for step in range(settings.max_new_tokens):
        drawn, drawn_log_probs = sampler(logits)
        at = live[running]
        tokens[at, step], log_probs[at, step] = drawn[running], drawn_log_probs[running]
        sizes[at] += 1
        running = running & (drawn != settings.eos_token_id)
        left = int(running.sum())
        if left == 0 or step + 1 == settings.max_new_tokens:
            break
        if left < _COMPACT_BELOW * len(live):
            keep = running.nonzero()[:, 0]
            cache.select(keep)
            live, positions, drawn, running = live[keep], positions[keep], drawn[keep], running[keep]
        width = min(cache.length, -(-(int(positions.max()) + 1) // _WIDTH_STEP) * _WIDTH_STEP)
        visible = (torch.arange(width, device=device) <= positions[:, None])[:, None, None]
        params = DecodeParams(qkv_format="sbhd", cache=cache, positions=positions[None], visible=visible)
        logits = _whole(chunk(drawn[:, None], positions[:, None], None, packed_seq_params=params)[:, 0], gpt)
        positions = (positions + 1).clamp(max=cache.length - 1)
    split = [slice(0, size) for size in sizes.tolist()]
    return (
        [row[at] for row, at in zip(tokens, split, strict=True)],
        [row[at] for row, at in zip(log_probs, split, strict=True)],
    )


def _as_batch(
    prompts: list[torch.Tensor], responses: list[torch.Tensor], log_probs: list[torch.Tensor]
) -> SampleBatch:
    schema = {
        "input_ids": FieldSpec("token"),
        "response_mask": FieldSpec("token", pad=False),
        "log_probs": FieldSpec("next_token"),
    }
    lengths = torch.tensor([len(p) + len(r) for p, r in zip(prompts, responses, strict=True)], dtype=torch.int64)
    if not len(lengths):
        fields = {"input_ids": torch.int64, "response_mask": torch.bool, "log_probs": torch.float32}
        empty = {name: torch.zeros(0, dtype=dtype) for name, dtype in fields.items()}
        return SampleBatch(lengths, lengths, empty, schema)
    ids = torch.cat([part for pair in zip(prompts, responses, strict=True) for part in pair]).cpu()
    mask = torch.cat(
        [
            torch.cat([torch.zeros(len(p), dtype=torch.bool), torch.ones(len(r), dtype=torch.bool)])
            for p, r in zip(prompts, responses, strict=True)
        ]
    )
    # Row i of a next_token field speaks of token i + 1: a response's first token is row len(prompt) - 1.
    recorded = torch.cat(
        [
            torch.cat([lp.new_zeros(len(p) - 1), lp, lp.new_zeros(1)]).cpu()
            for p, lp in zip(prompts, log_probs, strict=True)
        ]
    )
    return SampleBatch(
        torch.arange(len(lengths)),
        lengths,
        {"input_ids": ids, "response_mask": mask, "log_probs": recorded},
        schema,
    )
