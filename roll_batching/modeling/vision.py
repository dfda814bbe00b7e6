"""Vision-language models: outputs of a vision encoder replace the embeddings of image tokens.

The encoders are transformers' own. Every rank of the first pipeline stage has its encoder whole, and encodes the images
of which it holds tokens. Qwen3-VL's also gives outputs of inner layers, which are added to the hidden states of image
tokens behind the first layers of the text model (DeepStack, arXiv 2406.04334). These layers are in the first chunk.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLVisionConfig
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VisionTransformerPretrainedModel
from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLVisionConfig
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionModel

from roll_batching.packing.extra_inputs import ImageInputs
from roll_batching.settings import ArchitectureConfig, MegatronConfig
from roll_batching.settings.model_parts import VisionConfig


class VisionEncoder(torch.nn.Module):
    """Base of transformers' encoders that take pixels in the form in which samples have them (uint8)."""

    def __init__(self, config: Any, vision: VisionConfig) -> None:
        super().__init__(config)  # type: ignore[call-arg]  # of transformers' class, the next base
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

    def encode(self, pixels: torch.Tensor, grids: torch.Tensor) -> list[torch.Tensor]:
        """Features of images, in the order of the images: the encoder's outputs, then those of inner layers.

        Each is [tokens, hidden size of the text model].

        Args:
            pixels: [patches, 3 * patch_size ** 2] uint8.
            grids: [images, 3] int64.
        """
        values = (pixels.view(len(pixels), 3, -1).float() * (1 / 255) - self.image_mean) / self.image_std
        frames = values[:, :, None].expand(-1, -1, self.frames, -1).reshape(len(pixels), -1)
        output = self(frames, grids)
        return [output.pooler_output, *getattr(output, "deepstack_features", ())]


class Qwen2_5_VLEncoder(VisionEncoder, Qwen2_5_VisionTransformerPretrainedModel):  # type: ignore[misc]
    """The encoder of Qwen2.5-VL."""


class Qwen3VLEncoder(VisionEncoder, Qwen3VLVisionModel):  # type: ignore[misc]
    """The encoder of Qwen3-VL."""


ENCODERS: dict[str, type[VisionEncoder]] = {"qwen2_5_vl": Qwen2_5_VLEncoder, "qwen3_vl": Qwen3VLEncoder}
"""Classes of encoders by `VisionConfig.type`."""


class DeepStack:
    """Features of inner layers of the encoder, for the image tokens of one forward pass.

    Recomputed layers run their backward pass on their own, before that of the encoder, whose graph they must not enter.
    So the layers add constants here, and leave their gradients for `enter`, whose backward pass comes last.

    Args:
        places: [n] int64, image tokens by their index in [tokens of this rank * rows].
        features: one [n, hidden] for each of the first layers of the text model.
    """

    def __init__(self, places: torch.Tensor, features: Sequence[torch.Tensor]) -> None:
        self.places, self._features = places, list(features)
        self.constants = [each.detach() for each in features]
        self.gradients: list[torch.Tensor | None] = [None] * len(features)

    def enter(self, embedded: torch.Tensor) -> torch.Tensor:
        """The embeddings [s, b, hidden] unchanged; their backward pass hands the features their gradients."""
        features, self._features = self._features, []
        entered: torch.Tensor = _EnterDeepStack.apply(embedded, self, *features)  # type: ignore[no-untyped-call]
        return entered

    def add(self, hidden: torch.Tensor, layer: int) -> torch.Tensor:
        """Hidden states [s, b, hidden] behind `layer` with its features added."""
        added: torch.Tensor = _AddFeatures.apply(hidden, self, layer)  # type: ignore[no-untyped-call]
        return added


class _EnterDeepStack(torch.autograd.Function):
    """The first argument unchanged; its backward pass returns the gradients that `_AddFeatures` left."""

    @staticmethod
    def forward(ctx: Any, embedded: torch.Tensor, stack: DeepStack, *features: torch.Tensor) -> torch.Tensor:
        ctx.stack = stack
        return embedded.view_as(embedded)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        stack: DeepStack = ctx.stack
        left, stack.gradients = stack.gradients, []
        return gradients[0], None, *left


class _AddFeatures(torch.autograd.Function):
    """Adds features to the rows of image tokens, and keeps their gradients in the `DeepStack`."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, stack: DeepStack, layer: int) -> torch.Tensor:
        ctx.stack, ctx.layer = stack, layer
        added = hidden.clone(memory_format=torch.contiguous_format)  # no view: a pipeline frees outputs that it sent
        added.view(-1, hidden.shape[-1]).index_add_(0, stack.places, stack.constants[layer].to(hidden.dtype))
        return added

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        (gradient,), stack = gradients, ctx.stack
        rows = gradient.reshape(-1, gradient.shape[-1])[stack.places]
        stack.gradients[ctx.layer] = rows.to(stack.constants[ctx.layer].dtype)
        return gradient, None, None


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
            encoder.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]  # transformers'
        for index in range(len(getattr(encoder.config, "deepstack_visual_indexes", ()))):
            self.decoder.layers[index].register_forward_hook(_add_deepstack(index), with_kwargs=True)

    def _preprocess(self, *arguments: Any, **keywords: Any) -> Any:
        embedded, *rest = super()._preprocess(*arguments, **keywords)
        return self._insert(embedded, keywords.get("packed_seq_params")), *rest

    def _insert(self, embedded: torch.Tensor, params: Any) -> torch.Tensor:
        """Embeddings [s, b, h] with the encoder's outputs in the places of image tokens; sets `params.deepstack`."""
        images: ImageInputs | None = getattr(params, "images", None)
        trained = [parameter for parameter in self.visual.parameters() if parameter.requires_grad]
        if images is None:
            if trained and self._overlaps and torch.is_grad_enabled():
                embedded = _WithZeroGradients.apply(embedded, *trained)  # type: ignore[no-untyped-call]
            return embedded
        with torch.set_grad_enabled(bool(trained) and torch.is_grad_enabled()):
            features, *inner = (each[images.features] for each in self.visual.encode(images.pixels, images.grids))
        flat = embedded.reshape(-1, embedded.shape[-1])
        embedded = flat.index_put((images.places,), features.to(flat.dtype)).view_as(embedded)
        if inner:
            params.deepstack = DeepStack(images.places, inner)
            embedded = params.deepstack.enter(embedded)
        return embedded


def _add_deepstack(index: int) -> Any:
    """Forward hook of a layer of the text model: adds the features that belong behind it."""

    def add(layer: Any, arguments: Any, keywords: dict[str, Any], output: Any) -> Any:
        stack: DeepStack | None = getattr(keywords.get("packed_seq_params"), "deepstack", None)
        if stack is None:
            return output
        hidden, *rest = output
        return stack.add(hidden, index), *rest

    return add


def vision_options(
    architecture: ArchitectureConfig, strategy: MegatronConfig, dtype: torch.dtype, seed: int
) -> dict[str, Any]:
    """Arguments of `VisionLanguageModel` that GPTModel does not have; the encoder has random weights on the host."""
    vision = architecture.vision
    assert vision is not None
    sizes: dict[str, Any] = {
        "depth": vision.depth,
        "hidden_size": vision.hidden_size,
        "intermediate_size": vision.intermediate_size,
        "num_heads": vision.num_heads,
        "patch_size": vision.patch_size,
        "temporal_patch_size": vision.temporal_patch_size,
        "spatial_merge_size": vision.spatial_merge_size,
        "out_hidden_size": architecture.hidden_size,
        "initializer_range": architecture.init_std,
    }
    config: Any
    if vision.type == "qwen2_5_vl":
        config = Qwen2_5_VLVisionConfig(
            **sizes, window_size=vision.window_size, fullatt_block_indexes=list(vision.fullatt_block_indexes)
        )
    else:
        config = Qwen3VLVisionConfig(
            **sizes,
            num_position_embeddings=vision.num_position_embeddings,
            deepstack_visual_indexes=list(vision.deepstack_visual_indexes),
        )
    has_flash = torch.cuda.is_available() and importlib.util.find_spec("flash_attn") is not None
    config._attn_implementation = "flash_attention_2" if has_flash and dtype is torch.bfloat16 else "sdpa"
    with torch.random.fork_rng([]):  # the same weights on all ranks of the stage
        torch.manual_seed(seed)
        encoder = ENCODERS[vision.type](config, vision)
    return {"encoder": encoder, "overlaps": strategy.overlap_grad_reduce}
