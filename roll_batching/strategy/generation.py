"""Sampling from the model with a key-value cache in the attention core.

Prompts are prefilled once each and their cache is repeated for the group. Rows end at their own
length; finished ones are taken out of the batch. Log-probs of the sampled tokens are recorded, and
equal those of a packed forward pass to rounding.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from roll_batching.data import FieldSpec, SampleBatch
from roll_batching.data.table import require_batch
from roll_batching.distributed.parallel_layout import ParallelLayout
from roll_batching.errors import DataError, LayoutError
from roll_batching.modeling.decode import DecodeParams, KeyValueCache
from roll_batching.modeling.head import gpt_of, head_attached
from roll_batching.packing.batch import PackedBatch, pack_step
from roll_batching.planning import BatchingSpec, PlanConstraints, plan_step
from roll_batching.strategy.schedule import run_schedule
from roll_batching.strategy.state import ModelState

_WIDTH_STEP = 16
"""Visible keys grow in steps of this many positions, so that shapes repeat."""
_COMPACT_BELOW = 0.75
"""Finished rows are taken out when fewer than this share of rows still runs."""


@dataclass(frozen=True, kw_only=True)
class GenerationSettings:
    """How responses are sampled."""

    max_new_tokens: int
    eos_token_id: int
    stop_token_ids: tuple[int, ...] = ()
    """Further tokens that end a response."""
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


def check_generation(prompts: SampleBatch, settings: GenerationSettings) -> None:
    """Raises `DataError` for what are no prompts, or no settings."""
    require_batch("generate", prompts, "prompts")
    if len(prompts) and ("input_ids" not in prompts.schema or prompts.schema["input_ids"].kind != "token"):
        raise DataError("prompts need a field input_ids of kind token")
    if not isinstance(settings, GenerationSettings):
        raise DataError(f"settings is a {type(settings).__name__}: pass GenerationSettings")


@torch.no_grad()
def generate(model: ModelState, prompts: SampleBatch, settings: GenerationSettings) -> SampleBatch:
    """Samples `num_return_sequences` responses to each of this data-parallel rank's prompts.

    Args:
        model: the model to sample from, its parameters whole.
        prompts: samples with a token field `input_ids`; may be empty. Tensor-parallel ranks pass the same.
        settings: sampling settings; `seed` and the data-parallel rank seed the draws.

    Returns:
        Prompts and responses, `num_return_sequences` consecutive rows per prompt, ids 0, 1, ..., with the
        fields `input_ids` (token), `response_mask` (token, bool) and `log_probs` (next_token: of the
        sampled tokens, 0 elsewhere; fp32, or fp64 for an fp64 model).

    Raises:
        LayoutError: under virtual pipelining or context parallelism.

    Without a pipeline a key-value cache makes every token one small step; with one, and with an attention
    backend that does not decode, whole sequences are computed again for every token, which serves checks more than
    rollouts. Ranks that share experts
    decode in lockstep until the last of them has ended.
    """
    layout = model.layout
    if layout.vpp_size > 1 or layout.cp_size > 1:
        raise LayoutError(
            f"generate is not possible with virtual pipeline {layout.vpp_size} and context parallel size "
            f"{layout.cp_size}: roll out with an engine, or in a job without them"
        )
    gpt = gpt_of(model.chunks[0])
    vocab_size = model.vocab_size or gpt.vocab_size
    sampler = _Sampler(settings, vocab_size, layout.device, settings.seed * 1_000_003 + layout.dp_rank)
    rows = [row.to(layout.device) for row in prompts.to_lists("input_ids")] if len(prompts) else []
    idle = not rows
    if idle and layout.ep_size == 1:
        return _as_batch([], [], [])
    if idle:  # the other ranks need this rank's experts
        rows = [torch.full((1,), settings.eos_token_id, device=layout.device)]
    copies = 1 if idle else settings.num_return_sequences
    repeat = torch.arange(len(rows), device=layout.device).repeat_interleave(copies)
    with head_attached(gpt):
        cached = layout.pp_size == 1 and model.attention is not None and model.attention.decodes
        if cached:
            source: _Cached | _Recomputed = _Cached(model.chunks[0], gpt, rows, repeat, settings.max_new_tokens)
        else:
            source = _Recomputed(model, [rows[i] for i in repeat.tolist()])
        with _decoding(layout.device, quick=cached):
            tokens, log_probs = _decode(source, len(repeat), sampler, settings, layout, idle=idle)
    if idle:
        return _as_batch([], [], [])
    return _as_batch([rows[i] for i in repeat.tolist()], tokens, log_probs)


@contextlib.contextmanager
def _decoding(device: torch.device, *, quick: bool) -> Iterator[None]:
    if device.type == "cuda" or not quick:
        yield
        return
    from roll_batching.distributed import cpu_platform

    with cpu_platform.paused():
        yield


def _whole(logits: torch.Tensor, gpt: Any) -> torch.Tensor:
    """All vocabulary columns of this rank's [rows, vocabulary / tp]."""
    group = gpt.pg_collection.tp
    if group.size() == 1:
        return logits
    parts = [torch.empty_like(logits) for _ in range(group.size())]
    dist.all_gather(parts, logits.contiguous(), group=group)
    return torch.cat(parts, -1)


class _Cached:
    """Next-token logits with a key-value cache; the rows may sit at different positions."""

    def __init__(
        self, chunk: Any, gpt: Any, prompts: list[torch.Tensor], repeat: torch.Tensor, max_new_tokens: int
    ) -> None:
        self._chunk, self._gpt = chunk, gpt
        self._lengths = torch.tensor([len(row) for row in prompts], device=repeat.device)
        self._prompts, self._repeat = prompts, repeat
        self._positions = self._lengths[repeat]
        # Sequence parallelism cuts positions into this many parts: a step carries as many, of which one counts.
        self._unit = gpt.pg_collection.tp.size() if gpt.config.sequence_parallel else 1
        self._cache = KeyValueCache(int(self._lengths.max()) + max_new_tokens + self._unit - 1)

    def first(self) -> torch.Tensor:
        """Logits after each prompt, [rows, vocabulary]; every prompt is computed once."""
        padded = torch.nn.utils.rnn.pad_sequence(self._prompts, batch_first=True)
        padded = F.pad(padded, (0, -padded.shape[1] % self._unit))
        count, width = padded.shape
        positions = torch.arange(width, device=padded.device)[:, None].expand(width, count)
        params = DecodeParams(qkv_format="sbhd", cache=self._cache, positions=positions)
        logits = self._chunk(padded, positions.t(), None, packed_seq_params=params)
        self._cache.select(self._repeat)
        last = logits[torch.arange(count, device=padded.device), self._lengths - 1]
        return _whole(last, self._gpt)[self._repeat]

    def keep(self, rows: torch.Tensor) -> None:
        """Goes on with these rows only."""
        self._cache.select(rows)
        self._positions = self._positions[rows]

    def following(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits after one more token per row, [rows, vocabulary]."""
        positions, cache = self._positions, self._cache
        width = min(cache.length, -(-(int(positions.max()) + 1) // _WIDTH_STEP) * _WIDTH_STEP)
        visible = (torch.arange(width, device=positions.device) <= positions[:, None])[:, None, None]
        repeated = positions.expand(self._unit, -1)
        params = DecodeParams(qkv_format="sbhd", cache=cache, positions=repeated, visible=visible)
        ids = tokens[:, None].expand(-1, self._unit)
        logits = self._chunk(ids, repeated.t(), None, packed_seq_params=params)[:, 0]
        self._positions = (positions + 1).clamp(max=cache.length - 1)
        return _whole(logits, self._gpt)


class _Recomputed:
    """Next-token logits without a cache: whole sequences are computed again for every token.

    Under a pipeline the last stage's logits reach all stages, so that all draw the same tokens.
    """

    def __init__(self, model: ModelState, rows: list[torch.Tensor]) -> None:
        self._model, self._rows = model, rows

    def first(self) -> torch.Tensor:
        """Logits after each row, [rows, vocabulary]."""
        model, layout = self._model, self._model.layout
        lengths = [len(row) for row in self._rows]
        # A replica generates by itself: a plan of one data-parallel rank.
        widths = [-(-n // _WIDTH_STEP) * _WIDTH_STEP for n in lengths]
        # Ranks that share experts make as many passes: one each.
        cap = sum(widths) if layout.ep_size > 1 else max(model.batching.infer.max_tokens or 0, *widths)
        dims = replace(layout.dims, dp_size=1, ep_size=1, etp_size=layout.tp_size)
        plan = plan_step(lengths, PlanConstraints.of(dims, BatchingSpec(max_tokens=cap, algorithm="none")))
        batch = SampleBatch.from_lists({"input_ids": self._rows}, {"input_ids": "token"})
        packs = pack_step(batch, plan, dp_rank=0, device=layout.device, attention=model.attention)

        def bind(pack: PackedBatch, chunk: Any) -> Any:
            last = torch.from_numpy(pack.layout.cu_seqlens[:-1][: pack.samples] + pack.layout.lengths - 1)

            def collect(output: torch.Tensor, non_loss_data: bool = True) -> torch.Tensor:
                return _whole(output[0][last.to(output.device)], gpt_of(chunk))

            return collect

        parts = run_schedule(
            plan, packs, model.chunks, bind, layout, forward_only=True, collect=True,
            pg_collection=model.pg_collection,
        )  # fmt: skip
        vocabulary = gpt_of(model.chunks[0]).vocab_size
        logits = torch.zeros(len(lengths), vocabulary, dtype=model.result_dtype, device=layout.device)
        if layout.is_last_stage:
            order = torch.from_numpy(plan.rank_samples(0)).to(layout.device)
            logits[order] = torch.cat([part for part in parts if len(part)]).to(logits.dtype)
        dist.broadcast(logits, dist.get_global_rank(layout.pp_group, layout.pp_size - 1), group=layout.pp_group)
        return logits

    def keep(self, rows: torch.Tensor) -> None:
        """Goes on with these rows only."""
        self._rows = [self._rows[i] for i in rows.tolist()]

    def following(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits after one more token per row, [rows, vocabulary]."""
        self._rows = [torch.cat([row, token]) for row, token in zip(self._rows, tokens.split(1), strict=True)]
        return self.first()


def _decode(
    source: _Cached | _Recomputed,
    count: int,
    sampler: _Sampler,
    settings: GenerationSettings,
    layout: ParallelLayout,
    *,
    idle: bool,
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Responses with their end token where it came, and the log-probs of their tokens, per row."""
    device = layout.device
    logits = source.first()
    kept = torch.float64 if logits.dtype is torch.float64 else torch.float32
    tokens = torch.zeros(count, settings.max_new_tokens, dtype=torch.int64, device=device)
    log_probs = torch.zeros(count, settings.max_new_tokens, dtype=kept, device=device)
    sizes = torch.zeros(count, dtype=torch.int64, device=device)
    live = torch.arange(count, device=device)
    stops = torch.tensor(sorted({settings.eos_token_id, *settings.stop_token_ids}), device=device)
    running = torch.full((count,), not idle, dtype=torch.bool, device=device)
    for step in range(settings.max_new_tokens):
        drawn, drawn_log_probs = sampler(logits)
        at = live[running]
        tokens[at, step], log_probs[at, step] = drawn[running], drawn_log_probs[running]
        sizes[at] += 1
        running = running & ~torch.isin(drawn, stops)
        left = int(running.sum())
        if _none_runs(left, layout) or step + 1 == settings.max_new_tokens:
            break
        if left < _COMPACT_BELOW * len(live):
            # A rank that is done keeps a row for as long as others need its experts.
            rows = running.nonzero()[:, 0] if left else torch.zeros(1, dtype=torch.int64, device=device)
            source.keep(rows)
            live, drawn, running = live[rows], drawn[rows], running[rows]
        logits = source.following(drawn)
    ends = sizes.tolist()
    return (
        [row[:end] for row, end in zip(tokens, ends, strict=True)],
        [row[:end] for row, end in zip(log_probs, ends, strict=True)],
    )


def _none_runs(left: int, layout: ParallelLayout) -> bool:
    """Whether generation is over: on this rank or, where ranks share experts, on all of them."""
    if layout.ep_size == 1:
        return left == 0
    most = torch.tensor([left])
    dist.all_reduce(most, op=dist.ReduceOp.MAX, group=layout.host_group)
    return int(most) == 0


def _as_batch(prompts: list[torch.Tensor], responses: list[torch.Tensor], log_probs: list[torch.Tensor]) -> SampleBatch:
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
