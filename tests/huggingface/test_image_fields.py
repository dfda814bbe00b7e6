"""Image fields: positions of tokens as transformers has them, features as its processor and encoder, and errors."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from roll_batching.errors import DataError
from roll_batching.packing.extra_inputs import BatchImages, image_format
from roll_batching.samples.image_fields import find_images
from roll_batching.settings.model_parts import VisionConfig
from tests.huggingface import vision

pytestmark = pytest.mark.models

CONFIG = VisionConfig(
    depth=2,
    hidden_size=32,
    intermediate_size=24,
    num_heads=2,
    patch_size=vision.PATCH,
    window_size=16,
    fullatt_block_indexes=(1,),
    mrope_section=(2, 1, 1),
    image_token_id=vision.IMAGE,
    video_token_id=vision.VIDEO,
    vision_start_token_id=vision.START,
    vision_end_token_id=vision.END,
)
FORM = image_format(CONFIG)


@pytest.fixture(scope="module")
def model(tmp_path_factory: Any) -> Any:
    return vision.write_model(tmp_path_factory.mktemp("vision"))


def test_positions_are_those_of_transformers(model: Any) -> None:
    batch = vision.batch()
    found = find_images(batch, FORM)
    after = found.next_positions(batch)
    for number, row in enumerate(vision.samples()):
        ids, grids = row["input_ids"][None], row["image_grid_thw"]
        own = found.positions[:, batch.offsets[number] : batch.offsets[number + 1]]
        if len(grids):
            wanted, delta = model.model.get_rope_index(ids, (ids == vision.IMAGE).int(), image_grid_thw=grids)
        else:
            wanted, delta = torch.arange(ids.shape[1]).expand(3, 1, -1), torch.zeros(1, 1)
        assert torch.equal(own, wanted[:, 0])
        assert int(after[number]) == ids.shape[1] + int(delta)
    assert not torch.equal(found.positions[1], found.positions[2])


def test_features_are_those_of_the_processor_and_the_encoder(model: Any) -> None:
    """From a picture, through transformers' image processor, and from uint8 patches, of which it makes the frames."""
    from PIL import Image
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    from roll_batching.modeling.vision import Qwen2_5_VLEncoder

    processor = Qwen2VLImageProcessorPil(
        patch_size=vision.PATCH, merge_size=vision.MERGE, temporal_patch_size=vision.FRAMES, min_pixels=64,
        max_pixels=4096,
    )  # fmt: skip
    noise = torch.randint(0, 256, (37, 51, 3), generator=torch.Generator().manual_seed(1), dtype=torch.uint8)
    picture = Image.fromarray(noise.numpy())
    plain = processor(picture, do_rescale=False, do_normalize=False, return_tensors="pt")
    whole = processor(picture, return_tensors="pt")
    grids = plain["image_grid_thw"]
    frames = plain["pixel_values"].view(-1, 3, vision.FRAMES, vision.PATCH**2)
    assert torch.equal(frames[:, :, 0], frames[:, :, 1])
    pixels = frames[:, :, 0].flatten(1)
    assert torch.equal(pixels, pixels.to(torch.uint8).to(pixels.dtype))
    encoder = Qwen2_5_VLEncoder(model.model.visual.config, CONFIG)
    encoder.load_state_dict(model.model.visual.state_dict())
    with torch.no_grad():
        wanted = model.model.visual(whole["pixel_values"], grid_thw=grids).pooler_output
        (found,) = encoder.encode(pixels.to(torch.uint8), grids)
    assert float((found - wanted).abs().max()) < 1e-5
    assert len(found) == int(grids.prod()) // vision.MERGE**2
    cast = encoder.to(torch.bfloat16)
    assert {buffer.dtype for _, buffer in cast.named_buffers()} == {torch.float32}


def changed(**fields: Any) -> Any:
    """The batch with other values of fields."""
    batch = vision.batch()
    return dataclasses.replace(batch, fields={**batch.fields, **fields})


def with_tokens(change: Any) -> Any:
    batch = vision.batch().without("response_mask")
    ids = batch["input_ids"].clone()
    change(ids, batch.offsets)
    return dataclasses.replace(batch, fields={**batch.fields, "input_ids": ids})


def set_token(sample: int, place: int, token: int) -> Any:
    """A batch with another token at a place of a sample; its ids are 0, 1, ..."""

    def change(ids: torch.Tensor, offsets: torch.Tensor) -> None:
        ids[offsets[sample] + place] = token

    return with_tokens(change)


def grids_of(number: int, *values: int) -> Any:
    grids = vision.batch()["image_grid_thw"].clone()
    grids[number] = torch.tensor(values)
    return changed(image_grid_thw=grids)


CASES = {
    "floats": (
        lambda: changed(pixel_values=vision.batch()["pixel_values"] / 255),
        "pixel_values has torch.float32",
    ),
    "width": (
        lambda: changed(pixel_values=vision.batch()["pixel_values"].repeat(1, 2)),
        r"give uint8 \[patches, 48\]",
    ),
    "one field": (lambda: vision.batch().without("image_grid_thw").without("images"), "image_grid_thw is missing"),
    "grid of floats": (
        lambda: changed(image_grid_thw=vision.batch()["image_grid_thw"].float()),
        "image_grid_thw has torch.float32",
    ),
    "video": (lambda: grids_of(0, 2, 4, 6), "image 1 of sample 1 has the grid .*videos are not supported"),
    "odd grid": (lambda: grids_of(2, 1, 1, 4), "image 2 of sample 2 has the grid .* multiples of 2"),
    "grid beside patches": (lambda: grids_of(0, 1, 4, 4), "sample 1 has 24 patches in image_patches, .* have 16"),
    "turned grid": (lambda: grids_of(0, 1, 12, 2), None),
    "shorter run": (
        lambda: set_token(1, 4, 7),
        "image 1 of sample 1 is 4 x 6 patches, which are 6 image tokens, and its run of token 57 has 5",
    ),
    "no run": (lambda: set_token(2, 18, 7), "sample 2 has 2 images and 1 runs of the image token 57"),
    "no image": (
        lambda: with_tokens(lambda ids, offsets: ids[:3].copy_(torch.tensor([59, 57, 60]))),
        r"sample 0 has image tokens \(57\) at position 1 and no image for them",
    ),
    "a video's token": (
        lambda: with_tokens(lambda ids, offsets: ids[:2].copy_(torch.tensor([59, 58]))),
        "sample 0 has a video",
    ),
    "a sampled image token": (lambda: set_token(0, 4, 57), None),
}


def test_sampled_image_tokens_are_text() -> None:
    """Those of `response_mask`, even between the tokens that begin and end an image."""
    batch = CASES["no image"][0]()
    mask = torch.zeros(batch.num_tokens, dtype=torch.bool)
    mask[1] = True
    sampled = batch.with_fields({"response_mask": mask}, {"response_mask": "token"})
    assert torch.equal(find_images(sampled, FORM).positions[:, :9], torch.arange(9).expand(3, -1))


def test_a_masked_sample_may_have_sampled_image_tokens() -> None:
    """`mask_overlong` clears the mask of responses that the loss skips; the job goes on."""
    from roll_batching.losses import mask_overlong

    batch = CASES["no image"][0]()
    mask = torch.zeros(batch.num_tokens, dtype=torch.bool)
    mask[1:4] = True
    sampled = batch.with_fields({"response_mask": mask}, {"response_mask": "token"})
    masked = mask_overlong(sampled, torch.arange(len(batch)) == 0)
    assert torch.equal(find_images(masked, FORM).positions, find_images(sampled, FORM).positions)


@pytest.mark.bad_input
@pytest.mark.parametrize("name", CASES)
def test_contradictions(name: str) -> None:
    make, message = CASES[name]
    if message is None:
        find_images(make(), FORM)
        return
    with pytest.raises(DataError, match=message):
        find_images(make(), FORM)


def test_text_batches_have_equal_axes() -> None:
    batch = vision.batch().select([0, 4])
    texts = batch.only(["input_ids", "response_mask"])
    for one in (batch, texts):
        found = find_images(one, FORM)
        assert torch.equal(found.positions, torch.cat([torch.arange(9), torch.arange(13)]).expand(3, -1))
    empty = batch.select([])
    assert find_images(empty, FORM).positions.shape == (3, 0)
    tokens = torch.zeros(4, dtype=torch.int64)
    real = torch.zeros(4, dtype=torch.bool)
    assert BatchImages(empty, CONFIG).inputs(tokens, real, torch.arange(4), torch.device("cpu")) == (None, None)


def test_a_pack_may_have_the_first_image_alone() -> None:
    batch = vision.batch()
    images = BatchImages(batch, CONFIG)
    first = int((images.tokens.image == 0).nonzero()[0])
    row = int((batch.offsets <= first).sum()) - 1
    source = torch.arange(int(batch.offsets[row]), int(batch.offsets[row + 1]))
    source = source[images.tokens.image[source] <= 0]
    _, of_pack = images.inputs(source, torch.ones_like(source).bool(), torch.arange(len(source)), torch.device("cpu"))
    assert of_pack is not None
