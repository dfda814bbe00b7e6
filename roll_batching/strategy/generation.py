"""Sampling from the model with a key-value cache in the attention core.

Prompts are prefilled once each and their cache is repeated for the group; the head computes their last
position alone. Rows end at their own length; finished ones are taken out of the batch. Where the cache is
bounded, rows are sampled in waves. Log-probs of the sampled tokens are recorded, and equal those of a
packed forward pass to rounding.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from roll_batching.distributed import Facts
from roll_batching.errors import DataError, LayoutError
from roll_batching.modeling.attention.decoding import dense_decoding
from roll_batching.modeling.builder import rotary_settings
from roll_batching.modeling.decode import DecodeParams, KeyValueCache
from roll_batching.modeling.head import gpt_of, hidden_states_of, logits_at
from roll_batching.packing.batch import PackedBatch, pack_step
from roll_batching.planning import BatchingSpec, ParallelDims, PlanConstraints, plan_step
from roll_batching.samples import FieldSpec, SampleBatch
from roll_batching.samples.checks import content_digest
from roll_batching.samples.table import require_batch
from roll_batching.strategy.inputs import SAME_SAMPLES, check_positions, check_tokens, check_window
from roll_batching.strategy.sampling import GenerationSettings, Sampler, draws_of
from roll_batching.strategy.schedule import run_schedule
from roll_batching.strategy.state import ModelState
from roll_batching.strategy.waves import most_of_all, positions_of_a_step, room_of_row, waves_of

_WIDTH_STEP = 16
"""Visible keys grow in steps of this many positions, so that shapes repeat."""
Response = tuple[torch.Tensor, torch.Tensor]
"""A row's tokens and their log-probs, [tokens] each."""
COMPACT_BELOW = 0.75
"""Finished rows are taken out when fewer than this share of rows still runs."""


def check_generation(
    facts: Facts, prompts: SampleBatch, settings: GenerationSettings, state: ModelState, draws: torch.Tensor | None
) -> None:
    """Raises `DataError` for what cannot be generated from; `facts` hears what others must have too."""
    if state.settings.rows_form:
        raise LayoutError(
            "generate gives the model packs, and this one was handed over with rows_form=True, as it takes none: build "
            "it from packed_layer_spec(config), or sample elsewhere"
        )
    require_batch("generate", prompts, "prompts")
    if len(prompts) and ("input_ids" not in prompts.schema or prompts.schema["input_ids"].kind != "token"):
        raise DataError("prompts need a field input_ids of kind token")
    check_tokens(prompts, state)
    if not isinstance(settings, GenerationSettings):
        raise DataError(f"settings is a {type(settings).__name__}: pass GenerationSettings")
    bound, longest = settings.max_tokens_in_cache, prompts.max_length
    needed = room_of_row(longest, settings, state.layout) if longest else 0
    check_positions(needed, state)
    check_window(longest + settings.max_new_tokens if longest else 0, state)
    if bound is not None and needed > bound:
        raise DataError(
            f"max_tokens_in_cache={bound} has no room for one row: the longest prompt of {longest} "
            f"tokens and max_new_tokens={settings.max_new_tokens} need {needed}. Raise it, or lower max_new_tokens"
        )
    wanted = len(prompts) * settings.num_return_sequences, settings.max_new_tokens
    if draws is not None and not settings.greedy and draws.shape != wanted:
        raise DataError(f"draws has the shape {list(draws.shape)}, and the responses need {list(wanted)}")
    facts.equal("the settings", settings)
    same = content_digest(prompts.ids, prompts.lengths, prompts.fields)
    facts.equal_in_replica("the prompts of a replica", same, SAME_SAMPLES)


def check_layout(dims: ParallelDims) -> None:
    """Raises `LayoutError` for a layout in which no model generates."""
    if dims.vpp_size > 1 or dims.cp_size > 1:
        raise LayoutError(
            f"generate is not possible with virtual pipeline {dims.vpp_size} and context parallel size "
            f"{dims.cp_size}: give actor_infer a layout without them (its strategy_args.strategy_config), or roll out "
            "with an engine"
        )


@torch.no_grad()
def generate(
    model: ModelState, prompts: SampleBatch, settings: GenerationSettings, draws: torch.Tensor | None = None
) -> SampleBatch:
    """Samples `num_return_sequences` responses to each of this data-parallel rank's prompts.

    Args:
        model: the model to sample from, its parameters whole.
        prompts: samples with a token field `input_ids`; may be empty. Tensor-parallel ranks pass the same.
        settings: sampling settings; `seed` and the data-parallel rank seed the draws.
        draws: the random numbers of these responses, as `draws_of` gives them, where others are wanted.

    Returns:
        Prompts and responses, `num_return_sequences` consecutive rows per prompt, ids 0, 1, ..., with the
        fields `input_ids` (token), `response_mask` (token, bool) and `log_probs` (next_token: of the
        sampled tokens, 0 elsewhere; fp32, or fp64 for an fp64 model).

    Raises:
        LayoutError: under virtual pipelining or context parallelism.

    Without a pipeline a key-value cache makes every token one small step: the attention backend's own where its cores
    rotate, or, for one that lets it (TransformerEngine's), the dense backend's. Else whole sequences are computed again
    for every token, which serves checks more than rollouts, and `max_tokens_in_cache` bounds nothing. Ranks that share
    experts decode in lockstep until the last of them has ended.
    """
    layout = model.layout
    check_layout(layout)
    rows = [row.to(layout.device) for row in prompts.to_lists("input_ids")] if len(prompts) else []
    rows = [row for row in rows for _ in range(settings.num_return_sequences)]
    sampler = sampler_of(model, settings, max(len(rows), 1), draws if rows else None)
    bound = settings.max_tokens_in_cache if keeps_cache(model) else None
    waves = waves_of([room_of_row(len(row), settings, layout) for row in rows], bound, layout)
    responses: dict[int, Response] = {}
    with sources(model, settings) as source_of:
        for wave in waves:
            # Without a row of its own a rank computes one, for others that need its experts.
            here = [rows[i] for i in wave] or [torch.full((1,), settings.eos_token_id, device=layout.device)]
            responses |= zip(wave, _decode(source_of(here), wave, sampler), strict=True)
    return as_batch(rows, [responses[i] for i in range(len(rows))], model.result_dtype)


def sampler_of(
    model: ModelState, settings: GenerationSettings, rows: int, draws: torch.Tensor | None = None
) -> Sampler:
    """Draws the tokens of so many rows; `draws` as for `generate`."""
    layout, device = model.layout, model.layout.device
    if draws is None:
        draws = draws_of(settings, rows, part=layout.dp_rank, device=device, dtype=model.result_dtype)
    vocab_size = model.vocab_size or gpt_of(model.chunks[0]).vocab_size
    return Sampler(settings, vocab_size, draws.to(device), [layout.tp_group, layout.pp_group])


def keeps_cache(model: ModelState) -> bool:
    """Whether the model generates with a cache of keys and values."""
    if model.layout.pp_size > 1 or model.attention is None:
        return False
    # Megatron's own rotation of packs takes no positions, which rows at different ones would need.
    rotates_itself = gpt_of(model.chunks[0]).position_embedding_type == "rope"
    return _lends(model) or (model.attention.decodes and not rotates_itself)


def _lends(model: ModelState) -> bool:
    """Whether dense cores decode in place of the backend's."""
    if model.architecture is None or model.attention is None or model.attention.decodes:
        return False
    return getattr(model.attention, "dense_decodes", False)  # a backend that is not derived from ours may lack it


@contextlib.contextmanager
def sources(
    model: ModelState, settings: GenerationSettings
) -> Iterator[Callable[[list[torch.Tensor]], Cached | Recomputed]]:
    """Inside, what makes of rows of tokens a source of their next tokens' logits."""
    gpt, cached = gpt_of(model.chunks[0]), keeps_cache(model)
    lent: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
    if cached and model.architecture is not None and _lends(model):
        lent = dense_decoding(gpt, rotary_settings(model.architecture))
    with hidden_states_of(gpt), lent, _decoding(model.layout.device, quick=cached):
        yield lambda rows: Cached(model, gpt, rows, settings) if cached else Recomputed(model, rows)


@contextlib.contextmanager
def _decoding(device: torch.device, *, quick: bool) -> Iterator[None]:
    if device.type == "cuda":
        # Products of few rows are cut along the sum, and cuBLAS may add the parts up in bf16. The recorded log-probs
        # are compared with those of packs, whose products are not cut.
        products: Any = torch.backends.cuda.matmul
        before = products.allow_bf16_reduced_precision_reduction
        products.allow_bf16_reduced_precision_reduction = False
        try:
            yield
        finally:
            products.allow_bf16_reduced_precision_reduction = before
        return
    if not quick:
        yield
        return
    from roll_batching.distributed import cpu_platform

    with cpu_platform.function_mode_paused():
        yield


def _whole(logits: torch.Tensor, gpt: Any) -> torch.Tensor:
    """All vocabulary columns of this rank's [rows, vocabulary / tp]."""
    group = gpt.pg_collection.tp
    if group.size() == 1:
        return logits
    parts = [torch.empty_like(logits) for _ in range(group.size())]
    dist.all_gather(parts, logits.contiguous(), group=group)
    return torch.cat(parts, -1)


class Cached:
    """Next-token logits with a key-value cache; the rows may sit at different positions."""

    def __init__(self, model: ModelState, gpt: Any, rows: list[torch.Tensor], settings: GenerationSettings) -> None:
        self.layout, self._chunk, self._gpt = model.layout, model.chunks[0], gpt
        self._rows = rows
        self._lengths = torch.tensor([len(row) for row in rows], device=model.device)
        self._positions = self._lengths
        self.longest = max(map(len, rows))
        """Positions of the row that has most: known without asking the device."""
        self._unit = positions_of_a_step(model.layout)
        self._cache = KeyValueCache(room_of_row(max(map(len, rows)), settings, model.layout))

    def first(self) -> torch.Tensor:
        """Logits after each prompt, [rows, vocabulary]; rows of one prompt stand together, and it is computed once."""
        firsts = [i for i, row in enumerate(self._rows) if i == 0 or row is not self._rows[i - 1]]
        sizes = [end - start for start, end in zip(firsts, [*firsts[1:], len(self._rows)], strict=True)]
        padded = torch.nn.utils.rnn.pad_sequence([self._rows[i] for i in firsts], batch_first=True)
        padded = F.pad(padded, (0, -padded.shape[1] % self._unit))
        count, width = padded.shape
        device = padded.device
        positions = torch.arange(width, device=device)[:, None].expand(width, count)
        params = DecodeParams(qkv_format="sbhd", cache=self._cache, positions=positions)
        output = self._chunk(padded, positions.t(), None, packed_seq_params=params)
        sizes_there = torch.tensor(sizes, device=device)
        repeat = torch.arange(count, device=device).repeat_interleave(sizes_there, output_size=len(self._rows))
        self._cache.select(repeat)
        last = torch.arange(count, device=device) * width + self._lengths[torch.tensor(firsts, device=device)] - 1
        return _whole(logits_at(output, last, self._gpt), self._gpt)[repeat]

    def keep(self, rows: torch.Tensor) -> None:
        """Goes on with these rows only."""
        self._cache.select(rows)
        self._positions = self._positions[rows]
        self.longest = int(self._positions.max())

    def following(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits after one more token per row, [rows, vocabulary]."""
        positions, cache = self._positions, self._cache
        width = min(cache.length, -(-(self.longest + 1) // _WIDTH_STEP) * _WIDTH_STEP)
        visible = (torch.arange(width, device=positions.device) <= positions[:, None])[:, None, None]
        repeated = positions.expand(self._unit, -1)
        params = DecodeParams(qkv_format="sbhd", cache=cache, positions=repeated, visible=visible)
        ids = tokens[:, None].expand(-1, self._unit)
        output = self._chunk(ids, repeated.t(), None, packed_seq_params=params)
        self._positions = (positions + 1).clamp(max=cache.length - 1)
        self.longest = min(self.longest + 1, cache.length - 1)
        counted = torch.arange(len(tokens), device=tokens.device) * self._unit
        return _whole(logits_at(output, counted, self._gpt), self._gpt)


class Recomputed:
    """Next-token logits without a cache: whole sequences are computed again for every token.

    Under a pipeline the last stage's logits reach all stages, so that all draw the same tokens.
    """

    def __init__(self, model: ModelState, rows: list[torch.Tensor]) -> None:
        self.layout, self._model, self._rows = model.layout, model, rows

    def first(self) -> torch.Tensor:
        """Logits after each row, [rows, vocabulary]."""
        model, layout = self._model, self.layout
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
                gpt = gpt_of(chunk)
                return _whole(logits_at(output, last.to(output.device), gpt), gpt)

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


class Answers:
    """What the rows of a wave have answered so far."""

    def __init__(self, rows: int, settings: GenerationSettings, logits: torch.Tensor, *, answered: bool = True) -> None:
        """`answered`: whether anybody asked; else all have ended."""
        device = logits.device
        kept = torch.float64 if logits.dtype is torch.float64 else torch.float32
        self.tokens = torch.zeros(rows, settings.max_new_tokens, dtype=torch.int64, device=device)
        self.log_probs = torch.zeros(rows, settings.max_new_tokens, dtype=kept, device=device)
        self.sizes = torch.zeros(rows, dtype=torch.int64, device=device)
        self.live = torch.arange(rows, device=device)
        """Which rows are still in the batch."""
        self.running = torch.full((rows,), answered, dtype=torch.bool, device=device)
        """Of these rows: which have not ended."""
        self._stops = torch.tensor(sorted({settings.eos_token_id, *settings.stop_token_ids}), device=device)

    def add(self, step: int, drawn: torch.Tensor, log_probs: torch.Tensor) -> int:
        """One more token of each row in the batch. Returns how many go on: the one wait for the device."""
        live, running = self.live, self.running
        self.tokens[live, step] = torch.where(running, drawn, self.tokens[live, step])
        self.log_probs[live, step] = torch.where(running, log_probs, self.log_probs[live, step])
        self.sizes[live] += running
        self.running = running & ~torch.isin(drawn, self._stops)
        return int(self.running.sum())

    def keep(self, rows: torch.Tensor) -> None:
        """Goes on with these rows of the batch only."""
        self.live, self.running = self.live[rows], self.running[rows]


def _decode(source: Cached | Recomputed, wave: list[int], sampler: Sampler) -> list[Response]:
    """Responses of the rows `wave`, with their end token where it came."""
    settings, layout = sampler.settings, source.layout
    logits = source.first()
    device = logits.device
    number = torch.tensor(wave or [0], device=device)
    answers = Answers(len(logits), settings, logits, answered=bool(wave))
    for step in range(settings.max_new_tokens):
        drawn, log_probs = sampler(logits, number[answers.live], step)
        left = answers.add(step, drawn, log_probs)
        # Where ranks share experts, all go on until the last of them has ended.
        going_on = most_of_all(left, layout) if layout.ep_size > 1 else left
        if not going_on or step + 1 == settings.max_new_tokens:
            break
        if left < COMPACT_BELOW * len(answers.live):
            # A rank that is done keeps a row for as long as others need its experts.
            rows = answers.running.nonzero()[:, 0] if left else torch.zeros(1, dtype=torch.int64, device=device)
            source.keep(rows)
            answers.keep(rows)
            drawn = drawn[rows]
        logits = source.following(drawn)
    ends = answers.sizes.tolist()[: len(wave)]
    return [(answers.tokens[row, :end], answers.log_probs[row, :end]) for row, end in enumerate(ends)]


def as_batch(prompts: list[torch.Tensor], responses: list[Response], dtype: torch.dtype = torch.float32) -> SampleBatch:
    """Prompts and the responses to them, with the fields that `generate` returns; log-probs of none are of `dtype`."""
    schema = {
        "input_ids": FieldSpec("token"),
        "response_mask": FieldSpec("token", pad=False),
        "log_probs": FieldSpec("next_token"),
    }
    lengths = torch.tensor([len(p) + len(r) for p, (r, _) in zip(prompts, responses, strict=True)], dtype=torch.int64)
    if not len(lengths):
        fields = {"input_ids": torch.int64, "response_mask": torch.bool, "log_probs": dtype}
        empty = {name: torch.zeros(0, dtype=dtype) for name, dtype in fields.items()}
        return SampleBatch(lengths, lengths, empty, schema)
    ids = torch.cat([part for p, (r, _) in zip(prompts, responses, strict=True) for part in (p, r)]).cpu()
    mask = torch.cat(
        [
            torch.cat([torch.zeros(len(p), dtype=torch.bool), torch.ones(len(r), dtype=torch.bool)])
            for p, (r, _) in zip(prompts, responses, strict=True)
        ]
    )
    # Row i of a next_token field speaks of token i + 1: a response's first token is row len(prompt) - 1.
    recorded = torch.cat(
        [
            torch.cat([lp.new_zeros(len(p) - 1), lp, lp.new_zeros(1)]).cpu()
            for p, (_, lp) in zip(prompts, responses, strict=True)
        ]
    )
    return SampleBatch(
        torch.arange(len(lengths)),
        lengths,
        {"input_ids": ids, "response_mask": mask, "log_probs": recorded},
        schema,
    )
