"""Generated tokens per second: ours and transformers', with the same random weights and prompts."""

from __future__ import annotations

import gc
import importlib.util
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from benchmarks.bench_step import WORKLOADS, Workload
from roll_batching.jobs.config import WorkerConfig
from roll_batching.samples import SampleBatch
from roll_batching.strategy import MegatronInferStrategy
from roll_batching.strategy.sampling import GenerationSettings

ROWS = (16, 64)
"""Numbers of prompts that are answered at once."""


def run(device: torch.device, dry: bool) -> Iterator[dict[str, Any]]:
    """Greedy responses of a fixed length: a case for each number of prompts."""
    if importlib.util.find_spec("transformers") is None:
        raise SystemExit("transformers is not installed: pip install 'roll-batching[hf]'")
    load, new_tokens = (WORKLOADS["tiny"], 8) if dry else (WORKLOADS["qwen3-1.7b"], 256)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    batches = {rows: prompts_of(load, rows) for rows in ROWS}
    with tempfile.TemporaryDirectory() as folder:
        write_model(load, folder, dtype)
        ours = by_strategy(folder, batches, new_tokens, device)
        gc.collect()  # the strategy's weights, before those of transformers
        theirs = by_transformers(folder, batches, new_tokens, device)
    for rows, batch in batches.items():
        (seconds, tokens), (their_seconds, their_tokens) = ours[rows], theirs[rows]
        yield {
            "case": f"{rows} prompts of {batch.num_tokens / rows:.0f} tokens on average, {new_tokens} new tokens each",
            "figures": {
                "tokens/s": rows * new_tokens / seconds,
                "tokens/s of transformers": rows * new_tokens / their_seconds,
                "share of equal tokens": float((tokens == their_tokens).float().mean()),
            },
            "limits": {},
        }


def write_model(load: Workload, folder: str, dtype: torch.dtype) -> None:
    """Write a Qwen3 model directory of the workload's shape with random weights."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    shape = load.architecture
    config = Qwen3Config(
        vocab_size=shape["vocab_size"],
        hidden_size=shape["hidden_size"],
        intermediate_size=shape["ffn_hidden_size"],
        num_hidden_layers=shape["num_layers"],
        num_attention_heads=shape["num_attention_heads"],
        num_key_value_heads=shape["num_query_groups"],
        head_dim=shape["kv_channels"],
        max_position_embeddings=2 * load.longest,
        tie_word_embeddings=shape["tie_word_embeddings"],
        rope_theta=shape["rotary_base"],
    )
    torch.manual_seed(0)
    Qwen3ForCausalLM(config).to(dtype).save_pretrained(folder)


def prompts_of(load: Workload, rows: int) -> SampleBatch:
    """Random prompts with a fifth of the workload's lengths."""
    lengths = torch.from_numpy(load.draw(np.random.default_rng(0), rows) // 5 + 1)
    tokens = torch.randint(load.architecture["vocab_size"], (int(lengths.sum()),), generator=torch.manual_seed(0))
    return SampleBatch(torch.arange(rows), lengths, {"input_ids": tokens}, {"input_ids": "token"})


def timed(device: torch.device, generate: Callable[[], torch.Tensor]) -> tuple[float, torch.Tensor]:
    """Seconds of the second of two calls, and its result."""
    seconds, tokens = 0.0, torch.empty(0)
    for _ in range(2):
        if device.type == "cuda":
            torch.cuda.synchronize()
        started = time.perf_counter()
        tokens = generate()
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds = time.perf_counter() - started
    return seconds, tokens.cpu()


def by_strategy(
    folder: str, batches: dict[int, SampleBatch], new_tokens: int, device: torch.device
) -> dict[int, tuple[float, torch.Tensor]]:
    """Seconds and responses `[rows, new_tokens]` of `MegatronInferStrategy.generate`."""
    dtype = "bf16" if device.type == "cuda" else "fp32"
    strategy = MegatronInferStrategy(
        WorkerConfig.model_validate({"model_args": {"model_name_or_path": folder, "dtype": dtype}})
    )
    strategy.initialize()
    settings = GenerationSettings(max_new_tokens=new_tokens, eos_token_id=-1, greedy=True)  # no end token

    def responses(batch: SampleBatch) -> torch.Tensor:
        answered = strategy.generate(batch, settings)
        return answered["input_ids"][answered["response_mask"]].reshape(len(batch), new_tokens)

    return {rows: timed(device, lambda batch=batch: responses(batch)) for rows, batch in batches.items()}


def by_transformers(
    folder: str, batches: dict[int, SampleBatch], new_tokens: int, device: torch.device
) -> dict[int, tuple[float, torch.Tensor]]:
    """Seconds and responses `[rows, new_tokens]` of `generate` in transformers, with prompts padded on the left."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype="auto").to(device).eval()

    def responses(batch: SampleBatch) -> torch.Tensor:
        rows, width = batch.to_lists("input_ids"), batch.max_length
        padded = torch.stack([torch.nn.functional.pad(row, (width - len(row), 0)) for row in rows]).to(device)
        mask = torch.stack([torch.arange(width) >= width - len(row) for row in rows]).long().to(device)
        length = {"min_new_tokens": new_tokens, "max_new_tokens": new_tokens}
        output = model.generate(input_ids=padded, attention_mask=mask, do_sample=False, pad_token_id=0, **length)
        return output[:, width:]

    return {rows: timed(device, lambda batch=batch: responses(batch)) for rows, batch in batches.items()}
