"""verl's PPO trainer with its own workers on two ranks, our balance and our passes: updates are a plain model's."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.hosts import host_verl, verl_trainer
from tests.hosts.roll_actor import make_model

ROOT = Path(__file__).resolve().parents[2]
MEGATRON = "actor_rollout_ref.actor.megatron"
LAYOUTS = {
    "DP 2": [],
    "CP 1 to 2": [f"{MEGATRON}.dynamic_context_parallel=true", f"{MEGATRON}.max_seqlen_per_dp_cp_rank=32"],
    "TP 2": [
        f"{MEGATRON}.tensor_model_parallel_size=2",
        f"+{MEGATRON}.override_transformer_config.sequence_parallel=false",
    ],
}
"""Without TransformerEngine, norms of layers have no sequence parallelism."""


def run_trainer(folder: Path, overrides: list[str]) -> tuple[dict[str, Any], str]:
    """The report of verl's trainer, and what it and its workers printed."""
    env = {
        **os.environ,
        "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}",
        "OMP_NUM_THREADS": "1",
        "VERL_PLATFORM": "cpu",
        "VERL_ENGINE_DEVICE": "cuda",  # the engine's name in verl's registry
        "VERL_USE_EXTERNAL_MODULES": "tests.hosts.verl_cpu_platform",
    }
    command = [sys.executable, "-m", "tests.hosts.verl_trainer", str(folder / "model"), str(folder / "report")]
    done = subprocess.run(
        [*command, *overrides], cwd=folder, env=env, text=True, stdout=-1, stderr=subprocess.STDOUT, timeout=600
    )
    assert done.returncode == 0, done.stdout[-6000:]
    return pickle.loads((folder / "report").read_bytes()), done.stdout


def log_probs(model: Any, fields: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """[samples, width - 1] log-probs and entropies of padded rows."""
    ids = fields["input_ids"]
    every = model(ids, attention_mask=fields["attention_mask"]).logits[:, :-1].float().log_softmax(-1)
    return every.gather(-1, ids[:, 1:, None])[..., 0], -(every.exp() * every).sum(-1)


def train_plainly(folder: Path, orders: list[torch.Tensor], dp_size: int) -> dict[str, Any]:
    """The same updates of the Hugging Face model, with verl's loss on whole mini-batches."""
    from transformers import Qwen3ForCausalLM

    model = Qwen3ForCausalLM.from_pretrained(folder, attn_implementation="eager").float()
    optimizer = torch.optim.AdamW(model.parameters(), lr=verl_trainer.LEARNING_RATE, weight_decay=0.0)
    fields = verl_trainer.make_fields()
    report: dict[str, Any] = {"losses": [], "norms": [], "passes": []}
    for order in [*orders, None]:
        with torch.no_grad():
            old, entropy = log_probs(model, fields)
        report["passes"].append((old, entropy))
        if order is None:
            return report
        shares = order.view(dp_size, -1).split(verl_trainer.MINI_BATCH // dp_size, dim=1)
        for rows in (share.flatten() for share in shares):
            part = {name: values[rows] for name, values in fields.items()}
            part["old"] = old[rows] * part["response_mask"][:, 1:]
            loss = host_verl.plain_loss("token-mean", part, *log_probs(model, part))
            optimizer.zero_grad()
            loss.backward()
            report["norms"].append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
            report["losses"].append(float(loss.detach()))
            optimizer.step()
    return report


def test_packs_over_ranks_need_an_even_number_of_them(tmp_path: Path) -> None:
    make_model(tmp_path / "model")
    with pytest.raises(
        AssertionError, match="with 1 data-parallel ranks and context_parallel_size 1: it needs an even"
    ):
        run_trainer(tmp_path, [*LAYOUTS["CP 1 to 2"], *LAYOUTS["TP 2"]])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_updates_of_the_trainer_are_those_of_a_plain_model(tmp_path: Path, layout: str) -> None:
    make_model(tmp_path / "model")
    report, printed = run_trainer(tmp_path, LAYOUTS[layout])
    assert report["balance"] == "roll_batching.integrations.verl"
    assert "verl's passes over micro-batches are planned packs now" in printed
    plain = train_plainly(tmp_path / "model", report["orders"], 1 if layout == "TP 2" else 2)
    losses = [loss for update in report["updates"] for loss in update["loss"]]
    norms = [norm for update in report["updates"] for norm in update["grad_norm"]]
    assert losses == pytest.approx(plain["losses"], rel=1e-5, abs=1e-6)
    assert norms == pytest.approx(plain["norms"], rel=1e-4)
    fields = verl_trainer.make_fields()
    prompts, lengths = fields["prompts"].tolist(), fields["lengths"].tolist()
    for (rows, *passes), wanted in zip(report["passes"], plain["passes"], strict=True):
        for values, expected in zip(passes, wanted, strict=True):
            for row, one in zip(rows.tolist(), values, strict=True):
                right = expected[row, prompts[row] - 1 : lengths[row] - 1]
                assert float((one[: len(right)] - right).abs().max()) < 1e-4
    first, last = plain["passes"][0][0], plain["passes"][-1][0]
    assert float((first - last).abs().max()) > 1e-2, "the updates changed nothing"
