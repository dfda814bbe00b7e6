"""Tiny models of every family, made with `transformers`, and their reference results."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import torch

VOCABULARY = 61
_SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 5000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 4.0,
    "beta_slow": 0.5,
    "mscale": 0.7,
    "mscale_all_dim": 1.0,
}
_SIGMOID = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 4,
    "n_group": 4,
    "topk_group": 2,
    "n_shared_experts": 2,
    "routed_scaling_factor": 1.5,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 1,
    "num_mtp_layers": 0,
}
_LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
}
_DELTA_NETS = {
    "rms_norm_eps": 1e-3,  # products of queries and keys near zero are normalised, with their rounding
    "head_dim": 16,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e4,
        "partial_rotary_factor": 0.5,
        "mrope_section": [2, 1, 1],
        "mrope_interleaved": True,
    },
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 6,
}
_MAMBA = {
    "layer_norm_epsilon": 1e-3,
    "head_dim": 16,
    "mamba_num_heads": 8,
    "mamba_head_dim": 6,
    "n_groups": 4,
    "ssm_state_size": 10,
}
_UNGATED_EXPERTS = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 4,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 1.5,
    "moe_intermediate_size": 24,
    "moe_shared_expert_intermediate_size": 28,
}
_SHARED = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 32,
}
_VISION = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_heads": 2,
    "out_hidden_size": 32,
    "num_position_embeddings": 16,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama2": (
        "Llama",
        {"num_key_value_heads": 4, "rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}},
    ),
    "llama3": ("Llama", {"rope_parameters": _LLAMA3, "tie_word_embeddings": True}),
    "mistral": ("Mistral", {"head_dim": 16, "sliding_window": None}),
    "mistral_window": ("Mistral", {"sliding_window": 9}),
    "qwen2_window": ("Qwen2", {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 2}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "qwen3_moe": (
        "Qwen3Moe",
        {
            "head_dim": 16,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "mlp_only_layers": [1],
        },
    ),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "glm4_moe": (
        "Glm4Moe",
        {
            "head_dim": 16,
            "attention_bias": True,
            "use_qk_norm": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
            **_SIGMOID,
        },
    ),
    "minimax_m2": (
        "MiniMaxM2",
        {
            "head_dim": 16,
            "num_local_experts": 8,
            "num_experts_per_tok": 4,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
        },
    ),
    "gpt_oss": (
        "GptOss",
        {
            "head_dim": 16,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": 9,
            "swiglu_limit": 1.5,
            "rope_parameters": {**_YARN, "mscale": None, "mscale_all_dim": None, "truncate": False},
        },
    ),
    "deepseek_v3": ("DeepseekV3", {**_LATENT, **_SIGMOID, "rope_parameters": _YARN}),
    "deepseek_v3_small": (
        "DeepseekV3",
        {**_LATENT, **_SIGMOID, "q_lora_rank": None, "n_group": 1, "topk_group": 1, "rope_interleave": False},
    ),
    "gemma3": (
        "Gemma3Text",
        {
            "head_dim": 16,
            "query_pre_attn_scalar": 24,
            "pad_token_id": None,  # torch would give the embedding of this token no gradient
            "sliding_window": 9,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 4.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            },
        },
    ),
    "qwen3_next": (
        "Qwen3Next",
        {
            **_DELTA_NETS,
            **_SHARED,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25},
        },
    ),
    "qwen3_5": ("Qwen3_5Text", _DELTA_NETS),
    "qwen3_5_vision": ("Qwen3_5", {"text_config": _DELTA_NETS, "vision_config": _VISION}),
    "qwen3_5_moe": ("Qwen3_5MoeText", {**_DELTA_NETS, **_SHARED}),
    "qwen3_5_moe_vision": ("Qwen3_5Moe", {"text_config": {**_DELTA_NETS, **_SHARED}, "vision_config": _VISION}),
    "gemma3_vision": (
        "Gemma3",
        {
            "text_config": {"head_dim": 16, "sliding_window": 9, "pad_token_id": None},
            "vision_config": {
                "hidden_size": 16,
                "intermediate_size": 16,
                "num_hidden_layers": 1,
                "image_size": 8,
                "num_attention_heads": 2,
                "patch_size": 4,
            },
        },
    ),
    "nemotron_h": ("NemotronH", {**_MAMBA, "hybrid_override_pattern": "M-*-M*M-"}),
    "nemotron_h_moe": ("NemotronH", {**_MAMBA, **_UNGATED_EXPERTS, "hybrid_override_pattern": "ME*EMEM*"}),
    "nemotron_h_latent": (
        "NemotronH",
        {
            **_MAMBA,
            **_UNGATED_EXPERTS,
            "moe_latent_size": 20,
            "n_group": 1,
            "topk_group": 1,
            "layers_block_type": ["mamba", "moe", "attention", "moe"],
        },
    ),
    "qwen2_yarn": ("Qwen2", {"rope_parameters": {**_YARN, "mscale": None, "mscale_all_dim": None, "truncate": False}}),
}
"""By name: the prefix of the family's classes in transformers, and fields of its configuration beside `_SHAPE`."""
DENSE = (
    "llama2",
    "llama3",
    "mistral",
    "qwen2",
    "qwen3",
    "qwen2_yarn",
    "mistral_window",
    "qwen2_window",
    "gemma3",
    "qwen3_5",
)
EXPERTS = (
    "qwen3_moe",
    "mixtral",
    "glm4_moe",
    "minimax_m2",
    "deepseek_v3",
    "deepseek_v3_small",
    "gpt_oss",
    "qwen3_next",
    "qwen3_5_moe",
)
ZERO_CENTRED = ("Gemma3", "Qwen3Next", "Qwen3_5", "Qwen3_5Moe")
"""Models whose norms multiply by 1 + weight."""
UNSHARDED = ("gpt_oss",)
"""Models that are refused under tensor parallelism."""


def write_model(folder: Path, name: str, dtype: torch.dtype = torch.float32, model: Any = None, **saving: Any) -> Any:
    """Saves the model `name` with random weights in `folder` by `save_pretrained`; returns it in fp32.

    `model` is its entry of `MODELS` where it has none there.
    """
    import transformers

    prefix, beside = model or MODELS[name]
    fields, kind = {**_SHAPE, **beside, "eos_token_id": 5, "bos_token_id": 1}, "CausalLM"
    if prefix == "NemotronH":  # its layers and its epsilon have other names
        fields = {name: value for name, value in fields.items() if name not in ("num_hidden_layers", "rms_norm_eps")}
    if "text_config" in beside:  # beside a vision encoder
        text = {**_SHAPE, **beside["text_config"], "eos_token_id": 5, "bos_token_id": 1}
        fields, kind = {**beside, "text_config": text}, "ConditionalGeneration"
    config = getattr(transformers, f"{prefix}Config")(**fields)
    prefix = prefix.removesuffix("Text")
    model = getattr(transformers, f"{prefix}For{kind}")(config).to(dtype)
    generator = torch.Generator().manual_seed(len(name))
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            is_centred = prefix in ZERO_CENTRED and "linear_attn" not in key
            start = 1.0 if "norm" in key and not is_centred else 0.0
            values = torch.randn(parameter.shape, generator=generator) * 0.15 + start
            parameter.copy_(values)
        for key, buffer in model.named_buffers():
            if key.endswith("e_score_correction_bias"):  # of the size of differences between scores
                buffer.copy_(torch.randn(buffer.shape, generator=generator) * 0.15)
    model.save_pretrained(folder, **saving)
    return model.float().eval()


def edit_config(folder: Path, **changes: Any) -> None:
    """Changes fields of `config.json`; None takes one out."""
    file = folder / "config.json"
    config = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))


def rows() -> list[torch.Tensor]:
    """Ragged sequences, the shortest of one token."""
    generator = torch.Generator().manual_seed(9)
    return [torch.randint(0, VOCABULARY, (n,), generator=generator) for n in (1, 40, 7, 23, 12, 31, 2, 17)]


def log_probs(model: Any) -> list[torch.Tensor]:
    """Of each sequence's tokens given those before, from the second on, by transformers alone, row by row."""
    found = []
    for row in rows():
        logits = model(row[None]).logits[0, :-1].log_softmax(-1)
        found.append(logits.gather(1, row[1:, None])[:, 0])
    return found


def greedy(model: Any, new_tokens: int) -> list[list[int]]:
    """Each sequence continued greedily, by transformers alone."""
    found = []
    for row in rows():
        tokens = row.tolist()
        for _ in range(new_tokens):
            tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
        found.append(tokens)
    return found


def sft_losses(model: Any, steps: int, rate: float) -> list[float]:
    """Losses of `steps` AdamW steps over all tokens of `rows`, by transformers and torch."""
    model = copy.deepcopy(model)
    adam = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.0)
    losses = []
    for _ in range(steps):
        loss = -torch.cat(log_probs(model)).mean()
        adam.zero_grad()
        loss.backward()
        adam.step()
        losses.append(loss.item())
    return losses


def write_gradients(model: Any, folder: Path) -> None:
    """Saves the gradients of `sft_losses`' first loss, by transformers alone, in the places of the weights."""
    model = copy.deepcopy(model)
    (-torch.cat(log_probs(model)).mean()).backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
    model.save_pretrained(folder)


TEXT = "0123456789+-=;#abcdefghijklmnopqrstuvwxyz$. \n"
MARKED_TEMPLATE = (
    "{% for message in messages %}{{ '<' + message['role'][0] + '>' }}"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] + '$' }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '$' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<a>' }}{% endif %}"
)
PLAIN_TEMPLATE = MARKED_TEMPLATE.replace("{% generation %}", "").replace("{% endgeneration %}", "")


def write_tokenizer(folder: Path, template: str | None = PLAIN_TEMPLATE, text: str | None = None) -> Any:
    """A tokenizer of characters with three marks of roles, its end token `$`, and a chat template."""
    from tokenizers import Regex, Tokenizer
    from tokenizers.decoders import Fuse
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Split
    from transformers import PreTrainedTokenizerFast

    marks = ["<s>", "<u>", "<a>", "<?>"]
    fast = Tokenizer(WordLevel({token: n for n, token in enumerate([*(text or TEXT), *marks])}, unk_token="<?>"))
    fast.pre_tokenizer = Split(Regex("."), "isolated")
    fast.decoder = Fuse()
    fast.add_special_tokens(marks)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=fast, eos_token="$", pad_token=".", unk_token="<?>")
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return tokenizer
