"""Log-probs and entropies, forward and backward, against a plain implementation: time, memory, gradients.

    python benchmarks/bench_logprob.py --device cpu --check
    python benchmarks/bench_logprob.py --device cuda --json bench_logprob.json

The plain implementation computes all logits in fp32, `log_softmax`, a gather for the log-prob, and -sum(p log p) for
the entropy. Memory is the peak beyond the inputs and their gradients, which both implementations need.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs in a checkout that is not installed

from roll_batching.known_warnings import hide_known_warnings

hide_known_warnings()  # before Megatron is imported, here and in the ranks

from benchmarks.measure import arguments, finish, peak_bytes, relative, seconds
from roll_batching.losses import token_log_probs

VOCABULARY = 151_936
TOKENS = {"cpu": 1024, "cuda": 8192}
HIDDEN = {"cpu": 512, "cuda": 4096}
PROMPT_SHARE = 0.4
SAME = 1e-5

Statistics = tuple[torch.Tensor, torch.Tensor]


def plain(logits: torch.Tensor, labels: torch.Tensor) -> Statistics:
    log_p = logits.float().log_softmax(-1)
    entropy = -(log_p.exp() * log_p).sum(-1)
    return log_p.gather(1, labels[:, None])[:, 0], entropy


def ours(logits: torch.Tensor, labels: torch.Tensor) -> Statistics:
    return token_log_probs(logits, labels, entropy=True)  # type: ignore[return-value]


def step(
    statistics: Callable[[], Statistics], leaves: list[torch.Tensor], weights: tuple[torch.Tensor, torch.Tensor]
) -> tuple[torch.Tensor, ...]:
    """Gradients of a weighted sum of log-probs and entropies with respect to the leaves."""
    log_probs, entropies = statistics()
    return torch.autograd.grad((log_probs * weights[0]).sum() + (entropies * weights[1]).sum(), leaves)


def compare(
    name: str,
    paths: dict[str, Callable[[], Statistics]],
    leaves: list[torch.Tensor],
    weights: tuple[torch.Tensor, torch.Tensor],
    device: str,
    rounds: int,
    limits: dict[str, float],
) -> dict[str, Any]:
    runs = {path: lambda f=f: step(f, leaves, weights) for path, f in paths.items()}
    gradients = sum(leaf.nbytes for leaf in leaves)
    peak = {path: peak_bytes(run, device) for path, run in runs.items()}
    extra = {path: max(value - gradients, 0) for path, value in peak.items()}
    took = seconds(runs, device, rounds)
    figures = {
        **{f"{path} seconds": took[path] for path in runs},
        **{f"{path} extra MiB": extra[path] / 2**20 for path in runs},
    }
    kept = {
        "time": [took["ours"] / took["plain"], limits["time"]],
        "memory": [extra["ours"] / extra["plain"], limits["memory"]],
    }
    if leaves[0].dtype is torch.float32:
        kept["gradient difference"] = [relative(runs["ours"](), runs["plain"]()), SAME]
    else:
        figures["gradient difference"] = relative(runs["ours"](), runs["plain"]())
    return {"case": name, "figures": figures, "limits": kept}


def from_logits(tokens: int, vocabulary: int, dtype: torch.dtype, device: str, rounds: int) -> dict[str, Any]:
    g = torch.Generator(device).manual_seed(0)
    logits = (2 * torch.randn(tokens, vocabulary, generator=g, device=device)).to(dtype).requires_grad_()
    labels = torch.randint(vocabulary, (tokens,), generator=g, device=device)
    weights = torch.randn(tokens, generator=g, device=device), torch.randn(tokens, generator=g, device=device)
    paths = {"plain": lambda: plain(logits, labels), "ours": lambda: ours(logits, labels)}
    name = f"logits given, {str(dtype).removeprefix('torch.')}, {tokens} x {vocabulary}"
    return compare(name, paths, [logits], weights, device, rounds, {"time": 0.35, "memory": 0.05})


def from_hidden(
    tokens: int, vocabulary: int, hidden: int, dtype: torch.dtype, device: str, rounds: int, prompt: float
) -> dict[str, Any]:
    g = torch.Generator(device).manual_seed(0)
    rows = torch.randn(tokens, hidden, generator=g, device=device).to(dtype).requires_grad_()
    head = (torch.randn(vocabulary, hidden, generator=g, device=device) * 2 / hidden**0.5).to(dtype).requires_grad_()
    labels = torch.randint(vocabulary, (tokens,), generator=g, device=device)
    counted = (torch.rand(tokens, generator=g, device=device) >= prompt).float()
    weights = tuple(torch.randn(tokens, generator=g, device=device) * counted for _ in range(2))
    wanted = counted.nonzero()[:, 0] if prompt else None  # made when packing, on the host

    paths = {
        "plain": lambda: plain(F.linear(rows, head), labels),
        "ours": lambda: token_log_probs(rows, labels, weight=head, rows=wanted, entropy=True),
    }
    name = f"from hidden {hidden}, {str(dtype).removeprefix('torch.')}, {tokens} x {vocabulary}"
    name += f", {prompt:.0%} prompt" if prompt else ""
    limits = {"time": 1.0 if prompt else 1.5, "memory": 0.1}
    return compare(name, paths, [rows, head], weights, device, rounds, limits)  # type: ignore[arg-type]


def main() -> None:
    given = arguments(__doc__)
    tokens, vocabulary = given.tokens or TOKENS[given.device], given.vocabulary or VOCABULARY
    where = given.device, given.rounds
    cases = [from_logits(tokens, vocabulary, dtype, *where) for dtype in (torch.float32, torch.bfloat16)]
    for dtype in (torch.float32, torch.bfloat16):
        for prompt in (0.0, PROMPT_SHARE):
            cases.append(from_hidden(tokens, vocabulary, HIDDEN[given.device], dtype, *where, prompt))
    finish(given, cases)


if __name__ == "__main__":
    main()
