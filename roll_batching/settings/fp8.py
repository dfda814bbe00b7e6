"""FP8 training: recipes of TransformerEngine, the alignment that they need, and what they exclude. Needs no torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

TOKEN_MULTIPLES = {"tensorwise": 16, "mxfp8": 32, "blockwise": 128}
"""Multiple of the tokens that one rank holds, by recipe.

FP8 matrix products of cuBLAS take multiples of 16 (tensorwise scales). Scales per block need whole blocks, of 32 values
(mxfp8) and of 128 (blockwise), in the shard of a rank too: TransformerEngine quantises it before the all-gather of
sequence parallelism. The same numbers as in NeMo-RL (`_get_pack_sequence_parameters_for_megatron`).
"""
WEIGHT_MULTIPLES = {"tensorwise": 16, "mxfp8": 32, "blockwise": 16}
"""Multiple of the rows and columns of a rank's shard of a weight, by recipe."""
OLDEST_DEVICE = {"tensorwise": (8, 9), "blockwise": (9, 0), "mxfp8": (10, 0)}
"""Lowest compute capability by recipe: Ada, Hopper, Blackwell."""
CUDA_OF_BLOCKWISE = (12, 9)
"""Oldest CUDA whose cuBLAS has products with scales per block of 128."""
DEVICE_NAMES = {(8, 9): "Ada", (9, 0): "Hopper", (10, 0): "Blackwell"}
NO_HISTORY = (
    "delayed is not supported: it scales by the largest values of earlier passes, so that a pass of log-probs and the "
    "training pass after it differ, and checkpoints would have to hold that history; set tensorwise, blockwise or mxfp8"
)


def token_multiple(fp8: str | None, recipe: Any) -> int:
    """Multiple of the tokens that one rank holds; 1 without FP8. `recipe`: a name, or Megatron's `Fp8Recipe`."""
    return 1 if not fp8 else TOKEN_MULTIPLES.get(getattr(recipe, "value", recipe), 1)


def idle_options(megatron: Any) -> Iterator[tuple[str, str]]:
    """(key, problem) of the FP8 keys of a `MegatronConfig` that nothing reads."""
    for key in ("fp8_recipe", "first_last_layers_bf16"):
        if getattr(megatron, key) and megatron.fp8 is None:
            yield key, "is read with fp8: e4m3 or hybrid only; set that, or leave it out"
    for key in ("num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16"):
        if getattr(megatron, key) != 1 and not megatron.first_last_layers_bf16:
            yield key, "is read with first_last_layers_bf16: true only; set that, or leave it out"


def fp8_problems(megatron: Any, architecture: Any) -> Iterator[tuple[str, str]]:
    """(key, problem) of the FP8 keys of a `MegatronConfig`, and of the model that it trains, if known.

    `settings/support.py` has the features that FP8 excludes.
    """
    yield from idle_options(megatron)
    if megatron.fp8 is None:
        return
    if megatron.fp8_recipe is None:
        yield "fp8_recipe", "is missing: fp8 needs it; set tensorwise, blockwise (Hopper) or mxfp8 (Blackwell)"
    elif megatron.fp8_recipe == "delayed":
        yield "fp8_recipe", NO_HISTORY
    if architecture is None:
        return
    if megatron.first_last_layers_bf16:
        yield from _bf16_layers(megatron, architecture.num_layers)
    multiple = WEIGHT_MULTIPLES.get(str(megatron.fp8_recipe))
    if multiple is not None:
        for name, width in _shard_widths(megatron, architecture).items():
            if width % multiple:
                text = f"{megatron.fp8_recipe} takes weights whose sides are multiples of {multiple}, and {name} is"
                yield "fp8_recipe", f"{text} {width} on a rank; lower tensor_model_parallel_size, or train in bf16"


def _bf16_layers(megatron: Any, layers: int) -> Iterator[tuple[str, str]]:
    # Megatron's own limit (TransformerConfig): a stage of equal size.
    most = layers // megatron.pipeline_model_parallel_size
    counts = {key: getattr(megatron, key) for key in ("num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16")}
    for key, count in counts.items():
        if count > most:
            text = f"is {count}, above the {most} layers of a pipeline stage ({layers} layers, PP"
            yield key, f"{text} {megatron.pipeline_model_parallel_size}); lower it"
    if sum(counts.values()) >= layers:
        text = f"leaves none of {layers} layers in FP8 ({' + '.join(map(str, counts.values()))} in bf16)"
        yield "first_last_layers_bf16", f"{text}; lower these numbers, or leave fp8 out"


def _shard_widths(megatron: Any, model: Any) -> dict[str, int]:
    """Rows or columns of the weight shards of a tensor-parallel rank, by name; 0 where TP does not divide them."""
    tp = megatron.tensor_model_parallel_size
    heads, groups = model.num_attention_heads, model.kv_heads
    widths = {"hidden_size": model.hidden_size}
    latent, delta = model.multi_latent_attention, model.gated_delta_net
    if latent is not None:
        down = latent.kv_lora_rank + latent.qk_pos_emb_head_dim
        widths["kv_lora_rank"] = latent.kv_lora_rank
        widths["kv_lora_rank + qk_pos_emb_head_dim"] = down // tp if down % tp == 0 else 0
        widths["q_lora_rank"] = (latent.q_lora_rank or 0) // tp
        widths["the width of queries"] = heads // tp * model.head_dim
        widths["the width of keys and values"] = heads // tp * (latent.qk_head_dim + latent.v_head_dim)
        widths["the width of heads"] = heads // tp * latent.v_head_dim
    elif heads % tp == 0 and groups % tp == 0:
        widths["the width of queries, keys and values"] = (heads + 2 * groups) // tp * model.head_dim
        widths["the width of heads"] = heads // tp * model.head_dim
    if delta is not None and delta.num_key_heads % tp == 0:
        keys, values = delta.num_key_heads * delta.key_head_dim, delta.num_value_heads * delta.value_head_dim
        widths["the width of gated delta nets' inputs"] = 2 * (keys + values + delta.num_value_heads) // tp
        widths["the width of gated delta nets' outputs"] = values // tp
    moe = model.moe
    if moe is None or moe.layer_freq != 1:
        widths["ffn_hidden_size"] = model.ffn_width // tp
    if moe is not None:
        widths["the experts' ffn_hidden_size"] = (moe.ffn_hidden_size or model.ffn_width) // tp
        if moe.shared_expert_ffn_hidden_size:
            widths["the shared expert's ffn_hidden_size"] = moe.shared_expert_ffn_hidden_size // tp
    return widths


def fp8_layers(megatron: Any, layers: range, num_layers: int) -> int:
    """Number of layers among the indices `layers`, of a model with `num_layers` layers, that compute in FP8."""
    if megatron.fp8 is None:
        return 0
    if not megatron.first_last_layers_bf16:
        return len(layers)
    first, last = megatron.num_layers_at_start_in_bf16, num_layers - megatron.num_layers_at_end_in_bf16
    return sum(first <= index < last for index in layers)


def device_problems(recipe: str, compute_capability: tuple[int, int] | None, cuda: str | None) -> list[str]:
    """Why a CUDA device, and torch built for the version `cuda`, cannot compute `recipe`; empty if they can."""
    problems = []
    oldest = OLDEST_DEVICE[recipe]
    if compute_capability is not None and compute_capability < oldest:
        this = ".".join(map(str, compute_capability))
        text = f"fp8_recipe: {recipe} needs compute capability {'.'.join(map(str, oldest))} ({DEVICE_NAMES[oldest]})"
        able = [name for name, least in OLDEST_DEVICE.items() if compute_capability >= least]
        cure = f"set fp8_recipe: {' or '.join(able)}" if able else "leave fp8 out"
        problems.append(f"{text} or later, this GPU has {this}: {cure}")
    if recipe == "mxfp8" and compute_capability is not None and compute_capability >= (12, 0):
        text = f"fp8_recipe: mxfp8 is not computed by TransformerEngine on compute capability {compute_capability[0]}"
        problems.append(f"{text}.x: set fp8_recipe: tensorwise or blockwise")
    if recipe == "blockwise" and cuda is not None and _version(cuda) < CUDA_OF_BLOCKWISE:
        text = f"fp8_recipe: blockwise needs CUDA 12.9 or later, this torch is built for {cuda}"
        problems.append(f"{text}: install another torch, or set fp8_recipe: tensorwise")
    return problems


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(".")[:2])
