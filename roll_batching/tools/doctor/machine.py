"""Checks of installed versions, clocks, limits, and the folder of runs."""

from __future__ import annotations

import contextlib
import fcntl
import importlib.metadata
import os
import platform
import resource
import shutil
import socket
import statistics
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING

import roll_batching
from roll_batching.jobs.launch.devices import NEEDED

if TYPE_CHECKING:  # versions are read without importing torch
    from roll_batching.tools.doctor.session import Session, Steps

_NEEDED = (("torch", "2.6"), ("megatron-core", "0.16"), ("psutil", "5.9"))
"""Earliest versions. Without psutil Megatron's checkpoint writer hangs."""
_PACKAGES = (
    *"torch triton megatron-core numpy transformer-engine flash-attn flash-attn-4 nvidia-cutlass-dsl psutil".split(),
    *"ray vllm sglang verl slime".split(),
)
LEAST_SHARED_MEMORY = 1 << 30
_CLOCK_SECONDS = 5.0
_SEEN_SECONDS = 10.0  # NFS shows another machine's new file after some seconds


def package_versions() -> dict[str, str]:
    """Versions of python, this package, and installed packages that change results or speed."""
    versions = {"python": platform.python_version(), "roll-batching": roll_batching.__version__}
    for name in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return versions


def visible_gpus() -> list[str]:
    """`name, memory, driver version` of each GPU that nvidia-smi shows."""
    query = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip().splitlines()
    except (OSError, subprocess.CalledProcessError):
        return []


def check_installed(session: Session) -> Steps:
    """Another version of a library or driver on one machine."""
    import torch

    from roll_batching.distributed.consensus import describe_differences
    from roll_batching.packing import AttentionRequirements

    versions = package_versions() | {"GPU": ", ".join(sorted(set(visible_gpus()))) or "none"}
    if torch.cuda.is_available():
        versions |= {"CUDA": str(torch.version.cuda), "NCCL": ".".join(map(str, torch.cuda.nccl.version()))}
    machine = {"host": socket.gethostname(), "platform": platform.platform(), "cores": os.cpu_count()}
    values = yield {"versions": versions, "machine": machine}
    everyone = [value["versions"] for value in values]
    problems = [f"{name}: {text}" for name, text in describe_differences(range(len(values)), everyone).items()]
    problems += AttentionRequirements(libraries=_NEEDED).missing(everyone[0])
    shown = ", ".join(f"{name} {everyone[0][name]}" for name in ("torch", "megatron-core", "GPU"))
    return problems, f"ranks: {len(values)}, machines: {len({v['machine']['host'] for v in values})}; {shown}"


def check_clocks(session: Session) -> Steps:
    """Machines whose logs, certificates and file times do not fit together."""
    values = yield time.time()  # ranks begin a check within a fraction of a second
    offsets = [value - statistics.median_low(values) for value in values]
    problems = [f"clock of rank {i} off by {x:+.0f} s" for i, x in enumerate(offsets) if abs(x) > _CLOCK_SECONDS]
    return problems, f"within {max(map(abs, offsets)):.1f} s"


def check_resources(session: Session) -> Steps:
    """NCCL or data loaders that die of 'bus error' or 'too many open files'."""
    shared, has_infiniband = os.statvfs("/dev/shm"), Path("/dev/infiniband").exists()
    kinds, unlimited = (resource.RLIMIT_NOFILE, resource.RLIMIT_MEMLOCK), 2**63
    files, locked = (resource.getrlimit(kind)[1] % 2**64 for kind in kinds)  # unlimited is -1
    values = yield {
        "MiB free in /dev/shm": [shared.f_bavail * shared.f_frsize >> 20, LEAST_SHARED_MEMORY >> 20],
        "open files (ulimit -Hn)": [files, NEEDED],
        "bytes of locked memory (ulimit -Hl)": [locked, unlimited if has_infiniband else 0],
    }
    pairs = [(rank, name, *pair) for rank, value in enumerate(values) for name, pair in value.items()]
    problems = [f"rank {i}: {found:,} {name}, needed: {least:,}" for i, name, found, least in pairs if found < least]
    return problems, ", ".join(f"{found:,} {name}" for rank, name, found, _ in pairs[:2])


def _lock(session: Session, rank: int) -> bool:
    """Locks the file of `rank`; False while another process holds the lock. Raises OSError without locks."""
    lock = os.open(session.folder / f"lock-{rank}", os.O_RDWR | os.O_CREAT)
    session.kept.setdefault("locks", []).append(lock)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def check_folder(session: Session) -> Steps:
    """A run that fails at its first checkpoint, or two runs in one folder."""
    session.folder.mkdir(parents=True, exist_ok=True)
    file, partial = (session.folder / f"{name}-{session.rank}" for name in ("rank", "partial"))
    data = os.urandom(1 << 20) * (256 if session.full else 16)
    file.write_bytes(b"old")
    started = time.perf_counter()
    with partial.open("wb") as output:
        output.write(data)
        output.flush()
        os.fsync(output.fileno())
    seconds = time.perf_counter() - started
    os.replace(partial, file)
    if file.read_bytes() != data:
        raise OSError(f"{file} has other content than was written")
    try:
        _lock(session, session.rank)
    except OSError as error:
        raise OSError(f"this file system has no locks ({error.strerror}), so two runs could use one folder") from None
    values = yield len(data) / seconds / 1e6
    return [], f"the slowest rank writes {min(values):,.0f} MB/s"


def check_sharing(session: Session) -> Steps:
    """Checkpoints whose parts lie on different machines."""
    others = [rank for rank in range(session.world_size) if rank != session.rank]
    end, unseen = time.monotonic() + _SEEN_SECONDS, others
    while unseen and time.monotonic() < end:
        unseen = [rank for rank in others if not (session.folder / f"rank-{rank}").exists()]
        time.sleep(0.05)
    unlocked = [rank for rank in others if rank not in unseen and _lock(session, rank)]
    values = yield {"unseen": unseen, "unlocked": unlocked}
    problems = [f"rank {i} does not see files of ranks {v['unseen']}" for i, v in enumerate(values) if v["unseen"]]
    problems += [f"rank {i} gets locks held by {v['unlocked']}" for i, v in enumerate(values) if v["unlocked"]]
    return problems, "all ranks see all files, and locks exclude each other"


def remove_files(session: Session) -> None:
    """Releases this rank's locks, and removes the files of the examination."""
    for lock in session.kept.pop("locks", ()):
        os.close(lock)
    shutil.rmtree(session.folder, ignore_errors=True)  # on every rank: their folders may differ
