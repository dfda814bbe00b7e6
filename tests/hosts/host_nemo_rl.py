"""NeMo-RL's `ClippedPGLossFn` and `megatron_forward_backward`, as its Megatron worker calls them."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

PER_TOKEN = True
"""NeMo-RL trains with `calculate_per_token_loss`."""

VARIANTS = {
    "defaults": {},
    "dual clip, importance sampling": {"ratio_clip_c": 3.0, "use_importance_sampling_correction": True},
    "GSPO": {"token_level_loss": False, "sequence_level_importance_ratios": True},
}


def temperature(variant: str, fields: dict[str, torch.Tensor]) -> float:
    return 0.8 if variant == "GSPO" else 1.0


def _loss(variant: str) -> Any:
    from nemo_rl.algorithms.loss.loss_functions import ClippedPGLossConfig, ClippedPGLossFn

    return ClippedPGLossFn(ClippedPGLossConfig(**VARIANTS[variant]))


def _data(fields: dict[str, torch.Tensor]) -> Any:
    """NeMo-RL's batch: a column of a token speaks of the token itself."""
    from nemo_rl.distributed.batched_data_dict import BatchedDataDict

    def wide(values: torch.Tensor) -> torch.Tensor:
        return F.pad(values, (1, 0))

    return BatchedDataDict(
        {
            "input_ids": fields["input_ids"],
            "input_lengths": fields["lengths"],
            "advantages": wide(fields["advantages"]),
            "prev_logprobs": wide(fields["old"]),
            "generation_logprobs": wide(fields["gen"]),
            "reference_policy_logprobs": wide(fields["ref"]),
            "token_mask": fields["response_mask"].float(),
            "sample_mask": torch.ones(len(fields["input_ids"])),
        }
    )


def _counts(fields: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {
        "global_valid_seqs": torch.tensor(float(len(fields["input_ids"]))),
        "global_valid_toks": fields["response_mask"][:, 1:].sum().float(),
    }


def plain_loss(variant: str, fields: dict[str, torch.Tensor], log_probs: torch.Tensor, entropy: torch.Tensor) -> Any:
    return _loss(variant)(next_token_logprobs=log_probs, data=_data(fields), **_counts(fields))[0]


class Entrance:
    """`megatron_forward_backward` with NeMo-RL's own post-processing, on micro-batches of two rows."""

    def __init__(self, strategy: Any, variant: str, cap: int, max_cp_size: int) -> None:
        import nemo_rl.models.megatron.train as host
        from nemo_rl.algorithms.logits_sampling_utils import TrainingSamplingParams

        import roll_batching.integrations.nemo_rl_worker  # noqa: F401  the line under test

        self.host, self.strategy = host, strategy
        self.sampling = TrainingSamplingParams(temperature=temperature(variant, {}))
        packing = {"train_mb_tokens": cap, "logprob_mb_tokens": cap + 16}
        self.cfg = {"sequence_packing": {"enabled": True, "max_cp_size": max_cp_size, **packing}}
        self.loss = _loss(variant)

    def _pass(self, own: dict[str, torch.Tensor], after: Any, **options: Any) -> Any:
        from nemo_rl.models.megatron.data import ProcessedMicrobatch

        data = _data(own)
        parts = [data.select_indices(list(range(i, min(i + 2, data.size)))) for i in range(0, data.size, 2)]
        empty = dict.fromkeys(ProcessedMicrobatch.__dataclass_fields__)
        chunks = list(self.strategy.chunks)
        return self.host.megatron_forward_backward(
            model=chunks[0] if len(chunks) == 1 else chunks,
            data_iterator=iter([ProcessedMicrobatch(**{**empty, "data_dict": part}) for part in parts]),
            num_microbatches=len(parts),
            seq_length=own["input_ids"].shape[1],
            mbs=1,
            post_processing_fn=after,
            sampling_params=self.sampling,
            **options,
        )

    def log_probs(self, own: dict[str, torch.Tensor]) -> torch.Tensor | None:
        after = self.host.LogprobsPostProcessor(cfg=self.cfg, sampling_params=self.sampling)
        results = self._pass(own, after, forward_only=True)
        return torch.cat([one["logprobs"] for one in results])[:, 1:] if results else None

    def train(self, own: dict[str, torch.Tensor], fields: dict[str, torch.Tensor]) -> float:
        after = self.host.LossPostProcessor(loss_fn=self.loss, cfg=self.cfg, num_microbatches=7)
        results = self._pass(own, after, **_counts(fields))
        return float(sum(one["loss"] for one in results))
