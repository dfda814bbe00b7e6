"""A custom training loop on Ray: the driver has the samples, the ranks of the policy are actors.

    python examples/ray_driver.py                                # the driver; TP 2 x DP 2 = four actors
    torchrun --nproc-per-node 4 examples/ray_driver.py           # the same steps without a driver

Both print bitwise equal losses. Needs `pip install 'roll-batching[megatron,ray]'`.
"""

from __future__ import annotations

import os

import torch

from roll_batching.jobs.config import WorkerConfig
from roll_batching.losses import PolicyLoss
from roll_batching.samples import SampleBatch

RANKS, STEPS = 4, 3
POLICY = WorkerConfig.model_validate(
    {
        "model_args": {
            "architecture": {
                "vocab_size": 64, "hidden_size": 32, "num_layers": 2, "num_attention_heads": 4, "ffn_hidden_size": 64,
            }
        },
        "training_args": {"learning_rate": 1e-2},
        "strategy_args": {"strategy_config": {"tensor_model_parallel_size": 2}},
        "use_sequence_packing": True,
        "sequence_packing_args": {"max_packed_sequence_length_train": 96},
    }
)  # fmt: skip


def rollouts(step: int) -> SampleBatch:
    """Replace with your engine: five prompts, and four responses of very different lengths to each."""
    g = torch.Generator().manual_seed(step)
    prompts = [torch.randint(64, (24,), generator=g) for _ in range(5)]
    lengths = torch.empty(20).log_normal_(2.8, 0.9, generator=g).clamp(2, 66).int().tolist()
    responses = [torch.randint(64, (n,), generator=g) for n in lengths]
    return SampleBatch.from_lists(
        {
            "input_ids": [torch.cat([prompts[i // 4], response]) for i, response in enumerate(responses)],
            "response_mask": [torch.arange(24 + n) >= 24 for n in lengths],
        },
        {"input_ids": "token", "response_mask": "token"},
        ids=1000 * step + torch.randperm(20, generator=g),
    )


def advantages(batch: SampleBatch) -> torch.Tensor:
    """Replace with your rewards: here the share of even tokens, normalized. One number per token."""
    good = torch.stack([(tokens % 2 == 0).float().mean() for tokens in batch.to_lists("input_ids")])
    return torch.repeat_interleave((good - good.mean()) / good.std(), batch.lengths)


def drive() -> None:
    """The loop on Ray."""
    import ray

    from roll_batching.jobs.driver.group import WorkerGroup

    # Or ray.init("auto"): the running Ray.
    ray.init("local", num_cpus=RANKS, object_store_memory=200_000_000, logging_level="error")
    with WorkerGroup(POLICY, RANKS, seed=5) as policy:
        for step in range(STEPS):
            batch = rollouts(step)
            shared = policy.distribute(batch)  # stores each replica's samples once in the object store
            shared = policy.with_log_probs(shared, "old_log_probs", masks=["response_mask"])  # stay there
            shared = policy.with_fields(shared, {"advantages": advantages(batch)}, {"advantages": "token"})
            result = policy.train_step(shared, PolicyLoss())
            norm, shared_tokens = result.grad_norm.hex(), shared.plan.report.shared_tokens
            print(f"step {step}: loss {result.loss.hex()}, gradient norm {norm}, {shared_tokens} shared", flush=True)
            if step == STEPS - 1:
                log_probs = policy.compute_log_probs(shared)  # in the order of `batch`
                assert torch.equal(log_probs.ids, batch.ids)
                print(f"log-prob of its samples: {log_probs['log_probs'].sum().item().hex()}")


def run_rank() -> None:
    """The same loop without a driver: every rank has the batch and takes its share by the plan."""
    from roll_batching.samples import LengthTable, collect, find_shared_prefixes
    from roll_batching.strategy import MegatronTrainStrategy

    policy = MegatronTrainStrategy(POLICY, seed=5)
    policy.initialize()
    for step in range(STEPS):
        batch = rollouts(step)
        plan = policy.plan(find_shared_prefixes(batch, LengthTable.of(batch)))
        full = batch.with_fields({"advantages": advantages(batch)}, {"advantages": "token"})
        local = plan.shard(full, policy.layout.dp_rank)
        old = policy.compute_log_probs(local, plan, ["response_mask"])["log_probs"]
        local = local.with_fields({"old_log_probs": old}, {"old_log_probs": "next_token"})
        result = policy.train_step(local, plan, PolicyLoss())
        if policy.layout.dp_rank == policy.layout.tp_rank == 0:
            norm, shared_tokens = result.grad_norm.hex(), plan.report.shared_tokens
            print(f"step {step}: loss {result.loss.hex()}, gradient norm {norm}, {shared_tokens} shared", flush=True)
        if step == STEPS - 1:
            local_batch = batch if policy.layout.dp_rank == 0 else batch.select([])
            log_probs = collect(policy.compute_log_probs(local, plan), plan, like=local_batch)
            if policy.layout.dp_rank == policy.layout.tp_rank == 0:
                print(f"log-prob of its samples: {log_probs['log_probs'].sum().item().hex()}")


if __name__ == "__main__":
    run_rank() if "RANK" in os.environ else drive()
