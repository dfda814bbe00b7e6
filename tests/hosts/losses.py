"""Hosts' own loss functions, unmodified: through our passes in a layout, and on a plain padded forward."""

from __future__ import annotations

import os
import sys
from typing import Any

import torch

from tests.hosts import stand_ins
from tests.support.models import ARCHITECTURE

WIDTH, SAMPLES, VOCABULARY, CAP = 40, 13, 64, 64
"""The vocabulary divides evenly: hosts count the padded columns of a head, as their own softmax does."""
EXPERTS = {"num_experts": 4, "router_topk": 2, "ffn_hidden_size": 32}


def batch() -> dict[str, torch.Tensor]:
    """A global batch of right-padded rows with the fields of a policy loss, the same in every process."""
    generator = torch.Generator().manual_seed(7)
    lengths = torch.randint(6, WIDTH + 1, (SAMPLES,), generator=generator)
    prompts = (lengths * torch.rand(SAMPLES, generator=generator) * 0.6).long().clamp(min=1)
    place = torch.arange(WIDTH)
    attention = (place < lengths[:, None]).long()
    response = attention * (place >= prompts[:, None]).long()
    mask = response[:, 1:]

    def noise() -> torch.Tensor:
        return 0.4 * torch.randn(SAMPLES, WIDTH - 1, generator=generator)

    base = torch.full((SAMPLES, WIDTH - 1), -4.1)
    return {
        "input_ids": torch.randint(1, VOCABULARY, (SAMPLES, WIDTH), generator=generator) * attention,
        "attention_mask": attention,
        "response_mask": response,
        "lengths": lengths,
        "prompts": prompts,
        "advantages": torch.randn(SAMPLES, 1, generator=generator) * mask,
        "old": (base + noise()) * mask,
        "ref": (base + noise()) * mask,
        "gen": (base + noise()) * mask,
        "temperature": 0.7 + 0.6 * torch.rand(SAMPLES, generator=generator),
    }


def make_host(host: str) -> Any:
    """The adapter of a host in this process, with its checkout and its unused packages."""
    sys.path[:0] = [os.environ[f"{host.upper()}_CHECKOUT"]]
    stand_ins.install()
    from tests.hosts import host_nemo_rl, host_verl

    return {"nemo_rl": host_nemo_rl, "verl": host_verl}[host]


def architecture(experts: bool) -> dict[str, Any]:
    return {**ARCHITECTURE, "num_layers": 4, "vocab_size": VOCABULARY, **({"moe": EXPERTS} if experts else {})}


def plain_log_probs(model: Any, fields: dict[str, torch.Tensor], temperature: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """[samples, WIDTH - 1] log-probs and entropies of a padded forward with Megatron's own attention."""
    ids = fields["input_ids"]
    hidden_from = torch.ones(1, 1, WIDTH, WIDTH).triu(1).bool()
    logits = model(ids, torch.arange(WIDTH).expand_as(ids), hidden_from)[:, :-1].float()[..., :VOCABULARY]
    every = (logits / torch.as_tensor(temperature).reshape(-1, 1, 1)).log_softmax(-1)
    return every.gather(-1, ids[:, 1:, None])[..., 0], -(every.exp() * every).sum(-1)


def plainly(payload: tuple[str, str, bool, int]) -> dict[str, Any]:
    """Losses and first gradients of `steps` optimizer steps on a plain model in one process."""
    host_name, variant, experts, steps = payload
    host = make_host(host_name)
    from roll_batching.distributed.parallel_layout import make_layout, start_processes
    from roll_batching.planning import ParallelDims
    from tests.support.models import global_name
    from tests.support.reference import stock_model

    make_layout(ParallelDims(), start_processes())
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    model_parallel_cuda_manual_seed(0)
    options = {
        "num_moe_experts": EXPERTS["num_experts"],
        "moe_router_topk": EXPERTS["router_topk"],
        "moe_ffn_hidden_size": EXPERTS["ffn_hidden_size"],
        "moe_router_load_balancing_type": "none",
        "moe_token_dispatcher_type": "alltoall",
    }
    model = stock_model(architecture(experts), **(options if experts else {}))
    fields = batch()
    temperature = host.temperature(variant, fields)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, betas=(0.9, 0.999), eps=1e-8)
    losses, gradients, passes = [], {}, []
    for step in range(steps):
        with torch.no_grad():
            passes.append(plain_log_probs(model, fields, temperature)[0])
        if step:  # the log-prob pass of the step is its old policy
            fields["old"] = passes[-1] * fields["response_mask"][:, 1:]
        log_probs, entropy = plain_log_probs(model, fields, temperature)
        loss = host.plain_loss(variant, fields, log_probs, entropy)
        optimizer.zero_grad()
        loss.backward()
        if not step:
            gradients = {
                global_name(model, name): torch.zeros_like(p) if p.grad is None else p.grad.clone()
                for name, p in model.named_parameters()
            }
        optimizer.step()
        losses.append(float(loss.detach()))
    return {"losses": losses, "gradients": gradients, "first_pass": passes[0], "last_pass": passes[-1]}


def planned(payload: tuple[str, str, dict[str, Any], int]) -> dict[str, Any]:
    """The same through the host's own entrance, with our passes behind, on this rank of a layout."""
    host_name, variant, megatron, steps = payload
    megatron = dict(megatron)
    experts, max_cp_size = megatron.pop("experts", False), megatron.pop("max_cp_size", 1)
    host = make_host(host_name)
    from tests.losses.steps import make_strategy
    from tests.support.models import fill, whole_gradients

    training = {"adam_beta1": 0.9, "adam_beta2": 0.999, "adam_epsilon": 1e-8, "weight_decay": 0.0}
    strategy = make_strategy(
        cap=CAP,
        megatron={"calculate_per_token_loss": host.PER_TOKEN, **megatron},
        architecture=architecture(experts),
        training=training,
    )
    fields, layout = batch(), strategy.layout
    # A sample above a rank's cap can only be computed by several ranks.
    assert max_cp_size == 1 or int(fields["lengths"].max()) > CAP // max_cp_size
    fill(strategy.chunks, VOCABULARY, layout.tp_rank, layout.tp_size)
    mine = torch.arange(layout.dp_rank, SAMPLES, layout.dp_size)
    entrance = host.Entrance(strategy, variant, CAP, max_cp_size)
    report: dict[str, Any] = {"losses": [], "rank": layout.dp_rank, "last": layout.is_last_stage}
    for step in range(steps):
        own = {name: values[mine] for name, values in fields.items()}
        log_probs = entrance.log_probs(own)
        report["last_pass"] = mine, log_probs
        report.setdefault("first_pass", report["last_pass"])
        if step and log_probs is not None:
            fields["old"] = fields["old"].clone()
            fields["old"][mine] = log_probs * own["response_mask"][:, 1:]
            own["old"] = fields["old"][mine]
        strategy.zero_grad()
        report["losses"].append(entrance.train(own, fields))
        if not step:
            found = whole_gradients(strategy.chunks, VOCABULARY, layout.tp_rank, False)
            report |= {"gradients": found, "spread": found.pop("spread")}
        strategy.optimizer_step()
    return report
