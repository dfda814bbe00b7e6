"""Compares files of verl, NeMo-RL and slime with their conversions, by the hosts' own functions and by ours.

    python scripts/prove_conversion.py --verl VERL --nemo-rl NEMO_RL --slime SLIME     some of them
    ... --files 10 --seed 0     files of each host, drawn by the seed; --only TEXT draws among paths with this text

Of every file: learning rates of 200 RL steps with all their optimizer steps, batch sizes and caps, group, sampling,
optimizer, advantages of 50 groups of rewards (all equal, one right, floats), and the loss of a small batch with its
gradient. The host's figures come from its own functions, in a process of their own with the checkout at the end of the
path; ours from `convert-config`, the loader, and the code of `train`. Printed is a table of the differences, each with
the reason that the conversion gives. The exit status is 1 for a difference without one.

Nothing of a host needs to be installed but what its functions call: PyTorch, Megatron-Core, Hydra, OmegaConf, Ray, and
`tensordict` for verl. Scripts are expanded by bash, without any program in its path. Packages and modules that stand
empty are named below the table.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from roll_batching.errors import ConfigError
from roll_batching.jobs.config import JobConfig, load_config
from roll_batching.known_warnings import hide_known_warnings
from roll_batching.tools.conversion import ORIGINS, Conversion, convert_file
from roll_batching.tools.conversion.slime_command import is_program as is_slime
from roll_batching.tools.conversion.verl_command import is_program as is_verl
from tests.campaigns.conversion_proof import ours
from tests.campaigns.conversion_proof.compare import Difference, differences
from tests.campaigns.conversion_proof.samples import request_of
from tests.campaigns.conversion_proof.script_commands import NoCommandError, training_arguments
from tests.campaigns.peer_configs.count import nemo_rl_files, slime_files, verl_files
from tests.support.ranks import ROOT

STEPS = 200
"""RL steps whose learning rates are compared, and the length of jobs whose files do not give one."""


@dataclass(frozen=True)
class Host:
    """A host whose files are compared."""

    title: str
    origin: str
    files: Callable[[Path], Iterator[Path]]
    is_program: Callable[[str], bool] | None = None
    """Recognises its training program in a script's command; None: its files are YAML."""


HOSTS = {
    "verl": Host("verl", "verl", verl_files, is_verl),
    "nemo_rl": Host("NeMo-RL", "nemo_rl", nemo_rl_files),
    "slime": Host("slime", "slime", slime_files, is_slime),
}


@dataclass(frozen=True)
class Case:
    """A file with its conversion, and the request to its host."""

    path: Path
    conversion: Conversion
    job: JobConfig
    request: dict[str, Any]


def main() -> int:
    hide_known_warnings()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--verl", type=Path, help="checkout of verl-project/verl")
    parser.add_argument("--nemo-rl", type=Path, help="checkout of NVIDIA-NeMo/RL")
    parser.add_argument("--slime", type=Path, help="checkout of THUDM/slime")
    parser.add_argument("--files", type=int, default=10, help="files of each host (default: 10)")
    parser.add_argument("--seed", type=int, default=0, help="draws the files, rewards and samples (default: 0)")
    parser.add_argument("--python", default=sys.executable, help="interpreter that runs the hosts' functions")
    parser.add_argument("--only", default="", help="draw among files whose path contains this text")
    args = parser.parse_args()
    found: list[Difference] = []
    chosen = {name: getattr(args, name) for name in HOSTS if getattr(args, name) is not None}
    if not chosen:
        parser.error("name at least one checkout: --verl, --nemo-rl or --slime")
    with tempfile.TemporaryDirectory() as folder:
        for name, checkout in chosen.items():
            found += compare_host(HOSTS[name], checkout.resolve(), args, Path(folder))
    unexplained = [one for one in found if not one.reason]
    print(f"{len(found)} differences, {len(unexplained)} of them without a reason")
    return 1 if unexplained else 0


def compare_host(host: Host, checkout: Path, args: argparse.Namespace, folder: Path) -> list[Difference]:
    """Compares files of a host; prints the table, what was left aside and the stand-ins."""
    paths = [path for path in host.files(checkout) if args.only in str(path)]
    random.Random(args.seed).shuffle(paths)
    remaining, stand_ins, compared = iter(paths), set[str](), 0
    aside: list[str] = []
    found: list[Difference] = []
    while cases := list(_next_cases(host, checkout, remaining, args.files - compared, args.seed, folder, aside)):
        answers = ask(host, checkout, [case.request for case in cases], args.python)
        stand_ins |= set(answers["stand_ins"])
        for case, theirs in zip(cases, answers["answers"], strict=True):
            name = str(case.path.relative_to(checkout))
            if "error" in theirs:
                aside.append(f"{name}: {host.title} itself: {_line(theirs['error'])}")
                continue
            compared += 1
            on_policy = theirs.get("loss.old_is_current", False)
            mine = ours.figures(case.job, case.request["samples"], STEPS, old_is_current=on_policy)
            rows = list(differences(name, theirs, mine, case.conversion, STEPS))
            agreeing = len(set(theirs) - {row.figure for row in rows})
            print(f"{name}: {agreeing} of {len(theirs)} figures agree", flush=True)
            found += rows
    print(f"\n{host.title}: {compared} files compared, {len(found)} differences\n\n{table(found)}")
    print("".join(f"  left aside: {text}\n" for text in aside) + f"  stand-ins for {host.title}'s imports:")
    print(textwrap.fill(", ".join(sorted(stand_ins)), 116, initial_indent="      ", subsequent_indent="      ") + "\n")
    return found


def _next_cases(
    host: Host, checkout: Path, paths: Iterator[Path], number: int, seed: int, folder: Path, aside: list[str]
) -> Iterator[Case]:
    """At most `number` cases of the next paths; a file that makes none is named in `aside`."""
    while number:
        path = next(paths, None)
        if path is None:
            return
        try:
            yield make_case(host, path, seed, folder)
            number -= 1
        except (ConfigError, NoCommandError) as error:
            aside.append(f"{path.relative_to(checkout)}: {_line(str(error))}")


def _line(text: str) -> str:
    return " ".join(text.split())[:160]


def make_case(host: Host, path: Path, seed: int, folder: Path) -> Case:
    """Converts and loads a file. Raises ConfigError, and NoCommandError for a script that starts nothing alone."""
    request: dict[str, Any] = {"file": str(path), "steps": STEPS}
    if host.is_program is not None:
        request["program"], request["arguments"] = training_arguments(path, host.is_program)
    conversion = convert_file(path, ORIGINS[host.origin])
    settings = conversion.settings
    if settings.get("task", "grpo") == "grpo":
        settings.setdefault("max_steps", STEPS)
    elif "max_steps" not in settings:
        settings.pop("num_train_epochs", None)
        settings["max_steps"] = STEPS
    (folder / "job.yaml").write_text(yaml.safe_dump(settings))
    job = load_config(folder / "job.yaml")
    return Case(path, conversion, job, request | {"samples": request_of(job.group_size, seed)})


def ask(host: Host, checkout: Path, requests: list[dict[str, Any]], python: str) -> dict[str, Any]:
    """The host's answers, from one process."""
    module = f"tests.campaigns.conversion_proof.{host.origin}_figures"
    command = [python, "-W", "ignore", "-m", module, str(checkout)]
    done = subprocess.run(
        command, input=json.dumps(requests), capture_output=True, text=True, cwd=ROOT, timeout=1800, check=False
    )
    if done.returncode:
        raise SystemExit(f"{host.title}'s functions did not run:\n{done.stderr[-3000:]}")
    answers: dict[str, Any] = json.loads(done.stdout)
    return answers


def table(found: list[Difference]) -> str:
    """The differences, those without a reason first; equal ones of several files together."""
    lines = []
    for one in sorted(found, key=lambda one: (bool(one.reason), one.figure, one.file)):
        size = "other kind" if one.size == float("inf") else f"{one.size:.2g}"
        lines.append(f"  {one.figure}: {one.host} there, {one.ours} here ({size})  {one.file}")
        reason = one.reason or "WITHOUT A REASON"
        lines += textwrap.wrap(reason, 116, initial_indent="      ", subsequent_indent="      ")
    return "\n".join(lines) if lines else "  no differences"
