"""`vllm serve` and `python -m sglang.launch_server` as programs, for jobs that start their servers themselves.

They take the options that the engines' pages of command lines have, of which these are those that ROLL's files use and
some more, refuse all others, and serve as `tests.jobs.engines.server` does, with a process of their own beside them, as
engines have. `install(folder)` writes both, and returns the variables by which a job finds them. How they misbehave is
ordered by the variable TEST_ENGINE: "hangs" never answers, "dies" ends while it starts.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import time
from pathlib import Path

from tests.jobs.engines.replica import Options
from tests.jobs.engines.server import serve

ROOT = Path(__file__).parents[3]

VLLM = (
    "host port dtype seed load-format max-model-len tensor-parallel-size pipeline-parallel-size gpu-memory-utilization "
    "block-size max-num-seqs max-num-batched-tokens distributed-executor-backend optimization-level "
    "limit-mm-per-prompt logprobs-mode kv-cache-dtype quantization"
).split()
VLLM_SWITCHES = (
    "enforce-eager enable-prefix-caching enable-chunked-prefill enable-sleep-mode trust-remote-code "
    "disable-custom-all-reduce disable-log-stats"
).split()
"""Each has a counterpart with `no-`."""
SGLANG = (
    "model-path host port dtype random-seed load-format context-length tensor-parallel-size tp-size "
    "pipeline-parallel-size pp-size mem-fraction-static max-running-requests attention-backend log-level"
).split()
SGLANG_SWITCHES = (
    "enable-memory-saver enable-deterministic-inference trust-remote-code skip-tokenizer-init disable-cuda-graph "
    "disable-radix-cache disable-custom-all-reduce"
).split()


def install(folder: Path) -> dict[str, str]:
    """The two programs in `folder`; variables by which they are found."""
    (folder / "bin").mkdir(parents=True)
    vllm = folder / "bin" / "vllm"
    vllm.write_text(f'#!/bin/sh\nexec {sys.executable} -m tests.jobs.engines.programs vllm "$@"\n')
    vllm.chmod(0o755)
    module = folder / "modules" / "sglang"
    module.mkdir(parents=True)
    (module / "__init__.py").write_text("")
    text = "import sys\nfrom tests.jobs.engines.programs import main\nmain(['sglang', *sys.argv[1:]])\n"
    (module / "launch_server.py").write_text(text)
    return {
        "PATH": os.pathsep.join([str(vllm.parent), os.environ["PATH"]]),
        "PYTHONPATH": os.pathsep.join([str(module.parent), str(ROOT)]),
    }


def parser(kind: str) -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog=kind, allow_abbrev=False)
    values, switches = (SGLANG, SGLANG_SWITCHES) if kind == "sglang" else (VLLM, VLLM_SWITCHES)
    if kind == "vllm":
        made.add_argument("subcommand", choices=["serve"])
        made.add_argument("model_path")
        made.add_argument("--cudagraph-capture-sizes", type=int, nargs="+")
    for name in values:
        made.add_argument(f"--{name}")
    for name in switches:
        action = argparse.BooleanOptionalAction if kind == "vllm" else "store_true"
        made.add_argument(f"--{name}", action=action)
    return made


def main(words: list[str]) -> None:
    kind, *options = words
    args = parser(kind).parse_args(options)
    told = {"options": options, "devices": os.environ.get("CUDA_VISIBLE_DEVICES"), "rank": os.environ.get("RANK")}
    print(json.dumps(told), flush=True)
    order = os.environ.get("TEST_ENGINE", "")
    if order == "dies":
        print("torch.OutOfMemoryError: CUDA out of memory", file=sys.stderr)
        sys.exit(3)
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"])  # an engine's own worker
    if order == "hangs":
        time.sleep(3600)
    processed = kind == "vllm" and args.logprobs_mode == "processed_logprobs"
    dev = os.environ.get("VLLM_SERVER_DEV_MODE") == "1"
    sleeps = bool(args.enable_memory_saver if kind == "sglang" else args.enable_sleep_mode and dev)
    options = Options(processed=processed, sleeps=sleeps, ranks=int(getattr(args, "tp_size", None) or 1))
    asyncio.run(serve(args.model_path, kind, [int(args.port)], options, args.host))


if __name__ == "__main__":
    main(sys.argv[1:])
