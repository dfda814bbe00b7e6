"""Isolates the model's code: in namespaces by bubblewrap or util-linux's `unshare` where they work, with limits."""

from __future__ import annotations

import functools
import inspect
import os
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from roll_batching.jobs.rewards.judged_code import supervisor
from roll_batching.lifetime import die_with_parent

_NOBODY = 65534
_MOST_PROCESSES = 256
"""Processes that the code may start, beyond those that its user runs already."""
_FILE_SIZE = 16 << 20
_TRY_SECONDS = 10.0
_BUBBLEWRAP = (
    "bwrap", "--unshare-user", "--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--die-with-parent",
    "--ro-bind", "/", "/", "--dev", "/dev", "--proc", "/proc",
)  # fmt: skip
_UNSHARE = (
    "unshare", "--user", "--map-current-user", "--pid", "--fork", "--kill-child", "--mount-proc", "--net", "--ipc",
    "--uts",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Sandbox:
    """A way to isolate the model's code."""

    tool: str
    """`bwrap` or `unshare`; empty for `supervisor`, which only ends child processes."""
    user: int | None
    """User id to run as instead of root; None: the current user."""

    def command(self, folder: Path, command: list[str]) -> list[str]:
        """The command line that runs `command` in `folder` inside the sandbox."""
        if self.tool == "bwrap":
            return [*_BUBBLEWRAP, "--bind", str(folder), str(folder), "--chdir", str(folder), *command]
        if self.tool == "unshare":
            # Process 1 of a namespace ignores signals without a handler: the shell is process 1, the code its child.
            return [*_UNSHARE, "sh", "-c", '"$@"; exit "$?"', "sh", *command]
        return [sys.executable, "-I", "-S", "-c", inspect.getsource(supervisor), str(os.getpid()), *command]

    def preexec(self, folder: Path, limits: Mapping[int, int]) -> Callable[[], None]:
        """Returns the `preexec_fn` of the command, which sets user and `limits`; the command ends with this process."""
        parent = os.getpid()
        if self.user is not None:
            os.chown(folder, self.user, self.user)
        processes = _count_processes(os.getuid() if self.user is None else self.user) + _MOST_PROCESSES
        limits = {
            **limits,
            resource.RLIMIT_NPROC: processes,
            resource.RLIMIT_FSIZE: _FILE_SIZE,
            resource.RLIMIT_CORE: 0,
        }

        def apply() -> None:
            if self.user is not None:
                os.setgroups([])
                os.setgid(self.user)
                os.setuid(self.user)
            die_with_parent(parent)
            for kind, limit in limits.items():
                hard = resource.getrlimit(kind)[1]  # below 0: unlimited
                allowed = limit if hard < 0 else min(limit, hard)
                resource.setrlimit(kind, (allowed, allowed))

        return apply

    def describe(self) -> str:
        """A notice about the isolation and its gaps."""
        user = "" if self.user is None else " as the user nobody"
        if self.tool:
            files = "reads your files" if self.tool == "bwrap" else "reads and writes your files"
            return f"judged code runs{user} in namespaces of {self.tool}, without network; it {files}"
        return (
            f"judged code runs{user} without a sandbox: it can read your files and use the network. Install "
            "bubblewrap, or allow user namespaces"
        )


def environment(folder: Path) -> dict[str, str]:
    """The environment of the model's code, without the job's variables."""
    return {"PATH": os.environ.get("PATH", ""), "LANG": "C.UTF-8", "HOME": str(folder), "TMPDIR": str(folder)}


@functools.cache
def best_sandbox() -> Sandbox:
    """The strongest sandbox that works on this machine."""
    users = [_NOBODY, None] if os.geteuid() == 0 else [None]
    tools = [tool for tool in ("bwrap", "unshare") if shutil.which(tool)]
    choices = [Sandbox(tool=tool, user=user) for user in users for tool in tools]
    choices += [Sandbox(tool="", user=user) for user in users]
    return next((choice for choice in choices[:-1] if _works(choice)), choices[-1])


def _works(sandbox: Sandbox) -> bool:
    """Whether a program that writes a file runs in `sandbox` on this machine."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        try:
            trial = subprocess.run(
                sandbox.command(folder, [sys.executable, "-I", "-c", "open('written', 'w')"]),
                cwd=folder,
                env=environment(folder),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                preexec_fn=sandbox.preexec(folder, {}),
                timeout=_TRY_SECONDS,
                check=False,
            )
        except (OSError, subprocess.SubprocessError):
            return False
        return trial.returncode == 0 and (folder / "written").exists()


def _count_processes(user: int) -> int:
    """Number of processes and threads of `user`, as `RLIMIT_NPROC` counts them."""
    count = 0
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if path.stat().st_uid == user:
                count += len(os.listdir(path / "task"))
        except OSError:  # the process has ended
            continue
    return count
