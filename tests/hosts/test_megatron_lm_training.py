"""Megatron-LM's `pretrain_gpt.py` on two processes: its losses are its own with our planner and shared prefixes."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.te.engine import needs_engine

pytestmark = needs_engine

LENGTHS = {"mode": "distribution", "type": "lognormal", "min_seq_len": 16, "max_seq_len": 200, "mean_seq_len": 80}
"""Megatron's mock samples count from 1, so that each is a prefix of all longer ones."""
ARGUMENTS = f"""
    --num-layers 2 --hidden-size 32 --ffn-hidden-size 64 --num-attention-heads 4 --seq-length 256
    --max-position-embeddings 256 --position-embedding-type rope --normalization RMSNorm --swiglu
    --disable-bias-linear --attention-dropout 0 --hidden-dropout 0 --use-cpu-initialization --micro-batch-size 1
    --global-batch-size 16 --train-iters 3 --lr 1e-3 --lr-decay-iters 3 --distributed-backend gloo
    --tokenizer-type NullTokenizer --vocab-size 512 --mock-data --use-varlen-dataset
    --sequence-packing-scheduler dp_balanced --max-seqlen-per-dp-cp-rank 256 --calculate-per-token-loss
    --sft-mock-dataset-config-json {json.dumps(LENGTHS | {"lognormal_sigma": 0.8}, separators=(",", ":"))}
    --no-gradient-accumulation-fusion --no-masked-softmax-fusion --no-bias-swiglu-fusion --no-rope-fusion
    --log-interval 1 --eval-iters 1 --eval-interval 100 --no-create-attention-mask-in-dataloader --num-workers 0
""".split()
LAYOUTS = {"data parallel": [], "tensor parallel": ["--tensor-model-parallel-size", "2", "--sequence-parallel"]}


def run_trainer(checkout: Path, way: str, arguments: list[str]) -> str:
    """What `tests.hosts.megatron_lm_trainer` prints on two processes."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["-m", "tests.hosts.megatron_lm_trainer", str(checkout), way, *arguments]
    # Without compilation, which asks for a GPU where torch.cuda says that there is one.
    environment = {"CUDA_DEVICE_MAX_CONNECTIONS": "1", "OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([str(checkout), os.getcwd()])
    # Megatron compiles a helper with the `python3` of PATH.
    environment["PATH"] = os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]])
    done = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, timeout=300)
    printed = done.stdout + done.stderr
    assert done.returncode == 0, printed[-4000:]
    return printed


def train(checkout: Path, way: str, layout: list[str]) -> tuple[list[list[float]], str]:
    """Loss and norm of the gradient of each step, and all that was printed."""
    printed = run_trainer(checkout, way, [*ARGUMENTS, *layout])
    steps = re.findall(r"lm loss: (\S+) .* grad norm: (\S+) ", printed)
    assert len(steps) == 3
    return [[float(value) for value in step] for step in steps], printed


@pytest.mark.parametrize("layout", LAYOUTS)
def test_losses_are_megatrons_with_our_plans_and_with_shared_prefixes(checkout: Path, layout: str) -> None:
    if not (checkout / "megatron/training/datasets/varlen_dataset.py").exists():
        pytest.skip("this Megatron-LM's training has no sequence-packing scheduler: dev has")
    plain, printed = train(checkout, "plain", LAYOUTS[layout])
    assert "roll-batching" not in printed
    assert plain[0][0] - plain[2][0] > 0.05, "the steps changed nothing"
    for way, text in (
        ("planned", r"plans for Megatron-LM"),
        ("shared", r"computed once behind this loop: 128 of the 25\d rows"),
    ):
        steps, printed = train(checkout, way, LAYOUTS[layout])
        assert re.search(text, printed)
        assert [loss for loss, _ in steps] == pytest.approx([loss for loss, _ in plain], abs=2e-6)
        assert [norm for _, norm in steps] == pytest.approx([norm for _, norm in plain], abs=1.1e-3)  # as printed


def test_a_model_that_megatron_lm_built_trains_under_from_parts(checkout: Path) -> None:
    no_packs = ("--use-varlen", "--sequence-packing", "dp_balanced", "--max-seqlen", "--sft-mock", "{")
    arguments = [word for word in ARGUMENTS if not word.startswith(no_packs)]
    arguments.pop(arguments.index("--calculate-per-token-loss") - 1)  # the value of --max-seqlen-per-dp-cp-rank
    printed = run_trainer(checkout, "parts", [*arguments, "--no-check-for-nan-in-loss-and-grad"])
    lines = re.findall(r"losses of a rank: ([\d. ]+)", printed)
    one, other = ([float(number) for number in line.split()] for line in lines)
    assert one == other and abs(one[0] - math.log(512)) < 0.1 and one[-1] < 0.85 * one[0]
