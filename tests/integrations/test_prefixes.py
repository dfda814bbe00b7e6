"""Prefixes shared behind a loop that packs by itself train like each sample alone, and fewer rows are computed.

The loop is plain Megatron: its schedule, its model with its own rotation and layer spec, packs of whole samples that
are padded to a multiple of 16 and divided over context parallelism, and a loss on whole logits.
"""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.strategy.test_from_parts import _start
from tests.support.ranks import run_ranks

HERE = "tests.integrations.test_prefixes:"
LIMIT = 5e-6
SLOT = 16
GROUPS = ((40, (9, 14, 5)), (33, (8, 17)), (0, (26,)), (22, (6, 1, 1)))
"""Tokens of prompts, and of the responses to each."""
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one rank": (1, {}),
    "pp2": (2, {"pp": 2}),
    "tp2": (2, {"tp": 2}),
    "cp2": (2, {"cp": 2}),
}
SLOW: dict[str, tuple[int, dict[str, Any]]] = {
    "pp2 tp2": (4, {"pp": 2, "tp": 2}),
    "pp2 cp2": (4, {"pp": 2, "cp": 2}),
    "tp2 cp2": (4, {"tp": 2, "cp": 2}),
}

COMPUTED = sum(max(prompt - 1, 0) + sum(n + bool(prompt) for n in responses) for prompt, responses in GROUPS)
"""Tokens that are computed; each response has the last one of its prompt for itself."""


def samples() -> list[torch.Tensor]:
    """Three groups of responses and one sample alone; ids have runs of 0, which pads as well."""
    g = torch.Generator().manual_seed(3)
    rows = []
    for prompt, responses in GROUPS:
        head = torch.randint(0, 61, (prompt,), generator=g)
        rows += [torch.cat([head, torch.randint(0, 61, (n,), generator=g)]) for n in responses]
    rows[3][-3:] = 0
    return rows


def pack_of(rows: list[torch.Tensor], cp_size: int, cp_rank: int, *, told: bool) -> dict[str, Any]:
    """A pack as hosts make them; `told`: its params say the lengths without padding, too."""
    from megatron.core.packed_seq_params import PackedSeqParams

    from roll_batching.packing.pack_layout import PackLayout

    lengths = np.array([len(row) for row in rows])
    layout = PackLayout(lengths=lengths, segments=-(-lengths // SLOT) * SLOT, cp_size=cp_size)
    whole = torch.zeros(layout.tokens, dtype=torch.long)
    for start, row in zip(layout.cu_seqlens, rows, strict=False):
        whole[start : start + len(row)] = row
    mine = torch.from_numpy(layout.local_tokens(cp_rank))
    padded = torch.from_numpy(layout.cu_seqlens).int()
    real = torch.from_numpy(np.append(0, lengths.cumsum())).int() if told else padded
    params = PackedSeqParams("thd", real, real, padded, padded, int(layout.segments.max()), int(layout.segments.max()))
    positions = torch.from_numpy(layout.position_ids)[mine][None]
    return {"input_ids": whole[mine][None], "position_ids": positions, "packed_seq_params": params, "layout": layout}


def train(payload: tuple[dict[str, Any], bool, bool]) -> dict[str, Any]:
    """Differences from each sample alone, and rows computed behind a loop's packs."""
    import torch.distributed as dist
    from megatron.core import parallel_state as mpu
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

    from roll_batching.integrations.prefixes import share_prefixes_behind
    from tests.support.models import whole_gradients, worst_difference
    from tests.support.own_model import build
    from tests.support.reference import gradients, sequence_statistics

    layout, told, nested = payload
    rows = samples()
    weights = [torch.linspace(0.2, 1, len(row) - 1) for row in rows]
    _start()
    (model,), _ = build("stock", wrapped=False)
    parts = zip(rows, weights, strict=True)
    right = sum((sequence_statistics(model, row)[0] * weight).sum() for row, weight in parts)
    expected = gradients(model, right)

    _start(**layout)
    by_sequence = layout.get("tp", 1) > 1
    # Megatron's local core refuses context parallelism, and its norm sequence parallelism, when they are built.
    core = "packed" if by_sequence or "cp" in layout else "stock"
    chunks, _ = build(core, calculate_per_token_loss=True, variable_seq_lengths=True, sequence_parallel=by_sequence)
    config = chunks[0].module.config
    config.batch_p2p_comm = True  # Megatron's default, under which planned packs cannot run
    share_prefixes_behind(chunks)
    assert config.batch_p2p_comm
    config.batch_p2p_comm = torch.cuda.is_available()  # gloo has no batches of transfers
    cp_size, cp_rank, cp_group = (
        mpu.get_context_parallel_world_size(),
        mpu.get_context_parallel_rank(),
        mpu.get_context_parallel_group(),
    )
    computed: list[int] = []
    chunks[0].module.decoder.layers[0].self_attention.register_forward_pre_hook(
        lambda layer, args, kwargs: computed.append(int((args[0] if args else kwargs["hidden_states"]).shape[0])),
        with_kwargs=True,
    )
    marked: list[int] = []
    chunks[0].module.decoder.register_forward_pre_hook(
        lambda decoder, args, kwargs: marked.append(int((~kwargs["padding_mask"]).sum())) if told else None,
        with_kwargs=True,
    )
    packs, losses = [(rows[:5], weights[:5]), (rows[5:], weights[5:])], []

    def forward_step(iterator: Any, chunk: Any) -> Any:
        samples, coefficients = next(iterator)
        pack = pack_of(samples, cp_size, cp_rank, told=told)
        pack_layout = pack.pop("layout")
        if told:
            pack["padding_mask"] = torch.from_numpy(~pack_layout.real[pack_layout.local_tokens(cp_rank)])[None]
        if nested and not mpu.is_pipeline_first_stage():
            pack["input_ids"] = torch.nested.as_nested_tensor(samples, layout=torch.jagged)
        output = chunk(attention_mask=None, **pack)
        if isinstance(output, torch.Tensor) and not mpu.is_pipeline_last_stage():
            return output, None

        def loss(logits: torch.Tensor) -> Any:
            mine = pack_layout.local_tokens(cp_rank)
            labels, factors = torch.zeros(pack_layout.tokens, dtype=torch.long), torch.zeros(pack_layout.tokens)
            for start, row, weight in zip(pack_layout.cu_seqlens, samples, coefficients, strict=False):
                labels[start : start + len(row) - 1], factors[start : start + len(row) - 1] = row[1:], weight
            columns = mpu.get_tensor_model_parallel_rank() * logits.shape[-1] + torch.arange(logits.shape[-1])
            logits = logits.masked_fill(columns >= 61, float("-inf"))
            values = -vocab_parallel_cross_entropy(logits.transpose(0, 1).float(), labels[mine][:, None])[:, 0]
            total = (values * factors[mine]).sum()
            losses.append(total.detach().clone())
            return total, torch.tensor(0, dtype=torch.int), {}

        return output, loss

    for chunk in chunks:
        chunk.zero_grad_buffer()
    get_forward_backward_func()(
        forward_step_func=forward_step, data_iterator=iter(packs), model=chunks, num_microbatches=len(packs),
        seq_length=512, micro_batch_size=1, forward_only=False,
    )  # fmt: skip
    found = whole_gradients(chunks, 61, mpu.get_tensor_model_parallel_rank(), False)
    gradient, name = worst_difference(found, expected)
    total = torch.stack(losses).sum() if losses else torch.zeros(())
    if losses:
        dist.all_reduce(total, group=cp_group)
    return {
        "loss": float((total / right).abs() - 1) if losses else 0.0,
        "gradient": gradient,
        "name": name,
        "computed": sum(computed) * cp_size * layout.get("tp", 1),
        "marked": sum(marked),
    }


@pytest.mark.parametrize("name", [*LAYOUTS, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
@pytest.mark.parametrize("told", [True, False], ids=["lengths", "padded lengths"])
def test_a_loop_s_packs_train_like_each_sample_alone(name: str, told: bool) -> None:
    ranks, layout = (LAYOUTS | SLOW)[name]
    whole = sum(-(-len(row) // SLOT) * SLOT for row in samples())
    reports = run_ranks(ranks, HERE + "train", (layout, told, "pp" in layout and told))
    for report in reports:
        assert abs(report["loss"]) < LIMIT, report
        assert report["gradient"] < LIMIT, report
        assert report["computed"] < (0.6 if told else 0.75) * whole, report
    if told and "tp" not in layout:  # which marks another share of the sequence on the first stage and on later ones
        assert sum(report["marked"] for report in reports) == COMPUTED * layout.get("pp", 1)


def misuse(_: None) -> dict[str, str]:
    """What is said of models and inputs that cannot be, by name."""
    import copy

    from roll_batching.errors import IntegrationError, LayoutError
    from roll_batching.integrations.prefixes import share_prefixes_behind
    from tests.support.own_model import build

    _start()
    said: dict[str, str] = {}

    def note(name: str, call: Any) -> None:
        try:
            call()
            said[name] = "accepted"
        except (IntegrationError, LayoutError) as error:
            said[name] = str(error)

    for name, options in (("dropout", {"hidden_dropout": 0.1}), ("positions", {"learned_positions": 512})):
        (model,), _ = build("stock", wrapped=False, **options)
        note(name, lambda model=model: share_prefixes_behind(model))
    (model,), _ = build("stock", wrapped=False)
    share_prefixes_behind(model)
    rows = samples()
    pack = pack_of(rows, 1, 0, told=False)
    del pack["layout"]

    def run(**changes: Any) -> None:
        model(attention_mask=None, **pack | changes)

    with torch.no_grad():
        for lonely in rows[5:6]:  # nothing to leave out, and rows that are no pack
            alone = pack_of([lonely], 1, 0, told=True)
            del alone["layout"]
            packed = model(attention_mask=None, **alone)[0, : len(lonely)]
            positions = torch.arange(len(lonely))[None]
            whole = model(lonely[None], positions, torch.ones(len(lonely), len(lonely)).triu(1).bool()[None, None])
            said["whole rows"] = "equal" if torch.allclose(packed, whole[0], atol=1e-5) else "differ"

    for name, change in (
        ("as it is", {}),
        ("no ids", {"input_ids": None}),
        ("embedded", {"decoder_input": torch.zeros(4, 1, 32)}),
        ("masked", {"padding_mask": torch.ones_like(pack["input_ids"], dtype=torch.bool)}),
        ("too short", {"input_ids": pack["input_ids"][:, :40]}),
    ):
        note(name, lambda change=change: run(**change))
    params = copy.copy(pack["packed_seq_params"])
    params.cp_group = SimpleNamespace(size=lambda: 2)
    note("a group of its own", lambda: run(packed_seq_params=params))
    return said


@pytest.mark.bad_input
def test_what_cannot_share_is_refused_by_name() -> None:
    (said,) = run_ranks(1, HERE + "misuse", None)
    expected = {
        "dropout": "hidden_dropout=0.1",
        "positions": "accepted",
        "whole rows": "equal",
        "as it is": "accepted",
        "no ids": "without input_ids.*pass them on every pipeline stage",
        "embedded": "with decoder_input",
        "masked": "padding_mask marks other rows than those behind its samples.*mark padding alone",
        "too short": r"do not describe a pack of 40 rows",
        "a group of its own": "set one context-parallel size",
    }
    assert {name: bool(re.search(pattern, said[name])) for name, pattern in expected.items()} == dict.fromkeys(
        expected, True
    ), said
