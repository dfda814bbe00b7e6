"""The command line, forked from a process that has imported torch and Megatron: for tests that are not of its start."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path

from tests.support.ranks import _rank_env, run_ranks


def run_command(*arguments: object, cwd: Path | None = None, timeout: float = 170) -> subprocess.CompletedProcess[str]:
    """`roll-batching ARGUMENTS`: its exit code, standard output and standard error."""
    with tempfile.TemporaryDirectory() as folder:
        texts = [str(Path(folder) / name) for name in ("stdout", "stderr")]
        payload = ([str(argument) for argument in arguments], str(cwd) if cwd else None, texts)
        (code,) = run_ranks(1, "tests.support.commands:_command", payload, timeout=timeout)
        stdout, stderr = (Path(text).read_text(errors="replace") for text in texts)
    return subprocess.CompletedProcess(list(payload[0]), code, stdout, stderr)


def _command(payload: tuple[list[str], str | None, list[str]]) -> int:
    from roll_batching.cli import main

    arguments, cwd, texts = payload
    for name in _rank_env(0, 1, 0):  # no launcher has started this process
        del os.environ[name]
    if cwd:
        os.chdir(cwd)
    for descriptor, text in zip((1, 2), texts, strict=True):
        os.dup2(os.open(text, os.O_WRONLY | os.O_CREAT), descriptor)
    code: int | str | None = 0
    try:
        main(arguments)
    except SystemExit as leaving:
        code = leaving.code
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    return code if isinstance(code, int) else int(code is not None)
