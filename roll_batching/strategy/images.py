"""Images of samples: the pixels that a pack's vision encoder gets, and prompts with images in generation."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from roll_batching.errors import DataError
from roll_batching.packing.extra_inputs import BatchImages, ImageInputs
from roll_batching.planning import Plan
from roll_batching.samples import FieldSpec, SampleBatch
from roll_batching.samples.image_fields import IMAGE_SCHEMA, RESPONSE, has_images
from roll_batching.samples.token_fields import inputs_of
from roll_batching.strategy.model_state import ModelState


def check_prompt_images(prompts: SampleBatch, state: ModelState) -> None:
    """Raises `DataError` if images contradict the prompts, or the model takes none."""
    check_takes_images(prompts, state)
    if state.vision is not None and len(prompts):
        make_images(prompts, state)


class PromptImages:
    """Images of all prompts of a rank, for a model with a vision encoder."""

    def __init__(self, prompts: SampleBatch, state: ModelState) -> None:
        self.prompts, self.state = prompts, state
        self.images: BatchImages = make_images(prompts, state)
        self.shifts = self.images.tokens.next_positions(prompts) - prompts.lengths
        """[prompts]: RoPE position of the token after a prompt, minus its place in the sequence."""

    def of(self, prompts: Sequence[int]) -> SequenceImages:
        """Images of sequences; sequence i belongs to the prompt `prompts[i]`."""
        return SequenceImages(self, torch.tensor(prompts, dtype=torch.int64))


class SequenceImages:
    """Images of the sequences in a decoder's batch."""

    def __init__(self, source: PromptImages, prompt_of: torch.Tensor) -> None:
        self._source, self._prompt_of = source, prompt_of
        self._shifts = source.shifts[prompt_of].to(source.state.device)

    def select(self, rows: torch.Tensor) -> None:
        """Removes all sequences but `rows`."""
        self._prompt_of, self._shifts = self._prompt_of[rows.cpu()], self._shifts[rows]

    def of_prefill(self, firsts: Sequence[int], width: int) -> tuple[torch.Tensor, ImageInputs | None]:
        """(positions [3, width, prompts], images) of the prompts of the sequences `firsts`, padded to `width`."""
        source, layout = self._source, self._source.state.layout
        prompts = self._prompt_of[list(firsts)]
        count, lengths = len(prompts), source.prompts.lengths[prompts]
        place = torch.arange(width)[:, None].expand(width, count)
        index = source.prompts.offsets[prompts] + place
        is_token = place < lengths
        axes = torch.zeros(3, width, count, dtype=torch.int64)
        axes[:, is_token] = source.images.tokens.positions[:, index[is_token]]
        part = width // layout.tp_size if layout.sequence_parallel else width
        local = slice(layout.tp_rank * part, (layout.tp_rank + 1) * part) if layout.sequence_parallel else slice(None)
        local_tokens = is_token[local].flatten().nonzero().flatten()
        images = source.images.prompts(index[local].flatten()[local_tokens], local_tokens, layout.device)
        return axes.to(layout.device), images

    def of_step(self, places: torch.Tensor) -> torch.Tensor:
        """Positions [3, steps, sequences] of sampled tokens at `places` [steps, sequences] in their sequences."""
        return (places + self._shifts).expand(3, *places.shape)

    def of_sequences(self, sequences: SampleBatch) -> BatchImages:
        """Images of whole sequences, which have a prompt and the sampled tokens."""
        prompts = self._source.prompts
        fields, schema = {RESPONSE: self._sampled(sequences)}, {RESPONSE: FieldSpec("token", pad=False)}
        if all(name in prompts.schema for name in IMAGE_SCHEMA):
            with_images = prompts.only(["input_ids", *IMAGE_SCHEMA]).select(self._prompt_of, ids=sequences.ids)
            fields |= {name: with_images[name] for name in IMAGE_SCHEMA}
            schema |= IMAGE_SCHEMA
        return make_images(sequences.with_fields(fields, schema), self._source.state)

    def _sampled(self, sequences: SampleBatch) -> torch.Tensor:
        """[tokens] bool: whether a token of whole sequences was sampled."""
        before = self._source.prompts.lengths[self._prompt_of]
        place = torch.arange(sequences.num_tokens) - sequences.offsets[:-1].repeat_interleave(sequences.lengths)
        return place >= before.repeat_interleave(sequences.lengths)


# ---- images of packs


def images_of(local: SampleBatch, state: ModelState, plan: Plan) -> BatchImages | None:
    """This rank's images, checked; None for a batch without images of a model that takes none.

    Raises `DataError` for images of a model without an encoder, fields that contradict each other or the tokens, and
    samples that the plan cuts inside an image.
    """
    check_takes_images(local, state)
    if state.vision is None:
        return None
    images = make_images(local, state)
    images.check_cuts(local, plan, state.layout.dp_rank)
    return images


def check_takes_images(batch: SampleBatch, state: ModelState) -> None:
    """Raises `DataError` for images of a model without a vision encoder."""
    if state.vision is None and has_images(batch):
        image_fields = [name for name in IMAGE_SCHEMA if name in batch.schema]
        raise DataError(
            f"the batch has images ({', '.join(image_fields)}), and the model has no vision encoder: leave these "
            "fields out, or train a model that takes images (Qwen3.5: set model_args.vision_encoder)"
        )


def make_images(batch: SampleBatch, state: ModelState) -> BatchImages:
    """This rank's images of a batch, for a model that takes images. Raises `DataError` if they contradict tokens."""
    layout = state.layout
    part = (layout.tp_rank, layout.tp_size) if layout.sequence_parallel else (0, 1)
    return BatchImages(inputs_of(batch, RESPONSE), state.vision, part=part, encodes=layout.pp_rank == 0)
