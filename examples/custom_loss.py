"""A custom loss on Megatron-Core: subclass the strategy and write `token_loss`.

python examples/custom_loss.py
torchrun --nproc-per-node 2 examples/custom_loss.py
"""

from __future__ import annotations

import torch

from roll_batching.jobs.config import WorkerConfig
from roll_batching.losses import LossOutput, TokenView
from roll_batching.samples import SampleBatch, distribute
from roll_batching.strategy import MegatronTrainStrategy

SHAPE = {"vocab_size": 64, "hidden_size": 32, "num_layers": 2, "num_attention_heads": 4, "ffn_hidden_size": 64}
SETTINGS = {
    "model_args": {"architecture": SHAPE},
    "training_args": {"learning_rate": 1e-2},
    "use_sequence_packing": True,
    "sequence_packing_args": {"max_packed_sequence_length_train": 256},
}


class FocalStrategy(MegatronTrainStrategy):
    """Focal loss, which weights improbable tokens (Lin et al. 2017, arXiv 1708.02002)."""

    masks = ("response_mask",)

    def token_loss(self, tokens: TokenView) -> LossOutput:
        hardness = (1 - tokens.log_probs.exp()) ** 2
        loss = tokens.mean(-hardness * tokens.log_probs)
        return LossOutput(loss, {"nll": tokens.mean_metric(-tokens.log_probs)})


def counting(seed: int) -> SampleBatch:
    """24 sequences of very different lengths that count upwards; the first token is the prompt."""
    g = torch.Generator().manual_seed(seed)
    lengths = torch.empty(24).log_normal_(3.0, 0.9, generator=g).clamp(2, 200).int().tolist()
    rows = [(torch.randint(64, (1,), generator=g) + torch.arange(n)) % 64 for n in lengths]
    masks = [torch.arange(n) > 0 for n in lengths]
    columns = {"input_ids": rows, "response_mask": masks}
    return SampleBatch.from_lists(columns, dict.fromkeys(columns, "token"))


def main() -> None:
    strategy = FocalStrategy(WorkerConfig.model_validate(SETTINGS))
    strategy.initialize()
    for step in range(20):
        batch = counting(step)
        mine = batch.select(list(range(strategy.layout.dp_rank, len(batch), strategy.layout.dp_size)))
        plan = strategy.plan(strategy.gather_table(mine))
        result = strategy.train_step(distribute(mine, plan), plan)
        if strategy.layout.dp_rank == 0:
            print(f"step {step:2}  loss {result.loss:.4f}  nll {result.metrics['nll']:.4f}")


if __name__ == "__main__":
    main()
