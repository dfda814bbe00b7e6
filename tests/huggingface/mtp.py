"""Tiny models with a head of multi-token prediction in their files, and their results by transformers and torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from tests.huggingface import tiny
from tests.support.ranks import meet, part

FACTOR = 0.3
"""`mtp_loss_scaling_factor`."""
LAYERS = 4
"""Decoder layers. The layer of the head is made as the one after them."""
NUMBERED = {"hidden": "hnorm", "embedding": "enorm", "joint": "eh_proj", "last": "shared_head.norm"}
NAMED = {"hidden": "pre_fc_norm_hidden", "embedding": "pre_fc_norm_embedding", "joint": "fc", "last": "norm"}
"""Names of a head's other parts in files."""


class Head(torch.nn.Module):
    """A head beside `model`, of which it takes the last layer."""

    def __init__(self, model: Any, is_centred: bool) -> None:
        super().__init__()
        width, norm = model.config.hidden_size, type(model.model.norm)
        self.layer = model.model.layers[LAYERS]
        self.hidden, self.embedding, self.last = (norm(width, eps=model.config.rms_norm_eps) for _ in range(3))
        self.joint = torch.nn.Linear(2 * width, width, bias=False)
        generator = torch.Generator().manual_seed(5)
        with torch.no_grad():
            for name in NAMED:
                weight = getattr(self, name).weight
                start = 0.0 if is_centred or name == "joint" else 1.0
                weight.copy_(torch.randn(weight.shape, generator=generator) * 0.15 + start)

    def loss(self, model: Any, row: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """Sum of the cross-entropies of a row [n] whose hidden states are [1, n, h]: position i predicts i + 2."""
        places = torch.arange(len(row) - 1)[None]
        joined = torch.cat([self.embedding(model.model.embed_tokens(row[None, 1:])), self.hidden(hidden[:, :-1])], -1)
        states = self.layer(
            self.joint(joined),
            attention_mask=torch.full((len(row) - 1,) * 2, torch.finfo(torch.float32).min).triu(1)[None, None],
            position_ids=places,
            position_embeddings=model.model.rotary_emb(joined, places),
        )
        states = states[0] if isinstance(states, tuple) else states
        logits = model.lm_head(self.last(states))[0, :-1]
        return torch.nn.functional.cross_entropy(logits, row[2:], reduction="sum")


def write_model(folder: Path, name: str, dtype: torch.dtype = torch.float32, copies: bool = True) -> tuple[Any, Head]:
    """Writes a model of `tiny` with a head; returns both in fp32.

    `copies`: a numbered head repeats embedding and output layer, as in DeepSeek-V3's files.
    """
    from safetensors.torch import load_file, save_file

    prefix, fields = tiny.MODELS[name]
    deeper = {**fields, "num_hidden_layers": LAYERS + 1}
    if "layer_types" in fields:
        deeper["layer_types"] = [*fields["layer_types"], "full_attention"]
    model = tiny.write_model(folder, name, dtype, model=(prefix, deeper))
    head = Head(model, prefix in tiny.ZERO_CENTRED)
    del model.model.layers[LAYERS]
    model.config.num_hidden_layers = LAYERS
    is_numbered, layer = "Qwen" not in prefix, f"model.layers.{LAYERS}."
    tensors = load_file(folder / "model.safetensors")
    found = {}
    for key, value in tensors.items():
        renamed = key if is_numbered else key.replace(layer, "mtp.layers.0.")
        found[renamed] = value
    for module, theirs in (NUMBERED if is_numbered else NAMED).items():
        weight = getattr(head, module).weight.detach().to(dtype)
        found[f"{layer if is_numbered else 'mtp.'}{theirs}.weight"] = weight.clone()
        getattr(head, module).weight.data = weight.float()
    if is_numbered and copies:
        found[f"{layer}embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
        found[f"{layer}shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    save_file(found, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config |= {key: value[:LAYERS] for key, value in config.items() if isinstance(value, list) and len(value) > LAYERS}
    config |= {"num_hidden_layers": LAYERS, **({"num_nextn_predict_layers": 1} if is_numbered else {})}
    config.pop("num_mtp_layers", None)
    (folder / "config.json").write_text(json.dumps(config))
    return model, head


def sft_losses(model: Any, head: Head, steps: int, rate: float, sgd: bool) -> list[tuple[float, float]]:
    """(loss, loss of the head) of steps of AdamW or SGD over all tokens of `tiny.rows`, row by row."""
    parameters = [*model.parameters(), *head.parameters()]
    optimizer = (
        torch.optim.SGD(parameters, lr=rate) if sgd else torch.optim.AdamW(parameters, lr=rate, weight_decay=0.0)
    )
    found = []
    for _ in range(steps):
        main, ahead = [], []
        for row in tiny.rows():
            hidden = model.model(row[None]).last_hidden_state
            logits = model.lm_head(hidden)[0, :-1]
            main.append(torch.nn.functional.cross_entropy(logits, row[1:], reduction="sum"))
            if len(row) > 2:
                ahead.append(head.loss(model, row, hidden))
        loss = torch.stack(main).sum() / sum(len(row) - 1 for row in tiny.rows())
        of_head = torch.stack(ahead).sum() / sum(max(len(row) - 2, 0) for row in tiny.rows())
        found.append((loss.item(), of_head.item()))
        optimizer.zero_grad()
        (loss + FACTOR * of_head).backward()
        optimizer.step()
    return found


def strategy_of(directory: str | Path, layout: Any, **megatron: Any) -> Any:
    """A training strategy with the model in `directory` and its head."""
    from roll_batching.strategy import MegatronTrainStrategy
    from tests.huggingface.ranks import role

    config = role(directory, layout)
    keys = {"mtp_num_layers": 1, "mtp_loss_scaling_factor": FACTOR, **megatron}
    changed = config.strategy_args.strategy_config.model_copy(update=keys)
    args = config.strategy_args.model_copy(update={"strategy_config": changed})
    strategy = MegatronTrainStrategy(config.model_copy(update={"strategy_args": args}))
    strategy.initialize()
    return strategy


def trained(payload: list[tuple[str, Any, int, float, str | None, bool]]) -> list[list[tuple[float, float]]]:
    """For each (directory, layout, steps, rate, path, sgd): (loss, loss of the head) of steps, and an export to path.

    `sgd`: plain gradient descent instead of Megatron's Adam.
    """

    from roll_batching.losses import SFTLoss
    from roll_batching.samples import distribute, gather_lengths
    from roll_batching.settings import TrainingArgs
    from tests.huggingface.ranks import share

    found = []
    for number, (directory, layout, steps, rate, written, sgd) in enumerate(payload):
        meet(number)
        strategy = strategy_of(directory, layout)
        strategy.start_phase(TrainingArgs(learning_rate=rate, max_grad_norm=0.0))
        losses = []
        for _ in range(steps):
            local = share(strategy.layout)
            plan = strategy.plan(gather_lengths(local))
            if sgd:
                strategy.zero_grad()
                loss, metrics = strategy.forward_backward(distribute(local, plan), plan, SFTLoss())
                _descend(strategy.chunks, rate)
            else:
                result = strategy.train_step(distribute(local, plan), plan, SFTLoss())
                loss, metrics = result.loss, result.metrics
            losses.append((loss, metrics["mtp_1_loss"]))
        if written is not None:
            strategy.export(written)
        found.append(losses)
        del strategy
        part()
    return found


@torch.no_grad()
def _descend(chunks: list[Any], rate: float) -> None:
    for chunk in chunks:
        for parameter in chunk.parameters():
            parameter -= rate * parameter.main_grad


def refused(payload: tuple[str, int]) -> str:
    """The message of a strategy with so many heads of a directory."""
    from roll_batching.errors import RollBatchingError
    from tests.support.layouts import Layout

    try:
        strategy_of(payload[0], Layout(), mtp_num_layers=payload[1])
    except RollBatchingError as error:
        return str(error)
    return ""
