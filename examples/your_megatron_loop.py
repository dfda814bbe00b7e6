"""A short Megatron training loop: without roll-batching, then with it.

    python examples/your_megatron_loop.py
    torchrun --nproc-per-node 2 examples/your_megatron_loop.py

Both train the same weights on the same samples and print the same losses; the second computes no padding.
"""

from __future__ import annotations

import os

from roll_batching.known_warnings import hide_known_warnings

hide_known_warnings()  # before Megatron is imported: it warns of GPU libraries that a laptop lacks

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.transformer_config import TransformerConfig

import roll_batching as rb

STEPS, SAMPLES, LONGEST, VOCABULARY = 3, 8, 48, 64


def build(packed: bool) -> tuple[DistributedDataParallel, object]:
    """The user's own model and optimizer."""
    model_parallel_cuda_manual_seed(1)
    torch.manual_seed(1)
    cuda = torch.cuda.is_available()
    dtype = torch.bfloat16 if cuda else torch.float32
    config = TransformerConfig(
        num_layers=2, hidden_size=64, num_attention_heads=4, normalization="RMSNorm", gated_linear_unit=True,
        activation_func=F.silu, add_bias_linear=False, hidden_dropout=0.0, attention_dropout=0.0,
        use_cpu_initialization=not cuda, params_dtype=dtype, bf16=cuda, gradient_accumulation_fusion=False,
        masked_softmax_fusion=False, bias_dropout_fusion=False, bias_activation_fusion=False, apply_rope_fusion=False,
    )  # fmt: skip
    # Megatron's local attention refuses packs, this spec takes them. Megatron's spec for TransformerEngine does too.
    spec = rb.packed_layer_spec(config) if packed else get_gpt_layer_local_spec(normalization="RMSNorm")
    model = GPTModel(config, spec, vocab_size=VOCABULARY, max_sequence_length=LONGEST, position_embedding_type="rope")
    ddp = DistributedDataParallel(config, DistributedDataParallelConfig(), model)
    config.finalize_model_grads_func = finalize_model_grads
    return ddp, get_megatron_optimizer(OptimizerConfig(lr=1e-3, params_dtype=dtype, bf16=cuda), [ddp])


def samples(step: int) -> list[torch.Tensor]:
    """This rank's sequences of a step, of very different lengths."""
    g = torch.Generator().manual_seed(100 * step + parallel_state.get_data_parallel_rank())
    lengths = torch.randint(2, LONGEST + 1, (SAMPLES,), generator=g).tolist()
    return [torch.randint(0, VOCABULARY, (n,), generator=g) for n in lengths]


def ordinary_loop() -> list[float]:
    """Pad every sample to the largest length, one micro-batch each."""
    model, optimizer = build(packed=False)
    device = torch.cuda.current_device()
    losses = []

    def forward_step(iterator, model):
        row = next(iterator)
        tokens = F.pad(row, (0, LONGEST - len(row))).to(device)[None]
        output = model(tokens, torch.arange(LONGEST, device=device)[None], None, labels=tokens.roll(-1, 1))

        def loss_func(loss):
            total = loss[0, : len(row) - 1].float().mean()
            return total, {"loss": total.detach().clone()}

        return output, loss_func

    for step in range(STEPS):
        model.zero_grad_buffer()
        optimizer.zero_grad()
        logs = get_forward_backward_func()(
            forward_step_func=forward_step, data_iterator=iter(samples(step)), model=model, num_microbatches=SAMPLES,
            micro_batch_size=1, seq_length=LONGEST,
        )  # fmt: skip
        optimizer.step()
        mean = torch.stack([log["loss"] for log in logs]).mean()
        torch.distributed.all_reduce(mean, torch.distributed.ReduceOp.SUM)
        losses.append(float(mean) / torch.distributed.get_world_size())
    return losses


def packed_loop() -> list[float]:
    """Train the same with packing and balancing."""
    model, optimizer = build(packed=True)
    # --- roll-batching from here
    batching = rb.BatchingSpec(mode="packed", max_tokens=96)
    strategy = rb.MegatronTrainStrategy.from_parts(
        [model], optimizer, rb.BatchingConfig(train=batching, infer=batching)
    )
    loss = rb.SFTLoss(aggregation="sequence_mean")  # as in the loop above: the mean of per-sample means
    losses, rank = [], parallel_state.get_data_parallel_rank()
    for step in range(STEPS):
        rows = samples(step)
        fields = {"input_ids": rows, "response_mask": [torch.ones_like(row) for row in rows]}
        kinds = {"input_ids": "token", "response_mask": "token"}
        batch = rb.SampleBatch.from_lists(fields, kinds, ids=torch.arange(SAMPLES) + rank * SAMPLES)
        plan = strategy.plan(strategy.gather_table(batch))
        losses.append(strategy.train_step(rb.distribute(batch, plan), plan, loss).loss)
    # --- to here
    return losses


def main() -> None:
    """Run both loops and compare their losses."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    rb.start_processes()  # torch.distributed; without CUDA also the patches that let Megatron run on the CPU
    parallel_state.initialize_model_parallel()
    ordinary, packed = ordinary_loop(), packed_loop()
    if torch.distributed.get_rank() == 0:
        for step, (a, b) in enumerate(zip(ordinary, packed, strict=True)):
            print(f"step {step}: ordinary loop {a:.6f}, with roll-batching {b:.6f}")
    torch.testing.assert_close(packed, ordinary, rtol=2e-2 if torch.cuda.is_available() else 1e-5, atol=0)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
