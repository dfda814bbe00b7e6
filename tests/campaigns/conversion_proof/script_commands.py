"""The commands of a host's shell script as bash makes them: arguments are written down, and nothing else runs.

The converter reads scripts without running them (`shell_script`). This is the other reading: bash itself expands the
script, in an empty folder and with an empty PATH, so that every program of it is one that does not exist.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

_TEXT_TOOLS = ("basename", "dirname", "realpath", "seq", "cut", "tr", "wc", "grep", "expr", "cat", "date")
_RECORD = """
command_not_found_handle() {
    printf '%s\\0' "$@" > "$COMMANDS/$EPOCHREALTIME.$BASHPID"  # commands of a pipeline run at once
    case "$1 $2" in *" -c" | *smi*) return 1 ;; esac  # asks for a package or a device that is not there
}
kill() { :; }
exec() { [ $# -eq 0 ] || "$@"; }
export -f command_not_found_handle kill exec
"""


class NoCommandError(Exception):
    """The script starts no program of this kind."""


def commands_of(script: Path) -> list[list[str]]:
    """Programs that `script` would start, each with its arguments, in order."""
    with tempfile.TemporaryDirectory() as folder:
        tools, home, record = (Path(folder) / name for name in ("tools", "home", "commands"))
        tools.mkdir(), home.mkdir(), record.mkdir()
        for name in _TEXT_TOOLS:
            if (program := shutil.which(name)) is not None:
                (tools / name).symlink_to(program)
        bash = shutil.which("bash") or "/bin/bash"
        environment = {"PATH": str(tools), "HOME": os.path.expanduser("~"), "COMMANDS": str(record)}
        (Path(folder) / "record.sh").write_text(_RECORD)
        environment["BASH_ENV"] = str(Path(folder) / "record.sh")
        subprocess.run(
            [bash, str(script.resolve())], cwd=home, env=environment, capture_output=True, timeout=60, check=False
        )
        texts = (path.read_bytes().decode(errors="replace") for path in sorted(record.iterdir()))
        return [text.split("\0")[:-1] for text in texts]


def training_arguments(script: Path, is_program: Callable[[str], bool]) -> tuple[str, list[str]]:
    """(program, arguments behind it) of the last command with such a program. Raises NoCommandError."""
    for command in reversed(commands_of(script)):
        words = [
            word for part in command for word in (part.split() if "\n" not in part and " train" in part else [part])
        ]
        for number, word in enumerate(words):
            if is_program(word):
                return word, words[number + 1 :]
    raise NoCommandError(f"bash starts no training command with {script.name}: it needs arguments or files")
