"""Hosts' own functions that pack, run and unpack a model, unmodified, with prefixes shared behind them."""

from __future__ import annotations

from typing import Any

import torch

from tests.hosts.losses import make_host

LIMIT = 5e-6


def samples() -> list[torch.Tensor]:
    """Three groups of responses and one sample alone."""
    g = torch.Generator().manual_seed(3)
    rows = []
    for prompt, responses in ((40, (9, 14, 5)), (33, (8, 17)), (0, (26,)), (22, (6, 1))):
        head = torch.randint(1, 61, (prompt,), generator=g)
        rows += [torch.cat([head, torch.randint(1, 61, (n,), generator=g)]) for n in responses]
    return rows


def _padded(rows: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    lengths = torch.tensor([len(row) for row in rows])
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True), lengths


def _next_token(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return logits.float().log_softmax(-1).gather(-1, labels[..., None])[..., 0]


def verl(model: Any, rows: list[torch.Tensor]) -> list[torch.Tensor]:
    """Log-probs of each sample by verl's engine: `gptmodel_forward_model_engine`."""
    from verl.models.mcore.model_forward import gptmodel_forward_model_engine

    ids = torch.nested.as_nested_tensor(rows, layout=torch.jagged)
    output = gptmodel_forward_model_engine(
        model, ids, {}, logits_processor=lambda logits, label: {"log_probs": _next_token(logits, label)},
        logits_processor_args={"label": ids},
    )  # fmt: skip
    return [row[:-1] for row in output["log_probs"].unbind()]


def nemo_rl(model: Any, rows: list[torch.Tensor]) -> list[torch.Tensor]:
    """Log-probs of each sample by NeMo-RL's packing: `_pack_sequences_for_megatron`."""
    from nemo_rl.models.megatron.data import _pack_sequences_for_megatron

    ids, lengths = _padded(rows)
    _, packed, params, _, ends = _pack_sequences_for_megatron(ids, lengths, 8, 1, None, 0, 1)
    logits = model(input_ids=packed, position_ids=None, attention_mask=None, packed_seq_params=params)
    return [
        _next_token(logits[0, start : start + len(row) - 1], row[1:])
        for start, row in zip(ends.tolist(), rows, strict=False)
    ]


def compare(host: str) -> dict[str, Any]:
    """Differences from each sample alone, with the host's functions, and the share of rows that is computed."""
    functions = {"verl": verl, "nemo_rl": nemo_rl}
    make_host(host)
    from roll_batching.integrations.prefixes import share_prefixes_behind
    from tests.strategy.test_from_parts import _start
    from tests.support.own_model import build
    from tests.support.reference import gradients, sequence_statistics

    rows = samples()
    weights = [torch.linspace(0.2, 1, len(row) - 1) for row in rows]
    _start()
    (plain,), _ = build("stock", wrapped=False)
    right = [sequence_statistics(plain, row)[0] for row in rows]
    expected = gradients(plain, sum((a * b).sum() for a, b in zip(right, weights, strict=True)))
    (model,), _ = build("stock", wrapped=False)
    share_prefixes_behind(model)
    computed: list[int] = []
    model.decoder.layers[0].self_attention.register_forward_pre_hook(
        lambda layer, args, kwargs: computed.append(len(args[0] if args else kwargs["hidden_states"])),
        with_kwargs=True,
    )
    found = functions[host](model, rows)
    gradient = gradients(model, sum((a * b).sum() for a, b in zip(found, weights, strict=True)))
    return {
        "log_probs": max(float((a - b).abs().max()) for a, b in zip(found, right, strict=True)),
        "gradient": max(
            float((gradient[name] - value).norm() / value.norm().clamp(min=1e-12)) for name, value in expected.items()
        ),
        "computed": sum(computed) / sum(map(len, rows)),
    }


def check(host: str) -> None:
    """Asserts that the host's packs train as each sample alone, and compute fewer rows."""
    from tests.support.ranks import run_ranks

    (report,) = run_ranks(1, "tests.hosts.behind:compare", host, fresh=True, timeout=400)
    assert report["log_probs"] < LIMIT and report["gradient"] < LIMIT, report
    assert report["computed"] < 0.75, report
