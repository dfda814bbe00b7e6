"""Generation from the training model, with a key-value cache in the attention core.

Each prompt is prefilled once and its cache repeated for all its responses; the head computes only the last position.
Finished sequences are removed from the batch. A limited cache splits the sequences into groups that generate one after
the other. Log-probs of the sampled tokens are recorded, and equal those of a packed forward pass to rounding.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F

from roll_batching.distributed import Facts
from roll_batching.errors import DataError, LayoutError
from roll_batching.modeling.attention.dense import dense_decoding
from roll_batching.modeling.decode import DecodeParams, KeyValueCache
from roll_batching.modeling.head import gpt_of, hidden_states_of, logits_at
from roll_batching.modeling.rotary import rotary_settings
from roll_batching.planning import ParallelDims
from roll_batching.samples import FieldSpec, SampleBatch
from roll_batching.samples.flatten import content_digest
from roll_batching.samples.length_table import require_batch
from roll_batching.samples.token_fields import require_field
from roll_batching.strategy.decoding import (
    LENGTH_MULTIPLE,
    RecomputingDecoder,
    cache_positions,
    gather_vocabulary,
    max_over_ranks,
    positions_per_step,
    split_by_cache_limit,
)
from roll_batching.strategy.model_state import ModelState
from roll_batching.strategy.sampling import GenerationSettings, Sampler, uniform_draws
from roll_batching.strategy.schedule import changed_attributes
from roll_batching.strategy.step_inputs import SAME_SAMPLES, check_positions, check_tokens, check_window

Response = tuple[torch.Tensor, torch.Tensor]
"""Tokens of a response and their log-probs, [tokens] each."""
COMPACT_BELOW = 0.75
"""Finished sequences are removed when fewer than this share of the batch is still running."""


def check_generation(
    facts: Facts, prompts: SampleBatch, settings: GenerationSettings, state: ModelState, draws: torch.Tensor | None
) -> None:
    """Raises `DataError` or `LayoutError` for arguments that cannot be generated from.

    Call it inside a consensus: `facts` receives what all ranks must agree on.
    """
    if state.settings.rows_form:
        raise LayoutError(
            "generate needs a model that takes packs, and this one was passed to from_parts with rows_form=True: build "
            "it from packed_layer_spec(config), or sample elsewhere"
        )
    require_batch("generate", prompts, "prompts")
    if len(prompts):
        require_field(prompts, "input_ids", "generate", "token")
    check_tokens(prompts, state)
    if state.vision is not None or any(spec.kind == "rows" for spec in prompts.schema.values()):
        from roll_batching.strategy.images import check_prompt_images  # few models take images

        check_prompt_images(prompts, state)
    if not isinstance(settings, GenerationSettings):
        raise DataError(f"settings is a {type(settings).__name__}: pass GenerationSettings")
    limit, longest = settings.max_tokens_in_cache, prompts.max_length
    needed = cache_positions(longest, settings, state.layout) if longest else 0
    check_positions(needed, state)
    check_window(longest + settings.max_new_tokens if longest else 0, state)
    if limit is not None and needed > limit:
        raise DataError(
            f"max_tokens_in_cache={limit} has no room for one row: the longest prompt of {longest} "
            f"tokens and max_new_tokens={settings.max_new_tokens} need {needed}. Raise it, or lower max_new_tokens"
        )
    shape = len(prompts) * settings.num_return_sequences, settings.max_new_tokens
    if draws is not None and not settings.greedy and draws.shape != shape:
        raise DataError(f"draws has the shape {list(draws.shape)}, and the responses need {list(shape)}")
    facts.equal("the settings", settings)
    content = content_digest(prompts.ids, prompts.lengths, prompts.fields)
    facts.equal_in_replica("the prompts of a replica", content, SAME_SAMPLES)


def check_layout(dims: ParallelDims) -> None:
    """Raises `LayoutError` for a layout without support for generation."""
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
    """Samples `num_return_sequences` responses to each of this data-parallel rank's prompts. Collective.

    Args:
        model: the model to sample from, with gathered parameters.
        prompts: samples with a token field `input_ids`, and for a model with a vision encoder image fields; may be
            empty. The same on all tensor-parallel ranks.
        settings: sampling settings; `seed` and the data-parallel rank seed the draws.
        draws: uniform numbers of these responses (see `uniform_draws`), to replace the seeded ones.

    Returns:
        Prompts and responses, `num_return_sequences` consecutive rows per prompt, ids 0, 1, ..., with the
        fields `input_ids` (token), `response_mask` (token, bool) and `log_probs` (next_token: of the
        sampled tokens, 0 elsewhere; fp32, or fp64 for an fp64 model).

    Raises:
        LayoutError: under virtual pipelining or context parallelism.

    Without a pipeline, decoding uses a key-value cache: that of the attention backend, or of the dense backend in its
    place where the backend allows that (TransformerEngine's does). Otherwise whole sequences are recomputed for every
    token, which is meant for checks, and `max_tokens_in_cache` has no effect. Ranks that share experts decode in
    lockstep until the last of them has finished.
    """
    layout = model.layout
    check_layout(layout)
    sequences = [row.to(layout.device) for row in prompts.to_lists("input_ids")] if len(prompts) else []
    sequences = [row for row in sequences for _ in range(settings.num_return_sequences)]
    sampler = make_sampler(model, settings, max(len(sequences), 1), draws if sequences else None)
    limit = settings.max_tokens_in_cache if uses_cache(model) else None
    positions = [cache_positions(len(sequence), settings, layout) for sequence in sequences]
    responses: dict[int, Response] = {}
    images = None
    if model.vision is not None and len(prompts):
        from roll_batching.strategy.images import PromptImages  # few models take images

        images = PromptImages(prompts, model)
    with decoding(model, settings) as make_decoder:
        for group in split_by_cache_limit(positions, limit, layout):
            # A rank without sequences decodes a dummy: the others need its experts.
            batch = [sequences[i] for i in group] or [torch.full((1,), settings.eos_token_id, device=layout.device)]
            group_images = images and images.of([i // settings.num_return_sequences for i in group])
            responses |= zip(group, _generate_group(make_decoder(batch, group_images), group, sampler), strict=True)
    return responses_to_batch(sequences, [responses[i] for i in range(len(sequences))], model.result_dtype)


def make_sampler(
    model: ModelState, settings: GenerationSettings, count: int, draws: torch.Tensor | None = None
) -> Sampler:
    """A sampler for `count` sequences; `draws` as for `generate`."""
    layout, device = model.layout, model.layout.device
    if draws is None:
        draws = uniform_draws(settings, count, dp_rank=layout.dp_rank, device=device, dtype=model.result_dtype)
    vocab_size = model.vocab_size or gpt_of(model.chunks[0]).vocab_size
    return Sampler(settings, vocab_size, draws.to(device), [layout.tp_group, layout.pp_group])


def uses_cache(model: ModelState) -> bool:
    """Whether the model decodes with a key-value cache."""
    if model.layout.pp_size > 1 or model.attention is None:
        return False
    # Megatron's own rotation of packs takes no position ids, but sequences in a decoding step are at different ones.
    rotates_itself = gpt_of(model.chunks[0]).position_embedding_type == "rope"
    return _decodes_densely(model) or (model.attention.decodes and not rotates_itself)


def _decodes_densely(model: ModelState) -> bool:
    """Whether dense attention cores replace those of the backend while decoding."""
    if model.architecture is None or model.attention is None or model.attention.decodes:
        return False
    return getattr(model.attention, "dense_decodes", False)  # a backend that is not derived from ours may lack it


@contextlib.contextmanager
def decoding(
    model: ModelState, settings: GenerationSettings
) -> Iterator[Callable[..., CachedDecoder | RecomputingDecoder]]:
    """Context in which the model decodes; yields a function that makes a decoder of sequences and their images."""
    gpt, cached = gpt_of(model.chunks[0]), uses_cache(model)
    dense_cores: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
    if cached and model.architecture is not None and _decodes_densely(model):
        dense_cores = dense_decoding(gpt, rotary_settings(model.architecture))
    # cuBLAS splits products with few rows along the summed dimension, and may add the parts in 16 bits. Recorded
    # log-probs are compared with those of packs, whose products are not split.
    flags = ("allow_bf16_reduced_precision_reduction", "allow_fp16_reduced_precision_reduction")
    unsplit = changed_attributes(torch.backends.cuda.matmul, dict.fromkeys(flags, False))
    with hidden_states_of(gpt), dense_cores, unsplit:
        yield (
            lambda rows, images=None: (
                CachedDecoder(model, gpt, rows, settings, images) if cached else RecomputingDecoder(model, rows, images)
            )
        )


class CachedDecoder:
    """Next-token logits with a key-value cache, for sequences at different positions."""

    def __init__(
        self, model: ModelState, gpt: Any, rows: list[torch.Tensor], settings: GenerationSettings, images: Any = None
    ) -> None:
        """`rows`: token ids of each prompt. `images`: their `SequenceImages`, for a model with a vision encoder."""
        self._images = images
        self.layout, self._gpt = model.layout, gpt
        self._chunk = model.chunks[0]
        """`gpt` in its wrappers, such as DDP's: passes call this one."""
        self._rows = rows
        self._lengths = torch.tensor([len(row) for row in rows], device=model.device)
        self._next_positions = self._lengths  # replaced, never changed in place
        self.longest = max(map(len, rows))
        """Positions of the longest sequence, on the host: reading them from the device would wait for it."""
        self._per_step = positions_per_step(model.layout)
        self._cache = KeyValueCache(cache_positions(self.longest, settings, model.layout))

    def prefill(self) -> torch.Tensor:
        """Logits after each prompt, [n, vocabulary]. Consecutive sequences with one prompt share its computation."""
        firsts = [i for i, row in enumerate(self._rows) if i == 0 or row is not self._rows[i - 1]]
        sizes = [end - start for start, end in zip(firsts, [*firsts[1:], len(self._rows)], strict=True)]
        padded = torch.nn.utils.rnn.pad_sequence([self._rows[i] for i in firsts], batch_first=True)
        padded = F.pad(padded, (0, -padded.shape[1] % self._per_step))
        count, width = padded.shape
        device = padded.device
        positions = torch.arange(width, device=device)[:, None].expand(width, count)
        lengths = self._lengths[torch.tensor(firsts, device=device)]
        params = DecodeParams(qkv_format="sbhd", cache=self._cache, positions=positions, lengths=lengths)
        if self._images is not None:
            params.axes, params.images = self._images.of_prefill(firsts, width)
        output = self._chunk(padded, positions.t(), None, packed_seq_params=params)
        # With output_size the device need not be read for the length of the result.
        repeats = torch.tensor(sizes, device=device)
        prompt_of = torch.arange(count, device=device).repeat_interleave(repeats, output_size=len(self._rows))
        self._cache.select(prompt_of)
        last = torch.arange(count, device=device) * width + lengths - 1
        return gather_vocabulary(logits_at(output, last, self._gpt), self._gpt)[prompt_of]

    def select(self, rows: torch.Tensor) -> None:
        """Removes all sequences but `rows` from the batch."""
        self._cache.select(rows)
        self._next_positions = self._next_positions[rows]
        if self._images is not None:
            self._images.select(rows)
        self.longest = int(self._next_positions.max())

    def step(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits after one more token per sequence, [n, vocabulary], from `tokens` [n]."""
        positions, cache = self._next_positions, self._cache
        width = min(cache.length, -(-(self.longest + 1) // LENGTH_MULTIPLE) * LENGTH_MULTIPLE)
        visible = (torch.arange(width, device=positions.device) <= positions[:, None])[:, None, None]
        repeated = positions.expand(self._per_step, -1)
        params = DecodeParams(qkv_format="sbhd", cache=cache, positions=repeated, visible=visible)
        params.axes = None if self._images is None else self._images.of_step(repeated)
        ids = tokens[:, None].expand(-1, self._per_step)
        output = self._chunk(ids, repeated.t(), None, packed_seq_params=params)
        # Finished sequences stay in the batch for a while, beyond their last position.
        self._next_positions = (positions + 1).clamp(max=cache.length - 1)
        self.longest = min(self.longest + 1, cache.length - 1)
        first = torch.arange(len(tokens), device=tokens.device) * self._per_step
        return gather_vocabulary(logits_at(output, first, self._gpt), self._gpt)


class ResponseBuffer:
    """Tokens and log-probs of the responses of one batch so far."""

    def __init__(self, count: int, settings: GenerationSettings, logits: torch.Tensor, *, running: bool = True) -> None:
        """`running` False: a batch of dummies, whose tokens are not recorded."""
        device = logits.device
        dtype = torch.float64 if logits.dtype is torch.float64 else torch.float32
        self.tokens = torch.zeros(count, settings.max_new_tokens, dtype=torch.int64, device=device)
        self.log_probs = torch.zeros(count, settings.max_new_tokens, dtype=dtype, device=device)
        self.sizes = torch.zeros(count, dtype=torch.int64, device=device)
        self.in_batch = torch.arange(count, device=device)
        """[rows of the batch]: index of the response that each row of the decoder's batch computes."""
        self.running = torch.full((count,), running, dtype=torch.bool, device=device)
        """[rows of the batch] bool: whether the response of a row has not ended."""
        self._stops = torch.tensor(sorted({settings.eos_token_id, *settings.stop_token_ids}), device=device)

    def append(self, step: int, tokens: torch.Tensor, log_probs: torch.Tensor) -> int:
        """Records one token per row of the batch; returns the number that still run (the step's only host read)."""
        rows, running = self.in_batch, self.running
        self.tokens[rows, step] = torch.where(running, tokens, self.tokens[rows, step])
        self.log_probs[rows, step] = torch.where(running, log_probs, self.log_probs[rows, step])
        self.sizes[rows] += running
        self.running = running & ~torch.isin(tokens, self._stops)
        return int(self.running.sum())

    def select(self, rows: torch.Tensor) -> None:
        """Removes all but `rows` of the batch."""
        self.in_batch, self.running = self.in_batch[rows], self.running[rows]


def _generate_group(decoder: CachedDecoder | RecomputingDecoder, group: list[int], sampler: Sampler) -> list[Response]:
    """Responses of the sequences `group`, with their end token if they have one."""
    settings, layout = sampler.settings, decoder.layout
    logits = decoder.prefill()
    device = logits.device
    sequence_of = torch.tensor(group or [0], device=device)
    buffer = ResponseBuffer(len(logits), settings, logits, running=bool(group))
    for step in range(settings.max_new_tokens):
        tokens, log_probs = sampler(logits, sequence_of[buffer.in_batch], step)
        running = buffer.append(step, tokens, log_probs)
        # Ranks that share experts go on until the last of them has finished.
        any_running = max_over_ranks(running, layout) if layout.ep_size > 1 else running
        if not any_running or step + 1 == settings.max_new_tokens:
            break
        if running < COMPACT_BELOW * len(buffer.in_batch):
            # A rank that has finished keeps one row for as long as others need its experts.
            rows = buffer.running.nonzero()[:, 0] if running else torch.zeros(1, dtype=torch.int64, device=device)
            decoder.select(rows)
            buffer.select(rows)
            tokens = tokens[rows]
        logits = decoder.step(tokens)
    sizes = buffer.sizes.tolist()[: len(group)]
    return [(buffer.tokens[row, :size], buffer.log_probs[row, :size]) for row, size in enumerate(sizes)]


def responses_to_batch(
    prompts: list[torch.Tensor], responses: list[Response], dtype: torch.dtype = torch.float32
) -> SampleBatch:
    """A batch of prompts and responses with the fields of `generate`. `dtype`: of the log-probs of an empty batch."""
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
    is_response = torch.tensor([False, True]).repeat(len(prompts))
    sizes = torch.tensor([len(part) for p, (r, _) in zip(prompts, responses, strict=True) for part in (p, r)])
    mask = is_response.repeat_interleave(sizes)
    # Row i of a next_token field belongs to token i + 1: a response's first token is row len(prompt) - 1.
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
