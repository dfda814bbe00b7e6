"""Policy loss of one pack: one pass over all tokens, against a loop over sequences.

    python benchmarks/bench_loss.py --device cpu --check
    python benchmarks/bench_loss.py --device cuda --json bench_loss.json

All start from the same logits of the pack. The loop does in plain torch what ROLL's `loss_wrapper`
(megatron_strategy.py) and NeMo-RL's `SequencePackingLossWrapper` (algorithms/loss/wrapper.py) do: slice one sequence at
a time, call the loss on it, and read its metrics with `.item()`. A second loop slices with one `torch.split`. Memory is
the peak beyond the inputs, with gradients.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs in a checkout that is not installed

from roll_batching.known_warnings import hide_known_warnings

hide_known_warnings()  # before Megatron is imported, here and in the ranks

from benchmarks.measure import arguments, finish, peak_bytes, relative, seconds
from roll_batching.losses import PolicyLoss, TokenView, token_log_probs
from roll_batching.losses.denominators import local_counts
from roll_batching.packing.batch import PackedBatch, pack_step
from roll_batching.planning import Plan, PlanConstraints
from roll_batching.samples import SampleBatch

SEQUENCES = 64
SIZES = {"cpu": (2048, 32_768), "cuda": (16_384, 151_936)}
CLIP_LOW, CLIP_HIGH, KL, ENTROPY = 0.2, 0.28, 0.05, 0.01


def make_pack(tokens: int, vocabulary: int, device: str) -> tuple[PackedBatch, Any]:
    """Pack of 64 sequences with lognormal lengths and about `tokens` tokens, and the counts of the step."""
    draw = np.random.default_rng(0)
    shares = draw.lognormal(0.0, 0.7, SEQUENCES)
    lengths = np.maximum(4, (shares * tokens / shares.sum()).astype(np.int64))
    g = torch.Generator().manual_seed(0)
    total = int(lengths.sum())
    level = -math.log(vocabulary) - 0.5  # log-probs of random logits are near this
    positions = np.arange(total) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    prompt = positions < np.repeat(lengths // 4, lengths)
    batch = SampleBatch(
        torch.arange(SEQUENCES),
        torch.from_numpy(lengths),
        {
            "input_ids": torch.randint(vocabulary, (total,), generator=g),
            "response_mask": torch.from_numpy(~prompt),
            "advantages": torch.randn(SEQUENCES, generator=g),
            "old_log_probs": level + 0.3 * torch.randn(total, generator=g),
            "ref_log_probs": level + 0.3 * torch.randn(total, generator=g),
        },
        {
            "input_ids": "token",
            "response_mask": "token",
            "advantages": "sample",
            "old_log_probs": "next_token",
            "ref_log_probs": "next_token",
        },
    )
    plan = Plan.from_bins([[list(range(SEQUENCES))]], lengths, PlanConstraints(dp_size=1, max_tokens=total))
    packs = pack_step(batch, plan, dp_rank=0, device=torch.device(device), masks=("response_mask",))
    return packs[0], local_counts(batch, ("response_mask",))


def vectorised(logits: torch.Tensor, pack: PackedBatch, counts: Any) -> torch.Tensor:
    loss = PolicyLoss(clip_low=CLIP_LOW, clip_high=CLIP_HIGH, kl_coef=KL, entropy_coef=ENTROPY)
    log_probs, entropy = token_log_probs(logits, pack.labels, rows=pack.head_tokens, entropy=True)
    output = loss.token_loss(TokenView(pack, counts, log_probs=log_probs, entropy=entropy))
    output.loss.backward()
    metrics = [x for m in output.metrics.values() for x in vars(m).values()]
    torch.stack([x.double() for x in metrics]).tolist()
    return output.loss.detach()


def looped(logits: torch.Tensor, pack: PackedBatch, counts: Any, *, split: bool) -> torch.Tensor:
    lengths = pack.layout.lengths.tolist()
    fields, mask = pack.fields, pack.masks["response_mask"]
    total_tokens = counts.tokens["response_mask"]
    pieces = logits.split(lengths) if split else None
    losses, metrics, start = [], [], 0
    for i, length in enumerate(lengths):
        at = slice(start, start + length)
        start += length
        log_p = (pieces[i] if pieces is not None else logits[at]).float().log_softmax(-1)
        log_probs = log_p.gather(1, pack.labels[at, None])[:, 0]
        entropy = -(log_p.exp() * log_p).sum(-1)
        keep, advantage = mask[at].float(), fields["advantages"][i]
        ratio = (log_probs - fields["old_log_probs"][at]).exp()
        clipped = ratio.clamp(1 - CLIP_LOW, 1 + CLIP_HIGH)
        gain = torch.minimum(ratio * advantage, clipped * advantage)
        gap = fields["ref_log_probs"][at] - log_probs
        divergence = (gap.exp() - 1 - gap).clamp(max=PolicyLoss().kl_bound)
        loss = ((-gain + KL * divergence - ENTROPY * entropy) * keep).sum() / total_tokens
        losses.append(loss)
        metrics.append(
            {
                "loss": loss.item(),
                "entropy": (entropy * keep).sum().item(),
                "clip_fraction": ((ratio != clipped) * keep).sum().item(),
                "ratio_max": (ratio * keep).max().item(),
                "ref_kl": (divergence * keep).sum().item(),
                "tokens": keep.sum().item(),
            }
        )
    total = torch.stack(losses).sum()
    total.backward()
    return total.detach()


def main() -> None:
    given = arguments(__doc__)
    tokens, vocabulary = SIZES[given.device]
    tokens, vocabulary = given.tokens or tokens, given.vocabulary or vocabulary
    cases = []
    for dtype in (torch.float32, torch.bfloat16):
        pack, counts = make_pack(tokens, vocabulary, given.device)
        g = torch.Generator(given.device).manual_seed(1)
        size = pack.layout.tokens, vocabulary
        logits = torch.randn(size, generator=g, device=given.device).to(dtype).requires_grad_()

        def run(what: str, logits: torch.Tensor = logits, pack: Any = pack, counts: Any = counts) -> torch.Tensor:
            logits.grad = None
            if what == "one pass":
                return vectorised(logits, pack, counts)
            return looped(logits, pack, counts, split=what == "loop on split")

        runs = {name: lambda name=name: run(name) for name in ("one pass", "loop", "loop on split")}
        results = {}
        for name, call in runs.items():
            loss = call()
            results[name] = loss, logits.grad
        peak = {}
        for name, call in runs.items():
            logits.grad = None
            peak[name] = peak_bytes(call, given.device)
        took = seconds(runs, given.device, given.rounds)
        one, loop = results["one pass"], results["loop"]
        difference = relative([x for x in one if x is not None], [x for x in loop if x is not None])
        figures = {f"{name} seconds": value for name, value in took.items()}
        figures |= {f"{name} peak MiB": value / 2**20 for name, value in peak.items()}
        limits = {
            "time of the loop": [took["one pass"] / took["loop"], 1 / 5],
            "memory of the loop": [peak["one pass"] / peak["loop"], 1 / 4],
            "time of the loop on split": [took["one pass"] / took["loop on split"], 1.0],
        }
        if dtype is torch.float32:
            limits["loss and gradient difference"] = [difference, 1e-5]
        else:
            figures["loss and gradient difference"] = difference
        name = f"{SEQUENCES} sequences, {str(dtype).removeprefix('torch.')}, {pack.layout.tokens} x {vocabulary}"
        cases.append({"case": name, "figures": figures, "limits": limits})
    finish(given, cases)


if __name__ == "__main__":
    main()
