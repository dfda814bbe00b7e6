"""Functions that test ranks run on model directories."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.support.layouts import Layout
from tests.support.ranks import meet, part

CAP = 64


def role(
    directory: str | Path, layout: Layout | None = None, mode: str = "packed", vision: bool = False, **settings: Any
) -> Any:
    """A training role for the model in `directory`; `vision`: with its encoder."""
    from tests.support.models import worker_config

    config = worker_config(mode, CAP, megatron=(layout or Layout()).megatron(), **settings)
    dumped = config.model_dump(exclude={"model_args"}, exclude_unset=True)
    model = {"model_name_or_path": str(directory), "vision_encoder": vision}
    return type(config).model_validate(dumped | {"model_args": model})


def strategy_of(directory: str | Path, layout: Layout | None = None) -> Any:
    """A training strategy with the model in `directory`."""
    from roll_batching.strategy import MegatronTrainStrategy

    strategy = MegatronTrainStrategy(role(directory, layout))
    strategy.initialize()
    return strategy


def batch() -> Any:
    """`tiny.rows` as a batch, all of whose tokens are learnt."""
    from roll_batching.samples import SampleBatch
    from tests.huggingface.tiny import rows

    fields = {"input_ids": rows(), "response_mask": [torch.ones(len(row), dtype=torch.bool) for row in rows()]}
    return SampleBatch.from_lists(fields, {"input_ids": "token", "response_mask": "token"})


def share(place: Any) -> Any:
    """This data-parallel rank's part of `batch`."""
    whole = batch()
    return whole.select(torch.arange(place.dp_rank, len(whole), place.dp_size))


def log_probs(strategy: Any) -> list[torch.Tensor]:
    """As `tiny.log_probs`, of this rank's share."""
    from roll_batching.samples import collect, distribute, gather_lengths

    local = share(strategy.layout)
    plan = strategy.plan(gather_lengths(local), forward=True)
    found = collect(strategy.compute_log_probs(distribute(local, plan), plan), plan).to_lists("log_probs")
    return [row[:-1] for row in found]


def sft_losses(strategy: Any, steps: int, rate: float) -> list[float]:
    """As `tiny.sft_losses`."""
    from roll_batching.losses import SFTLoss
    from roll_batching.samples import distribute, gather_lengths
    from roll_batching.settings import TrainingArgs

    strategy.start_phase(TrainingArgs(learning_rate=rate, max_grad_norm=0.0))
    losses = []
    for _ in range(steps):
        local = share(strategy.layout)
        plan = strategy.plan(gather_lengths(local))
        losses.append(strategy.train_step(distribute(local, plan), plan, SFTLoss()).loss)
    return losses


def answers(payload: list[tuple[str, Layout, dict[str, Any]]]) -> list[dict[str, Any]]:
    """For each directory and layout: log-probs of this rank's share, and on request greedy tokens and losses."""
    found = []
    for number, (directory, layout, wanted) in enumerate(payload):
        meet(number)
        strategy = strategy_of(directory, layout)
        place = strategy.layout
        one: dict[str, Any] = {"dp_rank": place.dp_rank, "log_probs": log_probs(strategy)}
        if "greedy" in wanted:
            one["greedy"] = _greedy(strategy, wanted["greedy"])
        if "steps" in wanted:
            one["losses"] = sft_losses(strategy, wanted["steps"], wanted["rate"])
        if "again" in wanted:
            one["again"] = log_probs(strategy)
        if "export" in wanted:
            strategy.export(wanted["export"])
            one["streamed"] = streamed(strategy, wanted["export"])
        found.append(one)
        del strategy
        part()
    return found


def checkpointed(payload: tuple[str, Layout, str, str, bool]) -> None:
    """Trains and saves the model of a directory, or loads what was saved; exports it."""
    directory, layout, checkpoint, written, loads = payload
    strategy = strategy_of(directory, layout)
    if loads:
        strategy.load(checkpoint, optimizer=False)
    else:
        sft_losses(strategy, 1, 1e-3)
        strategy.save(checkpoint, optimizer=False)
    strategy.export(written)


def trained_and_written(payload: tuple[str, Layout, dict[str, Any]]) -> None:
    """Trains the model of a directory and exports it."""
    directory, layout, wanted = payload
    strategy = strategy_of(directory, layout)
    sft_losses(strategy, wanted["steps"], wanted["rate"])
    strategy.export(wanted["export"])


def gradients_written(payload: tuple[str, Layout, str]) -> None:
    """Writes the gradients of `sft_losses`' first step as a model directory: they take the places of the weights."""
    from roll_batching.modeling.head import gpt_of

    directory, layout, target = payload
    strategy = strategy_of(directory, layout)
    sft_losses(strategy, 1, 1e-3)
    with torch.no_grad():
        for chunk in strategy.chunks:
            for parameter in gpt_of(chunk).parameters():
                parameter.copy_(parameter.main_grad)
    strategy.export(target)


def log_probs_by(payload: tuple[str, Layout, str, str]) -> list[torch.Tensor]:
    """Log-probs of this rank's share by an attention backend, in packs or padded."""
    from roll_batching.strategy import MegatronTrainStrategy

    directory, layout, backend, mode = payload
    config = role(directory, layout, mode)
    megatron = config.strategy_args.strategy_config.model_copy(update={"attention_backend": backend})
    args = config.strategy_args.model_copy(update={"strategy_config": megatron})
    strategy = MegatronTrainStrategy(config.model_copy(update={"strategy_args": args}))
    strategy.initialize()
    return log_probs(strategy)


def streamed(strategy: Any, written: str, bucket_bytes: int = 20_000) -> list[int]:
    """Bytes of the buckets that reach rank 0; asserts that their tensors are exactly those of the directory."""
    from safetensors.torch import load_file

    from roll_batching.strategy.full_tensors import TensorStream

    stream = TensorStream(strategy.state, written, bucket_bytes)
    found, sizes = {}, []
    for bucket in stream.buckets():
        assert bucket.error is None
        assert bool(bucket.tensors) == (dist.get_rank() == 0)
        sizes.append(sum(tensor.nbytes for _, tensor in bucket.tensors))
        found |= dict(bucket.tensors)
    assert bucket.last
    if dist.get_rank() == 0:
        expected = {}
        for file in Path(written).glob("*.safetensors"):
            expected |= load_file(file)
        encoders = ("vision_tower.", "multi_modal_projector.", "model.visual.")  # not trained: engines have them
        if strategy.state.vision is None:
            expected = {name: tensor for name, tensor in expected.items() if not name.startswith(encoders)}
        assert found.keys() == expected.keys()
        for name, tensor in expected.items():
            assert found[name].dtype is tensor.dtype and torch.equal(found[name], tensor), name
    return sizes


def beyond_fp16(payload: tuple[str, Layout, str]) -> list[str]:
    """Errors of export and streaming for a model with values beyond fp16, the dtype of its files."""
    from roll_batching.distributed import consensus
    from roll_batching.errors import RankError
    from roll_batching.strategy.full_tensors import TensorStream

    directory, layout, target = payload
    strategy = strategy_of(directory, layout)
    with torch.no_grad():
        for name, parameter in strategy.state.chunks[0].named_parameters():
            if name.endswith("final_layernorm.weight"):
                parameter.fill_(1e6)
    said = []
    try:
        strategy.export(target)
    except RankError as error:
        said.append(str(error))
    try:
        for bucket in TensorStream(strategy.state, directory, 20_000).buckets():
            with consensus(strategy.layout.host_group, "streaming"):
                if bucket.error is not None:
                    raise bucket.error
    except RankError as error:
        said.append(str(error))
    return said


def _greedy(strategy: Any, new_tokens: int) -> list[list[int]]:
    from roll_batching.strategy import GenerationSettings

    settings = GenerationSettings(max_new_tokens=new_tokens, eos_token_id=-1, greedy=True)
    out = strategy.generate(share(strategy.layout), settings)
    return [row.tolist() for row in out.to_lists("input_ids")]
