"""Shared prefixes on a GPTModel of Megatron's own: through our passes, and behind a loop that packs whole samples.

    python benchmarks/bench_prefixes_behind.py --device cpu --check
    python benchmarks/bench_prefixes_behind.py --device cuda --json prefixes_behind.json

The model has Megatron's layer spec (on CUDA TransformerEngine's, if installed) and its own rotation. The samples are
those of `bench_shared_prefixes.py` with long prompts: eight answers of 1.1k tokens to prompts of 7k, an eighth of that
on a CPU. An update adds gradients, and does not step an optimizer. The loop is a forward and a backward pass of the
model for each pack, with a loss on its logits; it computes the head and the loss for whole samples. Times are compared
as in `bench_shared_prefixes.py`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs in a checkout that is not installed

from roll_batching.known_warnings import hide_known_warnings

hide_known_warnings()  # before Megatron is imported

from benchmarks.bench_shared_prefixes import CAP, CASES, SHAPES, batch_of, limits_of_times
from benchmarks.measure import arguments, finish, ratio, times

CASE = next(iter(CASES))
FASTER = {"through our passes": 2.5, "behind a loop that packs": 2.0}
"""Limits of `--check`: smallest ratio of times of an update, without sharing over with."""


def build(device: str, cap: int, vocabulary: int) -> Any:
    """A GPTModel in DDP, as Megatron's training builds it, on one rank."""
    import torch.nn.functional as F
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.models.gpt import GPTModel, gpt_layer_specs
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer.transformer_config import TransformerConfig

    from roll_batching.distributed.parallel_layout import start_processes
    from roll_batching.megatron_patches import cpu_platform

    start_processes()
    parallel_state.initialize_model_parallel()
    if device == "cpu":
        cpu_platform.install()
    model_parallel_cuda_manual_seed(1)
    shape = {name: value for name, value in SHAPES[device].items() if not name.startswith(("vocab", "tie"))}
    config = TransformerConfig(
        **shape,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        calculate_per_token_loss=True,
        gradient_accumulation_fusion=False,
        bias_dropout_fusion=False,
        bf16=device == "cuda",
        params_dtype=torch.bfloat16 if device == "cuda" else torch.float32,
    )
    config.finalize_model_grads_func = finalize_model_grads
    if device == "cuda" and gpt_layer_specs.HAVE_TE:
        spec = gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec(qk_layernorm=config.qk_layernorm)
    else:
        spec = gpt_layer_specs.get_gpt_layer_local_spec(normalization="RMSNorm", qk_layernorm=config.qk_layernorm)
    gpt = GPTModel(config, spec, vocabulary, cap, position_embedding_type="rope").to(device)
    return DistributedDataParallel(config, DistributedDataParallelConfig(), gpt)


def through_our_passes(chunk: Any, batch: Any, cap: int) -> tuple[dict[str, Callable[[], Any]], Any]:
    """Updates with and without sharing, and the plan that shares."""
    from roll_batching.losses import PolicyLoss
    from roll_batching.planning import BatchingSpec
    from roll_batching.samples import gather_lengths
    from roll_batching.settings import BatchingConfig
    from roll_batching.strategy import MegatronTrainStrategy

    spec = BatchingSpec(mode="packed", max_tokens=cap)
    batching = BatchingConfig(train=spec, infer=spec, share_prefixes="auto")
    strategy = MegatronTrainStrategy.from_parts([chunk], None, batching)
    plans = {"with": strategy.plan(strategy.gather_table(batch)), "without": strategy.plan(gather_lengths(batch))}
    loss = PolicyLoss()
    runs = {way: lambda plan=plan: strategy.forward_backward(batch, plan, loss) for way, plan in plans.items()}
    return runs, plans["with"]


def behind_a_loop(chunk: Any, batch: Any, packs: list[np.ndarray], device: str) -> dict[str, Callable[[], Any]]:
    """Updates of a loop over `packs` of samples, whose packs share prefixes or do not."""
    from megatron.core.packed_seq_params import PackedSeqParams

    from roll_batching.integrations.prefixes import share_prefixes_behind
    from roll_batching.packing.pack_layout import PackLayout
    from roll_batching.packing.params import packed_params
    from roll_batching.strategy.compatibility import attention_backends

    share_prefixes_behind(chunk)
    attention = next(iter(attention_backends([chunk])))
    rows = batch.to_lists("input_ids")
    inputs: dict[str, list[tuple[Any, ...]]] = {"with": [], "without": []}
    for pack in packs:
        ids = torch.cat([rows[sample] for sample in pack]).to(device)[None]
        lengths = np.array([len(rows[sample]) for sample in pack])
        layout = PackLayout(lengths=lengths, segments=lengths, cp_size=1)
        ends = torch.from_numpy(layout.cu_seqlens).int().to(device)
        theirs = PackedSeqParams("thd", ends, ends, ends, ends, int(lengths.max()), int(lengths.max()))
        ours = packed_params(layout, 0, torch.device(device), attention=attention, rotation_cp=(1, 0))
        inputs["with"].append((ids, theirs))
        inputs["without"].append((ids, ours))  # a pack of ours passes the hooks as it is

    def update(way: str) -> None:
        for ids, params in inputs[way]:
            positions = torch.arange(ids.shape[1], device=device)[None]
            logits = chunk(ids, positions, None, packed_seq_params=params)
            torch.nn.functional.cross_entropy(logits[0, :-1].float(), ids[0, 1:]).backward()

    return {way: lambda way=way: update(way) for way in inputs}


def main() -> None:
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    given = arguments(__doc__, rounds=5)
    device = given.device
    cap, vocabulary = given.tokens or CAP[device], given.vocabulary or SHAPES[device]["vocab_size"]
    batch = batch_of(CASE, device, cap, vocabulary)
    chunk = build(device, cap, vocabulary)
    runs, plan = through_our_passes(chunk, batch, cap)
    updates = {"through our passes": runs}
    # The samples of each pack of the plan, in packs of whole samples below the cap.
    packs: list[np.ndarray] = []
    for pack in plan.micro_batches[0]:
        bins = np.cumsum(plan.lengths[pack.samples]) // cap
        packs += [pack.samples[bins == number] for number in np.unique(bins)]
    updates["behind a loop that packs"] = behind_a_loop(chunk, batch, packs, device)
    cases = []
    for name, ways in updates.items():
        found = times(ways, device, given.rounds)
        faster = ratio(found["without"], found["with"])
        cases.append(
            {
                "case": name,
                "figures": {"update, times faster": faster[0], "update, spread": faster[1]},
                "limits": limits_of_times({"update": faster}, FASTER[name]),
            }
        )
    finish(given, cases)


if __name__ == "__main__":
    main()
