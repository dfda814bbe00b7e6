"""Vision-language models: outputs of a vision encoder replace the embeddings of image tokens.

The encoder is transformers' own, for Qwen2.5-VL. Every rank of the first pipeline stage has it whole, and encodes the
images of which it holds tokens.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLVisionConfig
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VisionTransformerPretrainedModel

from roll_batching.packing.extra_inputs import ImageInputs
from roll_batching.settings import ArchitectureConfig, MegatronConfig
from roll_batching.settings.model_parts import VisionConfig


class VisionEncoder(Qwen2_5_VisionTransformerPretrainedModel):  # type: ignore[misc]
    """transformers' encoder, which takes pixels in the form in which samples have them (uint8)."""

    def __init__(self, config: Any, vision: VisionConfig) -> None:
        super().__init__(config)
        self.frames = vision.temporal_patch_size
        self.image_mean: torch.Tensor
        self.image_std: torch.Tensor
        self.register_buffer("image_mean", torch.tensor(vision.image_mean)[:, None], persistent=False)
        self.register_buffer("image_std", torch.tensor(vision.image_std)[:, None], persistent=False)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        # Buffers are constants (frequencies of RoPE, mean and deviation of pixels): a cast to bf16 would round them.
        before = {name: buffer for name, buffer in self.named_buffers() if buffer.is_floating_point()}
        super()._apply(fn, recurse)
        for name, buffer in before.items():
            owner, _, key = name.rpartition(".")
            module = self.get_submodule(owner)
            cast = getattr(module, key)
            if cast.dtype.itemsize < buffer.dtype.itemsize:
                setattr(module, key, buffer.to(cast.device))
        return self

    def encode(self, pixels: torch.Tensor, grids: torch.Tensor) -> torch.Tensor:
        """Features [tokens, hidden size of the text model] of images, in the order of the images.

        Args:
            pixels: [patches, 3 * patch_size ** 2] uint8.
            grids: [images, 3] int64.
        """
        values = (pixels.view(len(pixels), 3, -1).float() * (1 / 255) - self.image_mean) / self.image_std
        frames = values[:, :, None].expand(-1, -1, self.frames, -1).reshape(len(pixels), -1)
        features: torch.Tensor = self(frames, grids).pooler_output
        return features


class _WithZeroGradients(torch.autograd.Function):
    """The first argument unchanged; the others, parameters, get gradients of zeros."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, *parameters: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(*parameters)
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return gradients[0], *(torch.zeros_like(parameter) for parameter in ctx.saved_tensors)


class VisionLanguageModel(GPTModel):
    """The first chunk of a model with a vision encoder.

    Args:
        encoder: the encoder.
        overlaps: whether gradients are reduced during the backward pass, which waits for all parameters.
        arguments: those of GPTModel.
    """

    def __init__(self, *arguments: Any, encoder: VisionEncoder, overlaps: bool, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self.visual, self._overlaps = encoder, overlaps
        is_sharded = self.config.sequence_parallel
        for parameter in encoder.parameters():
            # Tensor-parallel ranks have gradients of their own tokens with sequence parallelism, which Megatron adds
            # up; else equal ones up to the order of sums in CUDA's kernels, which it averages (gloo has no averages).
            parameter.sequence_parallel = is_sharded  # type: ignore[attr-defined]
            if not is_sharded and torch.cuda.is_available():
                parameter.average_gradients_across_tp_domain = True  # type: ignore[attr-defined]
        if self.config.recompute_granularity == "full":
            encoder.gradient_checkpointing_enable({"use_reentrant": False})

    def _preprocess(self, *arguments: Any, **keywords: Any) -> Any:
        embedded, *rest = super()._preprocess(*arguments, **keywords)
        return self._insert(embedded, getattr(keywords.get("packed_seq_params"), "images", None)), *rest

    def _insert(self, embedded: torch.Tensor, images: ImageInputs | None) -> torch.Tensor:
        """Embeddings [s, b, h] with the encoder's outputs in the places of image tokens."""
        trained = [parameter for parameter in self.visual.parameters() if parameter.requires_grad]
        if images is None:
            if trained and self._overlaps and torch.is_grad_enabled():
                embedded = _WithZeroGradients.apply(embedded, *trained)  # type: ignore[no-untyped-call]
            return embedded
        with torch.set_grad_enabled(bool(trained) and torch.is_grad_enabled()):
            features = self.visual.encode(images.pixels, images.grids)[images.features]
        flat = embedded.reshape(-1, embedded.shape[-1])
        return flat.index_put((images.places,), features.to(flat.dtype)).view_as(embedded)


def vision_options(
    architecture: ArchitectureConfig, strategy: MegatronConfig, dtype: torch.dtype, seed: int
) -> dict[str, Any]:
    """Arguments of `VisionLanguageModel` that GPTModel does not have; the encoder has random weights on the host."""
    vision = architecture.vision
    assert vision is not None
    config = Qwen2_5_VLVisionConfig(
        depth=vision.depth,
        hidden_size=vision.hidden_size,
        intermediate_size=vision.intermediate_size,
        num_heads=vision.num_heads,
        patch_size=vision.patch_size,
        temporal_patch_size=vision.temporal_patch_size,
        spatial_merge_size=vision.spatial_merge_size,
        window_size=vision.window_size,
        fullatt_block_indexes=list(vision.fullatt_block_indexes),
        out_hidden_size=architecture.hidden_size,
        initializer_range=architecture.init_std,
    )
    has_flash = torch.cuda.is_available() and importlib.util.find_spec("flash_attn") is not None
    config._attn_implementation = "flash_attention_2" if has_flash and dtype is torch.bfloat16 else "sdpa"
    with torch.random.fork_rng([]):  # the same weights on all ranks of the stage
        torch.manual_seed(seed)
        encoder = VisionEncoder(config, vision)
    return {"encoder": encoder, "overlaps": strategy.overlap_grad_reduce}
