"""Requests with the images of prompts, and replies with the experts of a response's tokens.

Both engines return the experts of every token that they computed, in every layer of the model, dense ones included.
The last sampled token is not computed. Sources: SGLang's `return_routed_experts` (base64 of int32 in
`meta_info.routed_experts`), and `CompletionResponseChoice` of vLLM's `entrypoints/openai/completion/protocol.py`
(base64 of an .npy file). Images are sent as PNG files of their resized pixels, with one token per image.
"""

from __future__ import annotations

import base64
import binascii
import io
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from roll_batching.jobs.config import JobConfig
from roll_batching.jobs.engines.protocol import GenerationResult, MalformedReply, Mixture, PromptImages
from roll_batching.samples import SampleBatch
from roll_batching.samples.fields import EXPERTS_SPEC, GRIDS, PIXELS, ROUTED_EXPERTS

_UNSET = -1
"""Stands for the experts of a token whose experts are not known: its router chooses."""
_OPTION = "Start the server with --enable-return-routed-experts"


def mixture_of(config: JobConfig) -> Mixture | None:
    """The mixture whose experts the sampler must return; None without `router_replay: {mode: R3}`."""
    model = config.actor_train.model_args.architecture
    if config.actor_train.router_replay.mode != "R3" or model is None or model.moe is None:
        return None
    return Mixture(
        num_layers=model.num_layers,
        layers=tuple(layer for layer in range(model.num_layers) if model.moe.is_mixture(layer)),
        top_k=model.moe.router_topk,
        num_experts=model.moe.num_experts,
    )


def decode_int32(text: Any) -> np.ndarray:
    """Decodes base64 of int32 to a flat array. Raises MalformedReply for other text, or a part of a number."""
    data = _decode(text)
    if len(data) % 4:
        raise MalformedReply(f"its routed_experts has {len(data)} bytes, and int32 has 4 each")
    return np.frombuffer(data, dtype="<i4")


def decode_npy(text: Any) -> np.ndarray:
    """The array in base64 of an .npy file. Raises MalformedReply."""
    data = _decode(text)
    try:
        # Not np.load, which also reads zip archives, and returns no array then.
        return np.lib.format.read_array(io.BytesIO(data), allow_pickle=False)  # type: ignore[no-any-return]
    except Exception as error:  # malformed headers raise many errors, MemoryError and those of tokenize among them
        raise MalformedReply(f"its routed_experts is no array: {error}") from None


def _decode(text: Any) -> bytes:
    if text is None:
        raise MalformedReply(f"it has no routed_experts, which router_replay: R3 needs. {_OPTION}")
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError, TypeError) as error:
        raise MalformedReply(f"its routed_experts is not base64: {error}") from None


def checked_experts(raw: np.ndarray, mixture: Mixture, prompt_tokens: int, result: GenerationResult) -> np.ndarray:
    """Checks `raw`; returns experts of prompt and response, int16 `[tokens, layers with experts, top-k]`.

    The last token, which was not computed, gets -1.

    `raw` has the experts of all tokens but the last, flat or `[tokens - 1, layers, top-k]`. Raises MalformedReply for
    another shape, for experts that the model does not have, and for a token with an expert twice.
    """
    tokens = prompt_tokens + len(result.tokens)
    shape = (tokens - 1, mixture.num_layers, mixture.top_k)
    if raw.dtype.kind not in "iu" or raw.size != np.prod(shape) or (raw.ndim > 1 and raw.shape != shape):
        raise MalformedReply(
            f"its routed_experts has the shape {list(raw.shape)} of {raw.dtype}, not {list(shape)} of integers: "
            f"{tokens} tokens but the last, which was sampled and not computed; all {mixture.num_layers} layers; "
            f"{mixture.top_k} experts each"
        )
    experts = raw.reshape(shape)[:, list(mixture.layers)].astype(np.int64)
    wrong = (experts < 0) | (experts >= mixture.num_experts)
    if wrong.any():
        token, layer, choice = (int(index[0]) for index in wrong.nonzero())
        raise MalformedReply(
            f"its routed_experts sends token {token} to expert {experts[token, layer, choice]} in layer "
            f"{mixture.layers[layer]}, and the model has 0 to {mixture.num_experts - 1}"
        )
    ordered = np.sort(experts, axis=-1)  # equal experts of a token become neighbours
    twice = (ordered[..., 1:] == ordered[..., :-1]).any(-1)
    if twice.any():
        token, layer = (int(index[0]) for index in twice.nonzero())
        raise MalformedReply(
            f"its routed_experts sends token {token} twice to one expert in layer {mixture.layers[layer]}: "
            f"{experts[token, layer].tolist()}. Zeros are experts that the server did not record"
        )
    last = np.full((1, *experts.shape[1:]), _UNSET)
    return np.concatenate([experts, last]).astype(np.int16)


def with_experts(batch: SampleBatch, results: Sequence[GenerationResult], mixture: Mixture) -> SampleBatch:
    """`batch`, the samples of `results` in their order, with the token field `routed_experts`.

    Requests asked for experts, so that every result has those of its tokens (`checked_experts`).
    """
    parts = [result.experts for result in results if result.experts is not None]
    empty = np.zeros((0, len(mixture.layers), mixture.top_k), dtype=np.int16)
    field = torch.from_numpy(np.concatenate([empty, *parts]))
    return batch.with_fields({ROUTED_EXPERTS: field}, {ROUTED_EXPERTS: EXPERTS_SPEC})


# ---- prompt images


def images_of_prompts(prompts: SampleBatch, vision: Any) -> list[PromptImages | None]:
    """The images of each prompt, None for a prompt without images; `vision` is the model's `VisionConfig`.

    The images are resized already. An engine keeps that size if its own limits of pixels allow it.
    """
    if PIXELS not in prompts:
        return [None] * len(prompts)
    columns = (prompts.to_lists(name) for name in ("input_ids", PIXELS, GRIDS))
    return [
        _images(tokens.tolist(), pixels.cpu().numpy(), grids.tolist(), vision) if len(grids) else None
        for tokens, pixels, grids in zip(*columns, strict=True)
    ]


def _images(tokens: list[int], pixels: np.ndarray, grids: Sequence[Sequence[int]], vision: Any) -> PromptImages:
    """Images of one prompt; `pixels` has the patches of all images, `grids` (time, height, width) of each."""
    is_image = [token == vision.image_token_id for token in tokens]
    # A server takes one token per image: of each run of image tokens keep the first.
    shorter = [token for index, token in enumerate(tokens) if not (is_image[index] and index and is_image[index - 1])]
    data, start = [], 0
    for _, height, width in grids:
        rows = pixels[start : start + height * width]
        data.append(_png(picture_of(rows, height, width, vision.patch_size, vision.spatial_merge_size)))
        start += height * width
    return PromptImages(tokens=shorter, data=tuple(data))


def picture_of(patches: np.ndarray, height: int, width: int, patch: int, merge: int) -> np.ndarray:
    """Pixels, uint8 `[y, x, 3]`, of an image of `height * width` patches in the order of `pixel_values`."""
    # Patches come in blocks of merge x merge; each patch is (channel, row, column).
    blocks = patches.reshape(height // merge, width // merge, merge, merge, 3, patch, patch)
    return blocks.transpose(0, 2, 5, 1, 3, 6, 4).reshape(height * patch, width * patch, 3)


def _png(pixels: np.ndarray) -> str:
    """The image as a data: URL."""
    from PIL import Image

    buffer = io.BytesIO()
    Image.fromarray(np.ascontiguousarray(pixels)).save(buffer, "PNG", compress_level=1)
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"
