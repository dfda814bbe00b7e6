"""ROLL's RLVR actor, with its own strategy and with ours: three training steps are the same.

Its rollouts give the same samples.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from roll_batching.integrations.batches import make_host_fields, read_host_batch
from tests.hosts import stand_ins

ROOT = Path(__file__).resolve().parents[2]
LAYOUTS = {
    "data parallel": [],
    "tensor parallel": ["tensor_model_parallel_size=2"],
    "pipeline": ["pipeline_model_parallel_size=2"],
}
CP_SIZES = [
    "max_cp_size=2",
    "packing.max_packed_sequence_length_train=64",
    "packing.max_packed_sequence_length_forward=64",
]
"""Packs of CP 1 and 2, as a rank holds 32 tokens and samples have up to 48, which ROLL's own strategy does not have."""
LOSSES = {
    "token mean": [],
    "sequence mean": ['pipeline.loss_agg_mode="seq-mean-token-mean"', 'pipeline.importance_sampling="seq"'],
    "without scaling": ["role.apply_loss_scale=false"],
}


def run_actor(folder: Path, checkout: Path, kind: str, overrides: list[str], check: bool = True) -> Any:
    report = folder / f"{kind}.json"
    paths = [ROOT, checkout, checkout / "mcore_adapter" / "src"]
    env = {
        **os.environ,
        "PYTHONPATH": ":".join(map(str, paths)),
        "RANKS": "2",
        "ROLL_LOG_DIR": str(folder),
        "LOUD": "1",
    }
    command = [sys.executable, "-m", "tests.hosts.roll_actor", str(folder / "model"), kind, str(report)]
    # In fp32 ROLL's entropy reads logits that its log-probs have changed in place: it is compared with a coefficient 0.
    command += ["pipeline.entropy_loss_coef=0", *overrides]
    (folder / "model").mkdir(exist_ok=True)
    done = subprocess.run(command, cwd=folder, env=env, text=True, stdout=-1, stderr=subprocess.STDOUT, timeout=600)
    if not check:
        return done.stdout
    assert done.returncode == 0, done.stdout[-6000:]
    for text, of in (("planned packs now", "planned"), ("computed once behind this loop", "prefixes")):
        assert (text in done.stdout) == (kind == of), "the other strategy ran"
    return json.loads(report.read_text())


def worst_metric(plain: dict[str, Any], planned: dict[str, Any]) -> float:
    """Largest difference of a sum, norm or learning rate in the three steps; both have the same keys."""
    worst = 0.0
    for one, other in zip(plain["metrics"], planned["metrics"], strict=True):
        assert one.keys() == other.keys()
        for key in one:
            if key.endswith(("@sum", "/grad_norm", "/lr")):
                gap = np.ravel(one[key]).astype(float) - np.ravel(other[key]).astype(float)
                worst = max(worst, float(np.abs(gap).max()))
    return worst


@pytest.mark.parametrize(
    ("layout", "loss"),
    [
        *((layout, "token mean") for layout in LAYOUTS),
        *(("data parallel", loss) for loss in list(LOSSES)[1:]),
        ("sizes per pack", "token mean"),
    ],
)
def test_three_steps_of_the_actor_are_those_of_roll(tmp_path: Path, checkout: Path, layout: str, loss: str) -> None:
    overrides = [*LAYOUTS.get(layout, []), *LOSSES[loss]]
    plain = run_actor(tmp_path, checkout, "plain", overrides)
    sizes = CP_SIZES if layout == "sizes per pack" else []
    planned = run_actor(tmp_path, checkout, "planned", [*overrides, *sizes])
    compared = 0
    for own, ours in zip(plain, planned, strict=True):
        assert worst_metric(own, ours) < 2e-6
        for name in own.keys() & {"before", "after"}:
            # Adam's steps are of one size however small a gradient is, and context parallelism adds in another order.
            limit = 5e-5 if sizes and name == "after" else 5e-6
            assert np.abs(np.array(own[name]) - np.array(ours[name])).max() < limit
            compared += 1
    assert compared >= 2
    (first, *_) = (report for report in planned if "before" in report)
    moved = np.abs(np.array(first["before"]) - np.array(first["after"])).max()
    assert moved > 1e-2, "the steps changed nothing"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_log_probs_behind_its_own_packing_are_those_of_roll(
    tmp_path: Path, checkout: Path, monkeypatch: pytest.MonkeyPatch, layout: str
) -> None:
    """ROLL cannot train its own packs in fp32: it slices logits that the loss of the slice before changed in place."""
    monkeypatch.setenv("STEPS", "0")
    reports = [run_actor(tmp_path, checkout, kind, LAYOUTS[layout]) for kind in ("plain", "prefixes")]
    compared = 0
    for own, ours in zip(*reports, strict=True):
        for name in own.keys() & {"before", "entropy_before"}:
            assert np.abs(np.array(own[name]) - np.array(ours[name])).max() < 5e-6
            compared += 1
    assert compared >= 2


@pytest.mark.parametrize(
    ("override", "text"),
    [
        ("role.use_sequence_packing=false", "use_sequence_packing must be true"),
        ('packing.algorithm="none"', "algorithm must be load_balance"),
        ("role.use_dynamic_batching_in_train=true", "use_dynamic_batching_in_train must be false"),
        ("packing.max_packed_sequence_length_train=16", "exceeds max_tokens=16"),
        (
            "max_cp_size=2 pipeline.ppo_epochs=2 pipeline.enable_old_logprobs_recompute=false",
            "max_cp_size with ppo_epochs above 1 needs enable_old_logprobs_recompute: true",
        ),
    ],
)
def test_what_it_cannot_do_is_refused_by_name(tmp_path: Path, checkout: Path, override: str, text: str) -> None:
    assert text in run_actor(tmp_path, checkout, "planned", override.split(" "), check=False)


def test_samples_of_a_rollout(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """ROLL pads prompts on the left, samples, and shifts whole rows to the left."""
    monkeypatch.syspath_prepend(str(checkout))
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    stand_ins.install()
    from roll.distributed.scheduler.protocol import DataProto
    from roll.utils.functionals import postprocess_generate

    prompts, responses = [[5, 6, 7], [8], [9, 5]], [[11, 12], [13, 14, 15, 2], [2]]
    left = torch.tensor([[0] * (3 - len(one)) + one for one in prompts])
    right = torch.tensor([one + [0] * (4 - len(one)) for one in responses])
    mask = (left != 0).long()
    asked = DataProto.from_dict(
        {"input_ids": left, "attention_mask": mask, "position_ids": (mask.cumsum(-1) - 1).clamp(min=0)}
    )
    chances = [[-0.1 * token for token in one] for one in responses]
    rollout = postprocess_generate(
        asked, torch.cat([left, right], 1), 1, 9, eos_token_id=2, pad_token_id=0, output_logprobs=chances
    )
    rollout.non_tensor_batch["domain"] = np.array([1, 2, 3], dtype=object)
    forms = {"input_ids": "token", "response_mask": "token", "infer_logprobs": "next_token", "domain": "sample"}
    batch = read_host_batch(rollout, forms, padding_side="right")
    rows = [one + two for one, two in zip(prompts, responses, strict=True)]
    assert [row.tolist() for row in batch.to_lists("input_ids")] == rows and batch["domain"].tolist() == [1, 2, 3]
    for row, (first, own) in enumerate(zip(prompts, chances, strict=True)):
        assert batch.to_lists("infer_logprobs")[row][len(first) - 1 : -1].tolist() == pytest.approx(own)
        assert int(batch.to_lists("response_mask")[row].sum()) == len(own)
    for name, written in make_host_fields(batch, rollout, forms).items():
        assert name == "domain" or torch.equal(written, rollout.batch[name])
