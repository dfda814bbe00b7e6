"""Abuses of checkpoints, resuming, terminals, open files and collectives."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.campaigns.abuse.runner import DONE, FAILED, TRAIN, Abuse
from tests.campaigns.abuse.scenes import RESUMING, complete, damaged, not_begun, two_checkpoints

NOT_WRITTEN = ("was changed after it was written", "The checkpoint before it is complete: resume with ")


def _shard(checkpoint: Path) -> Path:
    return min(checkpoint.glob("*.distcp"))


def _before(checkpoint: Path) -> Path:
    return checkpoint.with_name("rl-000001")


def exchanged(name: str) -> Callable[[Path], None]:
    """Replace a file by that of the previous checkpoint."""
    return lambda checkpoint: shutil.copy(_before(checkpoint) / name, checkpoint / name) and None


def shard_exchanged(checkpoint: Path) -> None:
    shutil.copy(_shard(_before(checkpoint)), _shard(checkpoint))


def random_cut(checkpoint: Path) -> None:
    file = checkpoint / "random-00001.pt"
    file.write_bytes(file.read_bytes()[:-1])


def shard_linked(checkpoint: Path) -> None:
    shard = _shard(checkpoint)
    shard.unlink()
    shard.symlink_to(_shard(_before(checkpoint)))


def shard_piped(checkpoint: Path) -> None:
    shard = _shard(checkpoint)
    shard.unlink()
    os.mkfifo(shard)


def bit_flipped(checkpoint: Path) -> None:
    shard = _shard(checkpoint)
    raw = bytearray(shard.read_bytes())
    raw[len(raw) // 2] ^= 1
    shard.write_bytes(raw)


def edited(name: str, change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    """Change values in a JSON file."""

    def act(checkpoint: Path) -> None:
        content = json.loads((checkpoint / name).read_text())
        change(content)
        (checkpoint / name).write_text(json.dumps(content))

    return act


def _above(manifest: dict[str, Any]) -> None:
    manifest["files"] = {f"../rl-000001/{name}": entry for name, entry in manifest["files"].items()}


def _broken(name: str, damage: Callable[[Path], object], *words: str) -> Abuse:
    return Abuse(
        name=f"resume: {name}", code=FAILED, settings=RESUMING, words=words or NOT_WRITTEN, scene=damaged(damage)
    )


WAITS = """
import torch.distributed as dist
from roll_batching.losses import LossOutput
class Waits:
    masks = ("response_mask",)
    def token_loss(self, tokens):
        if dist.get_rank() == 0:
            dist.barrier()
        return LossOutput(-tokens.mean(tokens.log_probs))
"""
STUCK = """
import time
def pack(items):
    while True:
        time.sleep(0.1)
"""


def _started_with(code: str) -> tuple[str, ...]:
    """Command line that runs `code` before the command."""
    imports = "import os, resource, sys"
    return ("-c", f"{imports}; {code}; os.execv(sys.executable, [sys.executable, *sys.argv[1:]])", *TRAIN)


RESUMES = [
    _broken("a shard of the checkpoint before", shard_exchanged),
    _broken("one bit of a shard", bit_flipped),
    _broken("a link to the shard of the checkpoint before", shard_linked),
    _broken("a pipe for a shard", shard_piped, "it is no regular file"),
    _broken("the manifest of the checkpoint before", exchanged("manifest.json"), "manifest.json)"),
    _broken("a manifest that names files above", edited("manifest.json", _above), "is malformed"),
    _broken("no manifest", lambda checkpoint: (checkpoint / "manifest.json").unlink(), "manifest.json is missing"),
    _broken("random numbers cut off", random_cut, "random-00001.pt has ", "and was written with"),
    _broken(
        "a step count of a million",
        edited("job.json", lambda job: job.update(step=10**6)),
        "says step 1,000,000 of rl, and its folder is rl-000002",
    ),
    Abuse(
        name="resume: another vocabulary of the same size",
        code=FAILED,
        settings=RESUMING,
        arguments=(*TRAIN, 'tokenizer.vocabulary="fedcba=$."'),
        words=("was trained with another vocabulary", "tokenizer.vocabulary"),
        scene=damaged(lambda checkpoint: None),
    ),
    Abuse(
        name="resume: fewer steps than were done",
        code=FAILED,
        settings=RESUMING,
        arguments=(*TRAIN, "max_steps=1"),
        words=("rl-000002 is at step 2 of rl, which has 1 steps here: raise max_steps",),
        scene=damaged(lambda checkpoint: None),
    ),
    Abuse(
        name="resume: a run that is complete",
        code=DONE,
        settings=RESUMING,
        words=("rl is complete: all of its 2 steps were done before",),
        scene=two_checkpoints,
    ),
    Abuse(
        name="resume: a path with ..",
        code=DONE,
        settings={**RESUMING, "resume_from_checkpoint": "runs/../runs/own_task/checkpoints/rl-000001"},
        scene=two_checkpoints,
    ),
]

PLATFORM = [
    Abuse(
        name="terminal: closed while the job runs",
        code=DONE,
        arguments=_started_with("r, w = os.pipe(); os.close(r); os.dup2(w, 1)"),
        scene=complete,
    ),
    Abuse(name="terminal: closed before it", code=DONE, arguments=_started_with("os.close(1)"), scene=complete),
    Abuse(
        name="terminal: full",
        code=DONE,
        arguments=_started_with("os.dup2(os.open('/dev/full', os.O_WRONLY), 1)"),
        scene=complete,
    ),
    Abuse(
        name="limits: ulimit -n 64",
        code=FAILED,
        arguments=_started_with("resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))"),
        words=("ulimit -n is 64", "ulimit -n 4096"),
        scene=not_begun,
    ),
    Abuse(
        name="packer: stuck",
        code=FAILED,
        settings={
            "actor_train.backend_timeout": 0.2,
            "actor_train.sequence_packing_args.algorithm": "packing_of_mine:pack",
        },
        files={"packing_of_mine.py": STUCK},
        words=("the packing algorithm 'packing_of_mine:pack' has not returned", "backend_timeout"),
    ),
    Abuse(
        name="loss: a barrier on one rank",
        code=FAILED,
        settings={"actor_train.backend_timeout": 0.2, "loss_function": "loss_of_mine:Waits"},
        files={"loss_of_mine.py": WAITS},
        words=("rank 0 failed: Waits timed out in a collective that not every rank entered", "loss_of_mine.py, line "),
    ),
]
