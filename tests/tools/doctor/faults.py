"""Faults that a rank of an examination plants in its own process, each with the real check that must name it."""

from __future__ import annotations

import errno
import fcntl
import importlib.metadata
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from roll_batching.settings.attention_backends import ATTENTION_BACKENDS, AttentionEntry
from roll_batching.strategy import MegatronTrainStrategy
from roll_batching.tools.doctor import machine, training
from roll_batching.tools.doctor.examination import ANSWERS, checks_of, examine, open_session
from tests.support.own_attention import MaskedSoftmax


def is_faulty() -> bool:
    return os.environ["RANK"] == "1"


def run_checks(payload: dict[str, Any]) -> None:
    """Plants a fault, runs the named checks, and writes this rank's records to `home`; ends although a rank hangs."""
    home = Path(payload["home"])
    folder = home / "shared"
    if planted := globals().get(payload["fault"]):
        folder = planted(folder) or folder
    session = open_session(folder, full=False)
    for name, value in payload["limits"].items():
        module = machine if hasattr(machine, name) else training
        assert hasattr(module, name)
        setattr(module, name, value)
    checks = [check for check in checks_of(session.world_size, full=False) if check.name in payload["checks"]]
    assert len(checks) == len(payload["checks"])
    records = examine(session, [check._replace(seconds=payload["seconds"]) for check in checks])
    (home / f"records-{session.rank}").write_text(json.dumps(records))
    session.close()
    sys.stdout.flush()
    os._exit(int(not session.passed[ANSWERS]))


# ---- faults


def wrong_backend(folder: Path) -> None:
    """A user's attention backend whose values on one rank are 1 % too large."""
    target = "tests.tools.doctor.faults:WrongOnOneRank"
    ATTENTION_BACKENDS._entries["mine"] = AttentionEntry(name="mine", target=target, summary="")


class WrongOnOneRank(MaskedSoftmax):
    name = "mine"

    def build_core(self, rotation: Any, **arguments: Any) -> torch.nn.Module:
        core = super().build_core(rotation, **arguments)
        core.register_forward_hook(lambda module, inputs, out: out * 1.01 if is_faulty() else out)
        return core


def failing_backend(folder: Path) -> None:
    """A backend that cannot run on one rank."""
    wrong_backend(folder)
    if is_faulty():
        WrongOnOneRank.build_core = lambda *_, **__: (_ for _ in ()).throw(RuntimeError("no kernel image"))


def slow_rank(folder: Path) -> None:
    if is_faulty():
        mm = torch.mm
        torch.mm = lambda *tensors: (time.sleep(0.02), mm(*tensors))[1]


def file_in_place_of_folder(folder: Path) -> Path | None:
    """What a rank without write access meets; as root, permissions keep nobody out."""
    file = folder.parent / "file"
    file.write_text("")
    return file if is_faulty() else None


def another_folder(folder: Path) -> Path | None:
    return folder.parent / "of-one-machine" if is_faulty() else None


def other_version(folder: Path) -> None:
    if is_faulty():
        version = importlib.metadata.version
        importlib.metadata.version = lambda name: "0.15.0" if name == "megatron-core" else version(name)


def old_versions(folder: Path) -> None:
    version = importlib.metadata.version
    importlib.metadata.version = lambda name: "0.15.0" if name == "megatron-core" else version(name)


def no_locks(folder: Path) -> None:
    def flock(*_: Any) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    if is_faulty():
        fcntl.flock = flock


def local_locks(folder: Path) -> None:
    """Locks that every machine keeps for itself, as NFS's with `nolock`."""
    fcntl.flock = lambda *_: None


def clock_an_hour_off(folder: Path) -> None:
    if is_faulty():
        now = time.time
        time.time = lambda: now() + 3600


def never_joins(folder: Path) -> None:
    if is_faulty():
        dist.broadcast = lambda *_, **__: time.sleep(1000)


def stopped_process(folder: Path) -> None:
    """The whole process stands still, as one that waits for a dead file system."""
    if is_faulty():
        dist.broadcast = lambda *_, **__: os.kill(os.getpid(), signal.SIGSTOP)


def wrong_broadcast(folder: Path) -> None:
    if is_faulty():
        broadcast = dist.broadcast
        dist.broadcast = lambda tensor, source: (broadcast(tensor, source), tensor[7:8].add_(1))


def wrong_receive(folder: Path) -> None:
    """A pipeline stage that receives another tensor than was sent."""
    if is_faulty():
        batch_isend_irecv = dist.batch_isend_irecv

        def wrong(operations: list[Any]) -> list[Any]:
            for request in batch_isend_irecv(operations):
                request.wait()
            operations[1].tensor[7:8].add_(1)
            return []

        dist.batch_isend_irecv = wrong


def wrong_token_exchange(folder: Path) -> None:
    """An all-to-all of tokens among expert-parallel ranks that returns other values on one of them."""
    all_to_all_single = dist.all_to_all_single

    def wrong(output: torch.Tensor, *arguments: Any, **keywords: Any) -> None:
        all_to_all_single(output, *arguments, **keywords)
        if is_faulty() and output.is_floating_point():
            output.mul_(1.1)

    dist.all_to_all_single = torch.distributed.all_to_all_single = wrong


def wrong_in_groups(folder: Path) -> None:
    """Gradients that go wrong only where several ranks train."""
    forward_backward = MegatronTrainStrategy.forward_backward

    def wrong(self: Any, *arguments: Any) -> Any:
        result = forward_backward(self, *arguments)
        if dist.get_world_size() > 1 and is_faulty():
            next(iter(self.chunks[0].parameters())).main_grad.mul_(1.01)
        return result

    MegatronTrainStrategy.forward_backward = wrong


def wrong_alone(folder: Path) -> None:
    if is_faulty():
        forward_backward = MegatronTrainStrategy.forward_backward
        MegatronTrainStrategy.forward_backward = lambda self, *a: (lambda r: (r[0] + 0.5, r[1]))(
            forward_backward(self, *a)
        )


def wrong_checkpoint(folder: Path) -> None:
    """One weight of one rank is another by its last bit after loading."""
    load = MegatronTrainStrategy.load

    def wrong(self: Any, path: Any) -> None:
        load(self, path)
        if is_faulty():
            weight = next(iter(self.chunks[0].parameters())).data.view(-1)
            weight[0] = torch.nextafter(weight[0], torch.tensor(9.0))

    MegatronTrainStrategy.load = wrong
