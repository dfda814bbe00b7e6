"""The same loss and gradients by other means: stock Megatron attention and RoPE, one unpacked sequence at a time.

Nothing of roll_batching's packing, attention, head, views or losses is used: whole logits, `log_softmax`, plain
formulas, autograd.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from roll_batching.megatron_patches.layers import define_router_gemm
from roll_batching.samples import SampleBatch
from tests.support.models import ARCHITECTURE, fill, global_name


def stock_model(architecture: dict[str, Any] | None = None, **options: Any) -> Any:
    """A GPTModel as Megatron's own local spec builds it, with its own rotary embedding."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.transformer_config import TransformerConfig

    if options.get("num_moe_experts"):
        define_router_gemm()
    a = {"tie_word_embeddings": False, "qk_layernorm": False, "add_qkv_bias": False, **(architecture or ARCHITECTURE)}
    config = TransformerConfig(
        num_layers=a["num_layers"],
        hidden_size=a["hidden_size"],
        ffn_hidden_size=a["ffn_hidden_size"],
        num_attention_heads=a["num_attention_heads"],
        num_query_groups=a.get("num_query_groups", a["num_attention_heads"]),
        qk_layernorm=a["qk_layernorm"],
        add_qkv_bias=a["add_qkv_bias"],
        normalization="RMSNorm",
        layernorm_epsilon=a["norm_epsilon"],
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
        bias_dropout_fusion=False,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        **options,
    )
    spec = get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts,
        moe_grouped_gemm=False,
        qk_layernorm=a["qk_layernorm"],
        normalization="RMSNorm",
    )
    model = GPTModel(
        config,
        spec,
        vocab_size=a["vocab_size"],
        max_sequence_length=a["max_position_embeddings"],
        position_embedding_type="rope",
        rotary_base=int(a.get("rotary_base", 10000)),
        parallel_output=True,
        share_embeddings_and_output_weights=a["tie_word_embeddings"],
    )
    fill([model], a["vocab_size"])
    return model


def sequence_statistics(
    model: Any, tokens: torch.Tensor, temperature: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """(log-prob of token i + 1, entropy) for rows 0..L-2 of one sequence, [L - 1] each."""
    length = len(tokens)
    hidden_from = torch.ones(1, 1, length, length).triu(1).bool()
    logits = model(tokens[None], torch.arange(length)[None], hidden_from)[0, :-1]
    log_probs = (logits / temperature).log_softmax(-1)
    return log_probs.gather(1, tokens[1:, None])[:, 0], -(log_probs.exp() * log_probs).sum(-1)


def policy_loss(
    model: Any,
    batch: SampleBatch,
    *,
    clip: tuple[float, float],
    kl: float,
    entropy: float,
    absolute: bool = False,
) -> torch.Tensor:
    """Token mean over the batch of the clipped policy gradient, with KL (k3) and entropy terms.

    `absolute`: of the terms' absolute values, the size on which rounding of the loss depends.
    """
    fields = {name: batch.to_lists(name) for name in batch.schema}
    total, count = torch.zeros(()), 0
    for i in range(len(batch)):
        mask = fields["response_mask"][i][1:].bool()
        count += int(mask.sum())
        # Also a sample that predicts nothing is run: routers add their losses over all tokens.
        log_probs, entropies = sequence_statistics(model, fields["input_ids"][i])
        ratio = (log_probs - fields["old_log_probs"][i][:-1]).exp()
        advantage = fields["advantages"][i]
        gain = torch.min(ratio * advantage, ratio.clip(1 - clip[0], 1 + clip[1]) * advantage)
        gap = fields["ref_log_probs"][i][:-1] - log_probs
        per_token = -gain + kl * (gap.exp() - 1 - gap) - entropy * entropies
        total = total + (per_token.abs() if absolute else per_token)[mask].sum()
    return total / max(count, 1)


def gradients(model: Any, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    """Gradient of every parameter by global name."""
    parameters = dict(model.named_parameters())
    if not loss.requires_grad:  # no token counts
        return {global_name(model, name): torch.zeros_like(p) for name, p in parameters.items()}
    found = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
    return {
        global_name(model, name): torch.zeros_like(p) if g is None else g
        for (name, p), g in zip(parameters.items(), found, strict=True)
    }
