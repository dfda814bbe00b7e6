"""What judged code is run in: namespaces by bubblewrap or util-linux's `unshare` where they work here, and limits."""

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

from roll_batching.jobs.rewards.judged_code import keeper
from roll_batching.lifetime import die_with_parent

_NOBODY = 65534
_MOST_PROCESSES = 256
"""That judged code may have beyond what its user runs already."""
_FILE_SIZE = 16 << 20
_SECONDS_TO_TRY = 10.0
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
    """How judged code is kept apart."""

    tool: str
    """`bwrap`, `unshare`, or nothing: a keeper, which ends what it starts."""
    user: int | None
    """The user that it runs as, in place of root; None: this one."""

    def command(self, folder: Path, words: list[str]) -> list[str]:
        """The command line that runs `words` in `folder`."""
        if self.tool == "bwrap":
            return [*_BUBBLEWRAP, "--bind", str(folder), str(folder), "--chdir", str(folder), *words]
        if self.tool == "unshare":
            # The first process of a namespace ignores signals of its own: a shell is that, and judged code its child.
            return [*_UNSHARE, "sh", "-c", '"$@"; exit "$?"', "sh", *words]
        return [sys.executable, "-I", "-S", "-c", inspect.getsource(keeper), str(os.getpid()), *words]

    def bind(self, folder: Path, limits: Mapping[int, int]) -> Callable[[], None]:
        """What its first process does before it runs: it takes on the user and `limits`, and ends with this one."""
        parent = os.getpid()
        if self.user is not None:
            os.chown(folder, self.user, self.user)
        most = _processes_of(os.getuid() if self.user is None else self.user) + _MOST_PROCESSES
        limits = {**limits, resource.RLIMIT_NPROC: most, resource.RLIMIT_FSIZE: _FILE_SIZE, resource.RLIMIT_CORE: 0}

        def bind() -> None:
            if self.user is not None:
                os.setgroups([])
                os.setgid(self.user)
                os.setuid(self.user)
            die_with_parent(parent)
            for what, limit in limits.items():
                most = resource.getrlimit(what)[1]
                wanted = limit if most < 0 else min(limit, most)
                resource.setrlimit(what, (wanted, wanted))

        return bind

    def describe(self) -> str:
        """What holds judged code here, and what does not."""
        user = "" if self.user is None else " as the user nobody"
        if self.tool:
            files = "reads your files" if self.tool == "bwrap" else "reads and writes your files"
            return f"judged code runs{user} in namespaces of {self.tool}, without network; it {files}"
        return (
            f"judged code runs{user} without a sandbox: it can read your files and use the network. Install "
            "bubblewrap, or allow user namespaces"
        )


def environment(folder: Path) -> dict[str, str]:
    """The environment of judged code."""
    return {"PATH": os.environ.get("PATH", ""), "LANG": "C.UTF-8", "HOME": str(folder), "TMPDIR": str(folder)}


@functools.cache
def best_sandbox() -> Sandbox:
    """The strongest that works on this machine."""
    users = [_NOBODY, None] if os.geteuid() == 0 else [None]
    tools = [tool for tool in ("bwrap", "unshare") if shutil.which(tool)]
    choices = [Sandbox(tool=tool, user=user) for user in users for tool in tools]
    choices += [Sandbox(tool="", user=user) for user in users]
    return next((choice for choice in choices[:-1] if _works(choice)), choices[-1])


def _works(sandbox: Sandbox) -> bool:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        try:
            tried = subprocess.run(
                sandbox.command(folder, [sys.executable, "-I", "-c", "open('written', 'w')"]),
                cwd=folder,
                env=environment(folder),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                preexec_fn=sandbox.bind(folder, {}),
                timeout=_SECONDS_TO_TRY,
                check=False,
            )
        except (OSError, subprocess.SubprocessError):
            return False
        return tried.returncode == 0 and (folder / "written").exists()


def _processes_of(user: int) -> int:
    """Processes and threads that `user` runs; what `RLIMIT_NPROC` compares with."""
    count = 0
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if path.stat().st_uid == user:
                count += len(os.listdir(path / "task"))
        except OSError:  # it has ended meanwhile
            continue
    return count
