"""Abuses of a job with a critic: its models, values, checkpoints, packing algorithm and processes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from tests.campaigns.abuse.directories import FROM_MODEL, earlier, models, nothing_written, other_vocabulary, with_nan
from tests.campaigns.abuse.resume import STUCK
from tests.campaigns.abuse.runner import DONE, FAILED, REFUSED, TRAIN, Abuse
from tests.campaigns.abuse.scenes import RESUMING, complete, kill_rank, not_begun

PPO: dict[str, Any] = {
    "adv_estimator": "gae",
    "value_clip": 0.5,
    "whiten_advantages": True,
    "critic.training_args": {"learning_rate": 1e-3, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2},
    "critic.use_sequence_packing": True,
    "critic.sequence_packing_args": {"max_packed_sequence_length_train": 512},
}
"""Settings of a small job with a critic."""
SMALLER = {"vocab_size": 5, "hidden_size": 32, "ffn_hidden_size": 48, "num_layers": 2, "num_attention_heads": 4}
OTHER = {**SMALLER, "vocab_size": 9, "hidden_size": 48, "max_position_embeddings": 32}
WITH_DIRECTORY = {**PPO, **FROM_MODEL, "critic.model_args": {"model_name_or_path": "critic"}}
PACKER = "critic.sequence_packing_args.algorithm"
WAITING_PACKER = """
import pathlib, time
def pack(items):
    pathlib.Path("here").touch()
    while True:
        time.sleep(0.1)
"""


def _of_policy(checkpoint: Path) -> None:
    """The critic's folder gets the policy's files, all but those of the job."""
    shutil.rmtree(checkpoint / "critic")
    keep = shutil.ignore_patterns("job.json", "random-*", "critic")
    shutil.copytree(checkpoint, checkpoint / "critic", ignore=keep)


def _of_policy_with_manifest(checkpoint: Path) -> None:
    """As `_of_policy`, as a tool would leave it that writes manifests anew."""
    _of_policy(checkpoint)
    for folder in (checkpoint, checkpoint / "critic"):
        (folder / "manifest.json").unlink()
        record = json.loads((folder / "strategy.json").read_text())
        del record["manifest"]
        (folder / "strategy.json").write_text(json.dumps(record))


def _resumed(
    name: str, damage: Any, *words: str, code: int = FAILED, steps: int | None = None, **options: Any
) -> Abuse:
    scene = earlier("critic", PPO, damage, steps=steps)
    return Abuse(name=f"critic: {name}", code=code, settings={**PPO, **RESUMING}, words=words, scene=scene, **options)


CRITICS = [
    Abuse(name="critic: an ordinary job", code=DONE, settings=PPO, scene=complete),
    Abuse(
        name="critic: a smaller vocabulary",
        code=REFUSED,
        settings={**PPO, "critic.model_args.architecture": SMALLER},
        words=("critic.model_args.architecture.vocab_size", "is 5", "9"),
        lines=3,
        scene=not_begun,
    ),
    Abuse(
        name="critic: NaN in its model directory",
        code=FAILED,
        settings=WITH_DIRECTORY,
        words=("critic: ", "values is nan", "final_layernorm.weight are not finite", "model directory"),
        scene=models(with_nan("model.norm.weight", "critic/model.safetensors"), model="qwen3", critic="qwen3"),
    ),
    Abuse(
        name="critic: a directory with another tokenizer",
        code=REFUSED,
        settings=WITH_DIRECTORY,
        words=("critic.model_args.model_name_or_path", "gives other ids to its tokens", "choose a critic"),
        scene=models(other_vocabulary("critic"), left=nothing_written, model="qwen3", critic="llama3"),
    ),
    Abuse(
        name="critic: a model of another family",
        code=DONE,
        settings=WITH_DIRECTORY,
        scene=models(model="qwen3", critic="llama3"),
    ),
    Abuse(
        name="critic: a directory that does not exist",
        code=REFUSED,
        settings=WITH_DIRECTORY,
        words=("critic.model_args.model_name_or_path", "'critic'"),
        lines=3,
        scene=models(left=nothing_written, model="qwen3"),
    ),
    Abuse(
        name="critic: rewards beyond fp32",
        code=FAILED,
        settings=PPO,
        files={"scoring.py": "def reward(completion):\n    return 1e39 * completion.tokens\n"},
        words=("scoring:reward failed on sample ", "the reward is ", "above 1e+15"),
    ),
    _resumed(
        "no folder of it in the checkpoint", lambda point: shutil.rmtree(point / "critic"), "critic", "is missing"
    ),
    _resumed(
        "its checkpoint is the policy's",
        _of_policy,
        "critic/manifest.json has ",
        "belongs to another checkpoint",
        "The checkpoint before it is complete: resume with ",
    ),
    _resumed(
        "its checkpoint is the policy's, without manifests",
        _of_policy_with_manifest,
        "critic: ",
        "is of another model: value_head is False there and True here. A critic's checkpoint is the folder",
        lines=2,
    ),
    _resumed(
        "resumed with another architecture",
        lambda point: None,
        "critic: ",
        "hidden_size is 32 there and 48 here",
        arguments=(*TRAIN, f"critic.model_args.architecture={json.dumps(OTHER)}"),
    ),
    _resumed(
        "resumed with other settings",
        lambda point: None,
        "continues with changes since it was saved: ",
        "value_clip",
        "critic.training_args.learning_rate",
        code=DONE,
        steps=3,
        warnings=1,
        arguments=(*TRAIN, "max_steps=3", "value_clip=0.1", "critic.training_args.learning_rate=1e-4"),
    ),
    Abuse(
        name="critic: a packing algorithm that is stuck",
        code=FAILED,
        settings={**PPO, "actor_train.backend_timeout": 0.2, PACKER: "packing_of_mine:pack"},
        files={"packing_of_mine.py": STUCK},
        words=(
            "critic: planning: ",
            "the packing algorithm 'packing_of_mine:pack' has not returned",
            "backend_timeout",
        ),
    ),
    Abuse(
        name="critic: SIGKILL of a rank in its passes",
        code=FAILED,
        settings={**PPO, PACKER: "packing_of_mine:pack"},
        files={"packing_of_mine.py": WAITING_PACKER},
        words=("rank 1 was ended by signal 9 (SIGKILL)",),
        meddle=kill_rank,
    ),
]
