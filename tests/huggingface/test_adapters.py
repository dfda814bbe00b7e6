"""LoRA on a model directory: merged and in PEFT's format, in checkpoints of other layouts, without the adapters."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from roll_batching.errors import CheckpointError, RankError
from tests.huggingface import tiny
from tests.support.layouts import Layout
from tests.support.ranks import meet, part, run_ranks

pytestmark = pytest.mark.models

HERE = "tests.huggingface.test_adapters:"
RANK, ALPHA, RATE = 4, 6.0, 1e-2
LORA = {"lora_target": "all-linear", "lora_rank": RANK, "lora_alpha": ALPHA}


def strategy_of(directory: str | Path, layout: Layout, **model_args: Any) -> Any:
    """A training strategy with adapters on the model in `directory`."""
    from roll_batching.strategy import MegatronTrainStrategy
    from tests.huggingface.ranks import role

    config = role(directory, layout)
    dumped = config.model_dump(exclude={"model_args"}, exclude_unset=True)
    args = {"model_name_or_path": str(directory), **(model_args or LORA)}
    strategy = MegatronTrainStrategy(type(config).model_validate(dumped | {"model_args": args}), seed=4)
    strategy.initialize()
    return strategy


def trained(payload: tuple[str, Layout, str]) -> dict[str, Any]:
    """Trains, exports and saves adapters; log-probs of this rank's share with them and by the reference."""
    from roll_batching.strategy.roles import BaseReference
    from tests.huggingface.ranks import log_probs, sft_losses, streamed

    directory, layout, to = payload
    strategy = strategy_of(directory, layout)
    before = log_probs(strategy)
    losses = sft_losses(strategy, 3, RATE)
    strategy.export(f"{to}/merged")
    buckets = streamed(strategy, f"{to}/merged")
    strategy.export_adapters(f"{to}/adapter")
    strategy.save(f"{to}/checkpoint")
    reference = BaseReference(strategy, strategy.config)
    return {
        "dp_rank": strategy.layout.dp_rank,
        "start": before,
        "losses": losses,
        "log_probs": log_probs(strategy),
        "reference": log_probs(reference),
        "buckets": buckets,
        "after": sft_losses_on(strategy),
    }


def sft_losses_on(strategy: Any) -> list[float]:
    """Losses of two more steps with the same optimizer."""
    from roll_batching.losses import SFTLoss
    from roll_batching.samples import distribute, gather_lengths
    from tests.huggingface.ranks import share

    local = share(strategy.layout)
    plan = strategy.plan(gather_lengths(local))
    return [strategy.train_step(distribute(local, plan), plan, SFTLoss()).loss for _ in range(2)]


def continued(payload: tuple[str, Layout, str]) -> dict[str, Any]:
    """Loads the checkpoint, and the PEFT directory, in another layout; exports the adapters again."""
    from roll_batching.settings import TrainingArgs
    from tests.huggingface.ranks import log_probs

    directory, layout, to = payload
    strategy = strategy_of(directory, layout)
    strategy.start_phase(TrainingArgs(learning_rate=RATE, max_grad_norm=0.0))
    strategy.load(f"{to}/checkpoint")
    strategy.export_adapters(f"{to}/again")
    with pytest.raises((CheckpointError, RankError), match="adapter exists: give another path"):
        strategy.export_adapters(f"{to}/adapter")
    return {"log_probs": log_probs(strategy), "after": sft_losses_on(strategy)}


def imported(payload: tuple[str, Layout, str]) -> list[torch.Tensor]:
    """Log-probs of a model whose adapters come from the PEFT directory."""
    from tests.huggingface.ranks import log_probs

    directory, layout, to = payload
    return log_probs(strategy_of(directory, layout, **LORA, adapter_name_or_path=f"{to}/adapter"))


def gap(found: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    """Largest difference."""
    return max(float((a - b).abs().max()) for a, b in zip(found, expected, strict=True) if len(a))


def plainly_merged(model: Any, adapter: Path) -> Any:
    """`model`, a transformers model, with `ALPHA / RANK * B A` of the PEFT directory added to its weights."""
    from safetensors.torch import load_file

    stored, weights = load_file(adapter / "adapter_model.safetensors"), dict(model.named_parameters())
    used = set()
    with torch.no_grad():
        for name, weight in weights.items():
            a, b = (f"base_model.model.{name.removesuffix('.weight')}.lora_{side}.weight" for side in "AB")
            if a in stored:
                weight += ALPHA / RANK * stored[b] @ stored[a]
                used |= {a, b}
    assert used == set(stored)
    return model


@pytest.mark.parametrize("layout", [Layout(tp=2, sp=True)], ids=str)
def test_merged_peft_and_checkpoint_agree(tmp_path, layout, report):
    from transformers import AutoModelForCausalLM

    base = tiny.write_model(tmp_path / "model", "qwen3")
    tiny.write_tokenizer(tmp_path / "model")
    payload = (str(tmp_path / "model"), layout, str(tmp_path))
    first, *_ = run_ranks(2, f"{HERE}trained", payload)
    with torch.no_grad():
        plain = tiny.log_probs(base)
        assert gap(first["start"], plain) < 1e-5 and gap(first["reference"], plain) < 1e-5
        moved = gap(first["log_probs"], plain)
        merged = tiny.log_probs(AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32).eval())
        peft = tiny.log_probs(plainly_merged(base, tmp_path / "adapter"))
    gaps = {"merged": gap(first["log_probs"], merged), "PEFT": gap(first["log_probs"], peft)}
    report(
        f"training moved log-probs by {moved:.1e}; merged export {gaps['merged']:.1e}, PEFT files {gaps['PEFT']:.1e}"
    )
    assert max(gaps.values()) < 1e-5 and moved > 1e-2
    assert first["losses"][2] < first["losses"][0]
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["peft_type"]) == (RANK, ALPHA, "LORA")
    assert config["target_modules"] == ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]
    record = json.loads((tmp_path / "checkpoint" / "strategy.json").read_text())
    assert record["adapters"]["base"]["sizes"].keys() == {"config.json", "model.safetensors"}
    size = sum(file.stat().st_size for file in (tmp_path / "checkpoint").glob("*.distcp"))
    whole = (tmp_path / "model" / "model.safetensors").stat().st_size
    report(f"checkpoint with optimizer state {size:,} bytes, model {whole:,}")

    (other,) = run_ranks(1, f"{HERE}continued", (str(tmp_path / "model"), Layout(), str(tmp_path)))
    assert gap(other["log_probs"], merged) < 1e-5
    assert other["after"] == pytest.approx(first["after"], rel=1e-4)
    for name in ("adapter_model.safetensors", "adapter_config.json"):
        assert (tmp_path / "again" / name).read_bytes() == (tmp_path / "adapter" / name).read_bytes()
    found, _ = run_ranks(2, f"{HERE}imported", (str(tmp_path / "model"), Layout(pp=2), str(tmp_path)))
    assert gap(found, merged) < 1e-5


def with_nan(file: Path) -> None:
    """Writes NaN into one tensor of a safetensors file."""
    from safetensors.torch import load_file, save_file

    tensors = load_file(file)
    next(iter(tensors.values())).view(-1)[0] = float("nan")
    save_file(tensors, file)


def refused(payload: tuple[str, str]) -> dict[str, str]:
    """Messages of loads that cannot work, by name."""
    from roll_batching.errors import RollBatchingError

    directory, to = payload
    cases: dict[str, tuple[str, dict[str, Any]]] = {
        "no adapters": (directory, {"dtype": "fp32"}),
        "other rank": (directory, {**LORA, "lora_rank": 8}),
        "other target": (directory, {**LORA, "lora_target": "q_proj,v_proj"}),
        "other model": (f"{to}/merged", LORA),
    }
    messages = {}
    for name, (model, args) in cases.items():
        meet(name)
        strategy = strategy_of(model, Layout(), **args)
        try:
            strategy.load(f"{to}/checkpoint", optimizer=False)
        except RollBatchingError as error:
            messages[name] = str(error)
        del strategy
        part()
    configs = {"rslora": {"use_rslora": True}, "rank 2": {"r": 2}, "qalora": {"use_qalora": True}}
    configs |= {"pissa": {"init_lora_weights": "pissa_niter_4"}, "no file": None, "nan": {"revision": "a"}}
    for name, changes in configs.items():
        folder = Path(to) / name
        shutil.copytree(f"{to}/adapter", folder)
        if changes is None:
            (folder / "adapter_model.safetensors").unlink()
        else:
            file = folder / "adapter_config.json"
            file.write_text(json.dumps(json.loads(file.read_text()) | changes))
        if name == "nan":
            with_nan(folder / "adapter_model.safetensors")
        meet(name)
        try:
            strategy_of(directory, Layout(), **LORA, adapter_name_or_path=str(folder))
        except RollBatchingError as error:
            messages[name] = str(error)
        part()
    return messages


@pytest.mark.bad_input
def test_what_does_not_fit_is_named(tmp_path, report):
    tiny.write_model(tmp_path / "model", "qwen3")
    tiny.write_tokenizer(tmp_path / "model")
    run_ranks(1, f"{HERE}trained", (str(tmp_path / "model"), Layout(), str(tmp_path)))
    (messages,) = run_ranks(1, f"{HERE}refused", (str(tmp_path / "model"), str(tmp_path)))
    for name, words in {
        "no adapters": "set model_args.lora_target: q_proj,k_proj,v_proj,o_proj,gate_proj,up_proj,down_proj",
        "other rank": "lora_rank is 4 there and 8 here",
        "other target": "lora_target is",
        "other model": "model.safetensors differ in size or content",
        "rslora": "use_rslora is True",
        "rank 2": "r is 2, and lora_rank is 4",
        "no file": "cannot be read",
        "qalora": "use_qalora is True, a key that is unknown here",
        "pissa": "init_lora_weights is 'pissa_niter_4'",
        "nan": "adapter_model.safetensors holds NaN or infinities",
    }.items():
        report(f"{name}: {messages.get(name)}")
        assert words in messages[name], name


def experts(payload: tuple[str, Layout, str]) -> list[torch.Tensor]:
    """Trains adapters of experts; exports the merged model."""
    from tests.huggingface.ranks import log_probs, sft_losses

    directory, layout, to = payload
    strategy = strategy_of(directory, layout)
    sft_losses(strategy, 2, RATE)
    strategy.export(f"{to}/merged")
    return log_probs(strategy)


@pytest.mark.slow
def test_experts_are_merged(tmp_path, report):
    from transformers import AutoModelForCausalLM

    tiny.write_model(tmp_path / "model", "qwen3_moe")
    tiny.write_tokenizer(tmp_path / "model")
    payload = (str(tmp_path / "model"), Layout(dp=2, ep=2, moe=True), str(tmp_path))
    found = run_ranks(2, f"{HERE}experts", payload)
    with torch.no_grad():
        merged = tiny.log_probs(AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32).eval())
    for rank, rows in enumerate(found):
        difference = gap(rows, merged[rank::2])
        report(f"rank {rank}: {difference:.1e}")
        assert difference < 1e-5


def described(folder: str) -> str:
    """The error of describing adapters on a model whose directory the second rank does not see, or sees cut."""
    from types import SimpleNamespace

    import torch.distributed as dist

    from roll_batching.distributed.parallel_layout import start_processes
    from roll_batching.errors import RollBatchingError
    from roll_batching.strategy.adapter_checkpoint import describe_adapters
    from roll_batching.strategy.model_state import AdapterState

    start_processes()
    found = []
    for other in ("nowhere", "cut"):
        base = f"{folder}/{other if dist.get_rank() else 'whole'}"
        adapters = AdapterState(targets=("q_proj",), rank=RANK, alpha=ALPHA, base=base)
        try:
            describe_adapters(SimpleNamespace(adapters=adapters), dist.group.WORLD)  # type: ignore[arg-type]
        except RollBatchingError as error:
            found.append(str(error))
    return "\n".join(found)


@pytest.mark.bad_input
def test_a_frozen_model_that_one_machine_lacks_is_an_error_on_all_ranks(tmp_path, report):
    for name, size in (("whole", 8), ("cut", 7)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text('{"model_type": "qwen3"}')
        (tmp_path / name / "model.safetensors").write_bytes(bytes(size))
    for message in run_ranks(2, f"{HERE}described", str(tmp_path)):
        report(message)
        assert "rank 1" in message and "nowhere" in message and "has other files on other machines" in message
