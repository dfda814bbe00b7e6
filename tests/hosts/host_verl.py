"""verl's `ppo_loss` and its Megatron engine's passes, as its workers call them."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import torch

PER_TOKEN = False

VARIANTS = {
    "token-mean": {},
    "seq-mean-token-mean": {"loss_agg_mode": "seq-mean-token-mean"},
    "temperature per sample": {"loss_agg_mode": "seq-mean-token-sum"},
}


def temperature(variant: str, fields: dict[str, torch.Tensor]) -> Any:
    return fields["temperature"] if variant == "temperature per sample" else 1.0


def _config(variant: str) -> Any:
    from verl.workers.config import McoreActorConfig

    return McoreActorConfig(
        strategy="megatron", rollout_n=1, ppo_micro_batch_size_per_gpu=1, use_kl_loss=True, entropy_coeff=0.01,
        clip_ratio_high=0.28, **VARIANTS[variant],
    )  # fmt: skip


def _jagged(rows: list[torch.Tensor]) -> torch.Tensor:
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)


def _data(fields: dict[str, torch.Tensor], variant: str, samples: int, **others: Any) -> Any:
    """verl's batch of jagged rows: whole rows of ids, and fields of the response."""
    from tensordict import TensorDict
    from verl.utils import tensordict_utils as tu

    lengths, prompts = fields["lengths"].tolist(), fields["prompts"].tolist()
    rows = [row[:length] for row, length in zip(fields["input_ids"], lengths, strict=True)]

    def tails(values: torch.Tensor) -> list[torch.Tensor]:
        return [row[p - 1 : n - 1] for row, p, n in zip(values, prompts, lengths, strict=True)]

    masks = [torch.ones(len(row), dtype=torch.int64) for row in tails(fields["old"])]
    tensors = {
        "input_ids": _jagged(rows),
        "prompts": _jagged([row[:p] for row, p in zip(rows, prompts, strict=True)]),
        "responses": _jagged([row[p:] for row, p in zip(rows, prompts, strict=True)]),
        "response_mask": _jagged(masks),
        "loss_mask": _jagged(masks),
        "old_log_probs": _jagged(tails(fields["old"])),
        "ref_log_prob": _jagged(tails(fields["ref"])),
        "advantages": _jagged(tails(fields["advantages"])),
    }
    if variant == "temperature per sample":
        tensors["temperature"] = fields["temperature"]
    else:
        others["temperature"] = 1.0
    data = TensorDict(tensors, batch_size=[len(rows)])
    tu.assign_non_tensor(data, global_batch_size=samples, **others)
    return data


def plain_loss(variant: str, fields: dict[str, torch.Tensor], log_probs: torch.Tensor, entropy: torch.Tensor) -> Any:
    from verl.workers.utils.losses import ppo_loss

    mask = fields["response_mask"][:, 1:]
    data = _data(fields, variant, len(mask), batch_num_tokens=int(mask.sum()), dp_size=1)

    def whole_rows(values: torch.Tensor) -> torch.Tensor:
        pairs = zip(values * mask, fields["lengths"].tolist(), strict=True)
        return _jagged([torch.cat([row[: n - 1], row.new_zeros(1)]) for row, n in pairs])

    output = {"log_probs": whole_rows(log_probs), "entropy": whole_rows(entropy)}
    return ppo_loss(_config(variant), output, data)[0]


class Entrance:
    """verl's `MegatronEngineWithLMHead`, whose model is ours to give: building one needs CUDA."""

    def __init__(self, strategy: Any, variant: str, cap: int, max_cp_size: int) -> None:
        from verl.workers.engine.megatron.transformer_impl import MegatronEngineWithLMHead

        from roll_batching.integrations import verl_engine  # the line under test

        self.engine = object.__new__(MegatronEngineWithLMHead)
        self.engine.module = list(strategy.chunks)
        self.engine.tf_config = None
        self.engine.model_config = SimpleNamespace(mtp=SimpleNamespace(enable=False))
        self.engine.engine_config = SimpleNamespace(
            context_parallel_size=strategy.layout.cp_size, use_fused_kernels=False, dynamic_context_parallel=False,
            forward_only=False,
            max_seqlen_per_dp_cp_rank=cap // max_cp_size,
        )  # fmt: skip
        if max_cp_size > 1:  # as `initialize_engine` leaves it
            verl_engine._WITH_CP_SIZES.add(self.engine)
        self.variant, self.cap, self.strategy = variant, cap // strategy.layout.cp_size, strategy
        self.dp_size = strategy.layout.dp_size

    def log_probs(self, own: dict[str, torch.Tensor]) -> torch.Tensor | None:
        width = own["input_ids"].shape[1]
        data = _data(own, self.variant, 1, max_token_len_per_gpu=self.cap, calculate_entropy=True)
        answer = self.engine.infer_batch(data)
        if not answer:
            return None
        rows = answer["model_output"]["log_probs"].unbind()
        return torch.stack([torch.cat([row[:-1], row.new_zeros(width - len(row))]) for row in rows])

    def train(self, own: dict[str, torch.Tensor], fields: dict[str, torch.Tensor]) -> float:
        from verl.workers.utils.losses import ppo_loss

        options = {"max_token_len_per_gpu": self.cap, "calculate_entropy": True}
        data = _data(own, self.variant, len(fields["input_ids"]), **options)
        answer = self.engine.forward_backward_batch(data, partial(ppo_loss, _config(self.variant)))
        return sum(answer.get("loss", [])) / self.dp_size
