"""Processes of the check: one that imports everything, and the ranks of each layout, which it forks.

They compute a tiny model whose weights and gradients are comparable between layouts.
"""

from __future__ import annotations

import io
import multiprocessing
import os
import pickle
import re
import socket
import sys
import tempfile
import time
import zlib
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from roll_batching.errors import RollBatchingError
from roll_batching.lifetime import die_with_parent
from roll_batching.loss_check.scenarios import VOCABULARY, LayoutRuns, Outcome, Request, Scenario
from roll_batching.losses.contract import VALUES, loss_spec
from roll_batching.modeling.head import gpt_of
from roll_batching.planning import Plan
from roll_batching.registry import printable
from roll_batching.samples import distribute, gather_lengths
from roll_batching.settings import RoleSettings
from roll_batching.strategy import MegatronTrainStrategy

_GRACE_SECONDS = 10
"""Time that the other ranks get to report the same error after one rank has failed."""


def run_layouts(pickled: bytes, answers: Connection) -> None:
    """Sends the outcomes of each layout's runs of a pickled `Request`, by name; then ends.

    Messages are bytes: multiprocessing would send tensors as handles of shared memory, which end with their process.
    """
    request = pickle.loads(pickled)
    torch.set_num_threads(1)
    for layout in request.layouts:
        answers.send_bytes(pickle.dumps(_run_layout(request, layout)))
    answers.close()


def _run_layout(request: Request, layout: LayoutRuns) -> dict[str, Outcome]:
    """Forks the ranks of a layout, collects the outcomes of its runs by name, and ends the ranks."""
    port, context = _free_port(), multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory(prefix="check-loss-") as folder:
        receiver, sender = context.Pipe(duplex=False)
        ranks = []
        for rank in range(layout.processes):
            output = Path(folder) / str(rank)
            arguments = (request, layout, rank, port, sender if rank == 0 else None, output, os.getpid())
            ranks.append(context.Process(target=_run_rank, args=arguments))
            ranks[-1].start()
        sender.close()
        try:
            outcomes, is_late = _receive(receiver, [rank.sentinel for rank in ranks], request.seconds)
        finally:
            for process in ranks:
                process.kill()
                process.join()
        last = [line for rank in range(layout.processes) for line in _last_lines(Path(folder) / str(rank))]
    failure = "a process of the run ended early"
    if is_late:
        failure = f"the run did not end within {request.seconds:g} s: a collective call that not every rank makes?"
    elif last:
        failure = f"{failure}: {printable(' | '.join(last))}"
    return {scenario.name: outcomes.get(scenario.name) or Outcome(error=failure) for scenario in layout.scenarios}


def _last_lines(path: Path) -> list[str]:
    """The last two lines of the end of a file."""
    with path.open("rb") as file:
        file.seek(max(path.stat().st_size - 2000, 0))
        return file.read().decode(errors="replace").strip().splitlines()[-2:]


def _receive(receiver: Connection, sentinels: list[Any], seconds: float) -> tuple[dict[str, Outcome], bool]:
    """(what rank 0 sends before it ends, whether it has not ended within `seconds` although no rank failed)."""
    outcomes: dict[str, Outcome] = {}
    end, has_ended = time.monotonic() + seconds, False
    while (remaining := end - time.monotonic()) > 0:
        if receiver.poll(min(remaining, 0.2)):
            try:
                name, outcome = pickle.loads(receiver.recv_bytes())
            except EOFError:  # rank 0 has ended
                return outcomes, False
            outcomes[name] = outcome
        if not has_ended and wait(sentinels, 0):
            has_ended, end = True, min(end, time.monotonic() + _GRACE_SECONDS)
    return outcomes, not has_ended


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def _run_rank(
    request: Request, layout: LayoutRuns, rank: int, port: int, sender: Connection | None, output: Path, parent: int
) -> None:
    """Runs one rank of a layout; rank 0 sends the outcomes. What the process prints goes to the file `output`."""
    die_with_parent(parent)
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(file, 1)  # file descriptors, so that messages of C++ libraries are caught, too
    os.dup2(file, 2)
    sys.stdout, sys.stderr = (io.TextIOWrapper(os.fdopen(n, "wb", closefd=False), line_buffering=True) for n in (1, 2))
    sizes = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": layout.processes, "LOCAL_WORLD_SIZE": layout.processes}
    os.environ |= {name: str(size) for name, size in sizes.items()}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    strategies: dict[str, MegatronTrainStrategy] = {}
    for scenario in layout.scenarios:
        try:
            outcome = _run(request, layout, scenario, strategies)
        except Exception as error:  # of the user's code, or of the library because of it
            message = str(error) if isinstance(error, RollBatchingError) else f"{type(error).__name__}: {error}"
            outcome = Outcome(error=message)
        if sender is not None:
            sender.send_bytes(pickle.dumps((scenario.name, outcome)))
        if outcome.error is not None and layout.processes > 1:
            break  # the ranks may no longer be in step


def _run(
    request: Request, layout: LayoutRuns, scenario: Scenario, strategies: dict[str, MegatronTrainStrategy]
) -> Outcome:
    """Runs one step of `scenario`; `strategies` keeps the models of this process, by mode, for later runs."""
    samples, loss = request.samples, pickle.loads(request.loss)
    vocabulary = max(int(samples["input_ids"].max()) + 1, VOCABULARY)
    if scenario.mode not in strategies:
        settings = role_settings(
            scenario.mode,
            layout.strategy_config,
            vocabulary=vocabulary,
            samples=len(samples),
            tokens=samples.num_tokens,
            value_head=VALUES in loss_spec(loss).needs,
        )
        strategies[scenario.mode] = MegatronTrainStrategy(settings)
        strategies[scenario.mode].initialize()
    strategy = strategies[scenario.mode]
    place = strategy.layout
    fill_weights(strategy.chunks, vocabulary, place.tp_rank, place.tp_size)
    local = samples.select(torch.arange(place.dp_rank, len(samples), place.dp_size))
    if (prepare := loss_spec(loss).prepare) is not None:
        local = prepare(local, place, request.seed)
    table = gather_lengths(local)
    table_row = {identity: row for row, identity in enumerate(table.ids.tolist())}
    ids = samples.ids.tolist()
    bins = [[[table_row[ids[sample]] for sample in pack] for pack in packs] for packs in scenario.bins]
    constraints = strategy.plan(table).constraints
    plan = Plan.from_bins(bins, table.lengths, constraints, ids=table.ids, location=table.location)
    torch.manual_seed(request.seed)
    strategy.zero_grad()
    value, metrics = strategy.forward_backward(distribute(local, plan), plan, loss)
    return Outcome(loss=value, metrics=metrics, gradients=whole_gradients(strategy.chunks, vocabulary, place.tp_group))


# ---- the tiny model


ARCHITECTURE = {
    "hidden_size": 32,
    "num_layers": 2,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "ffn_hidden_size": 48,
}


def role_settings(
    mode: str,
    layout: dict[str, Any],
    *,
    vocabulary: int,
    samples: int,
    tokens: int,
    value_head: bool,
    architecture: Mapping[str, Any] = ARCHITECTURE,
) -> RoleSettings:
    """Settings of a role that takes any plan of `samples` with `tokens` in all."""
    cap = 2 * tokens + 64 * samples  # with room for every alignment
    batching: dict[str, Any] = {"padded_length": "longest"}
    if mode == "packed":
        caps = {f"max_packed_sequence_length_{kind}": cap for kind in ("train", "forward")}
        batching = {"use_sequence_packing": True, "sequence_packing_args": caps}
    return RoleSettings.model_validate(
        {
            "model_args": {
                "architecture": {**architecture, "vocab_size": vocabulary, "max_position_embeddings": cap},
                "dtype": "fp32",
                "value_head": value_head,
            },
            "training_args": {"per_device_train_batch_size": samples, "max_grad_norm": 0.0},
            "strategy_args": {"strategy_name": "megatron_train", "strategy_config": layout},
            "backend_timeout": 0.5,
            **batching,
        }
    )


def _split(name: str, parameter: Any) -> tuple[int | None, int]:
    """(dimension that tensor parallelism splits, or None; parts that it splits each, two in the gated layer)."""
    is_split = getattr(parameter, "tensor_model_parallel", False)
    return parameter.partition_dim if is_split else None, 2 if "linear_fc1" in name else 1


@torch.no_grad()
def fill_weights(chunks: Sequence[Any], vocabulary: int, tp_rank: int, tp_size: int) -> None:
    """Draws every weight by its name, equal in every layout; rows of padded tokens are large, as none may matter."""
    for name, parameter in _parameters(chunks):
        dim, parts = _split(name, parameter)
        shape = [n * tp_size if i == dim else n for i, n in enumerate(parameter.shape)]
        g = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        rows = vocabulary if _of_vocabulary(name) and shape[0] > 1 else shape[0]  # 1: a value head
        whole = torch.full(shape, 3.0)
        whole[:rows] = torch.randn(rows, *shape[1:], generator=g) * 0.15 + (1.0 if "norm" in name else 0.0)
        if dim is not None:
            whole = torch.cat([part.chunk(tp_size, dim)[tp_rank] for part in whole.chunk(parts, dim)], dim)
        parameter.copy_(whole)


def whole_gradients(chunks: Sequence[Any], vocabulary: int, tp_group: Any) -> dict[str, torch.Tensor]:
    """Gradients of this stage's parameters by name, without padded tokens, on the host. Collective over `tp_group`."""
    gradients = {}
    for name, parameter in _parameters(chunks):
        dim, parts = _split(name, parameter)
        local = parameter.main_grad.detach().float()
        if dim is not None:
            shards = [torch.empty_like(local) for _ in range(tp_group.size())]
            dist.all_gather(shards, local.contiguous(), group=tp_group)
            pieces = [shard.chunk(parts, dim) for shard in shards]
            local = torch.cat([piece[part] for part in range(parts) for piece in pieces], dim)
        gradients[name] = (local[:vocabulary] if _of_vocabulary(name) else local).to("cpu", copy=True)
    return gradients


def _parameters(chunks: Sequence[Any]) -> list[tuple[str, Any]]:
    return [(_whole_name(gpt_of(chunk), name), p) for chunk in chunks for name, p in gpt_of(chunk).named_parameters()]


def _whole_name(gpt: Any, name: str) -> str:
    """A parameter's name in the whole model: layers of all pipeline stages, experts of all expert-parallel ranks."""
    if (match := re.match(r"decoder\.layers\.(\d+)\.", name)) is None:
        return name
    layer, rest = gpt.decoder.layers[int(match[1])], name[match.end() :]
    rest = re.sub(r"(?<=local_experts\.)\d+", lambda m: str(layer.mlp.local_expert_indices[int(m[0])]), rest)
    return f"decoder.layers.{layer.layer_number - 1}.{rest}"


def _of_vocabulary(name: str) -> bool:
    return "word_embeddings" in name or "output_layer" in name
