"""Images of the batches that a strategy computes."""

from __future__ import annotations

from roll_batching.errors import DataError
from roll_batching.packing.image_inputs import BatchImages
from roll_batching.planning import Plan
from roll_batching.samples import SampleBatch
from roll_batching.samples.image_fields import IMAGE_SCHEMA, RESPONSE, has_images
from roll_batching.samples.model_inputs import inputs_of
from roll_batching.strategy.model_state import ModelState


def images_of(local: SampleBatch, state: ModelState, plan: Plan) -> BatchImages | None:
    """This rank's images, checked; None for a batch without images of a model that takes none.

    Raises:
        DataError: for images of a model without an encoder, fields that contradict each other or the tokens, and
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
        given = [name for name in IMAGE_SCHEMA if name in batch.schema]
        raise DataError(
            f"the batch has images ({', '.join(given)}), and the model has no vision encoder: leave these fields out, "
            "or train a model that takes images"
        )


def make_images(batch: SampleBatch, state: ModelState) -> BatchImages:
    """The images of a batch for this rank of a model that takes them. Raises `DataError`."""
    layout = state.layout
    part = (layout.tp_rank, layout.tp_size) if layout.sequence_parallel else (0, 1)
    return BatchImages(inputs_of(batch, RESPONSE), state.vision, part=part, encodes=layout.pp_rank == 0)
