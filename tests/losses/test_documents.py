"""The code of docs/custom-losses.md and examples/custom_loss.py runs and computes its formulas."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.losses.steps import gap, make_strategy, step
from tests.support.ranks import ROOT, run_ranks

pytestmark = pytest.mark.loss

HERE = "tests.losses.test_documents:"


def documented() -> dict[str, Any]:
    """The names that the page's code blocks define, run one after the other."""
    text = (ROOT / "docs" / "custom-losses.md").read_text()
    names: dict[str, Any] = {}
    for block in re.findall(r"```python\n(.*?)```", text, re.S):
        exec(compile(block, "custom-losses.md", "exec"), names)
    return names


def batch() -> Any:
    from tests.support.models import random_batch

    data = random_batch(3, 9, 30)
    g = torch.Generator().manual_seed(5)
    extra = {
        "teacher_ids": torch.randint(0, 61, (data.num_tokens, 3), generator=g),
        "teacher_probabilities": torch.rand(data.num_tokens, 3, generator=g).softmax(-1),
        "token_mask": data["response_mask"],
    }
    return data.with_fields(extra, dict.fromkeys(extra, "token"))


def nemo_style(next_token_logprobs: Any, data: Any, global_valid_seqs: Any, global_valid_toks: Any) -> Any:
    """A policy-gradient loss as NeMo-RL's are written: one padded row, token order, global counts."""
    mask = data["token_mask"][:, 1:] * data["sample_mask"][:, None]
    ratio = (next_token_logprobs - data["old_log_probs"][:, 1:]).exp()
    return (-ratio * mask).sum() / global_valid_toks, {"tokens": mask.sum().item()}


def losses() -> dict[str, Any]:
    page = documented()
    nemo = page["NeMoLoss"](nemo_style, ("old_log_probs",))
    made = {"CISPO": page["CISPO"](), "EntropyFloor": page["EntropyFloor"](3.9)}
    return made | {"TopKDistillation": page["TopKDistillation"](61), "NeMoLoss": nemo}


def cispo(log_p: Any, lp: Any, f: Any, a: Any) -> Any:
    return -(lp - f["old_log_probs"]).exp().clip(max=2).detach() * a * lp


def entropy_floor(log_p: Any, lp: Any, f: Any, a: Any) -> Any:
    return -lp + (3.9 + (log_p.exp() * log_p).sum(-1)).clamp(min=0)


def distilled(log_p: Any, lp: Any, f: Any, a: Any) -> Any:
    return -(f["teacher_probabilities"] * log_p.gather(1, f["teacher_ids"])).sum(-1)


def ratio(log_p: Any, lp: Any, f: Any, a: Any) -> Any:
    return -(lp - f["old_log_probs"]).exp()


def token_mean(model: Any, data: Any, of_rows: Any) -> Any:
    """Loss and gradients of a token mean, one unpacked sequence at a time through stock Megatron."""
    from tests.support.reference import gradients

    total, count = torch.zeros(()), 0
    for i, tokens in enumerate(data.to_lists("input_ids")):
        mask, length = data.to_lists("response_mask")[i][1:].bool(), len(tokens)
        hidden_from = torch.ones(1, 1, length, length).triu(1).bool()
        log_p = model(tokens[None], torch.arange(length)[None], hidden_from)[0, :-1].log_softmax(-1)
        fields = {name: data.to_lists(name)[i] for name, spec in data.schema.items() if spec.per_token}
        fields = {n: v[1:] if data.schema[n].kind == "token" else v[:-1] for n, v in fields.items()}
        log_probs = log_p.gather(1, tokens[1:, None])[:, 0]
        count += int(mask.sum())
        total = total + of_rows(log_p, log_probs, fields, data["advantages"][i])[mask].sum()
    return float(total / count), gradients(model, total / count)


def against_formulas(_: None) -> dict[str, tuple[float, float]]:
    from tests.support.reference import stock_model

    strategy, data = make_strategy(), batch()
    model = stock_model()
    formulas = {"CISPO": cispo, "EntropyFloor": entropy_floor, "TopKDistillation": distilled, "NeMoLoss": ratio}
    return {
        name: gap(step(strategy, data, loss), token_mean(model, data, formulas[name]))
        for name, loss in losses().items()
    }


def values(megatron: dict[str, Any]) -> dict[str, tuple[Any, float]]:
    """((loss, gradients), metric "tokens") of each loss."""
    strategy, found = make_strategy(megatron=megatron), {}
    for name, loss in losses().items():
        result, gradients = step(strategy, batch(), loss)
        found[name] = ((result.loss, gradients), result.metrics.get("tokens", 0.0))
    return found


def test_the_losses_of_the_page_equal_their_formulas() -> None:
    found = run_ranks(1, HERE + "against_formulas")[0]
    assert set(found) == {"CISPO", "EntropyFloor", "TopKDistillation", "NeMoLoss"}
    assert all(max(gaps) < 1e-5 for gaps in found.values()), found


def test_and_in_other_layouts_too() -> None:
    whole = run_ranks(1, HERE + "values", {})[0]
    counted = sum(int(mask[1:].sum()) for mask in batch().to_lists("response_mask"))
    assert whole["NeMoLoss"][1] == counted
    for megatron in ({"tensor_model_parallel_size": 2}, {"context_parallel_size": 2}):
        for found in run_ranks(2, HERE + "values", megatron):
            for name, (value, tokens) in found.items():
                assert max(gap(value, whole[name][0])) < 1e-5 and tokens == whole[name][1], (name, megatron)


@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_the_example_learns(processes: int) -> None:
    path = Path("examples") / "custom_loss.py"
    assert len((ROOT / path).read_text().splitlines()) < 60
    command = [sys.executable, str(path)]
    if processes > 1:
        command[1:1] = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    environment = dict(os.environ, OMP_NUM_THREADS="1", PYTHONPATH=str(ROOT))
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=170)
    assert done.returncode == 0, done.stdout + done.stderr
    nll = [float(x) for x in re.findall(r"nll ([\d.]+)", done.stdout)]
    assert len(nll) == 20 and nll[0] > 3.5 and nll[-1] < 1.0, nll
