"""Half an hour on a borrowed GPU: wheels that travel there, and the checks in four calls of less than ten minutes.

    scripts/gpu_half_hour.sh prepare DIR --engine-wheel FILE   downloads wheels into DIR/1, DIR/2, ...: loads to carry
    scripts/gpu_half_hour.sh collect DIR/1                     on the machine: takes over a load that arrived
    scripts/gpu_half_hour.sh 1 --wheels DIR/2                  the first call, after taking over another load
    scripts/gpu_half_hour.sh 2                                 ... up to 4
    scripts/gpu_half_hour.sh --dry [N ...] [--wheels DIR]      the same at tiny sizes on the CPU, with a table of times

A call makes an environment over the machine's Python (PYTHON, with torch) and installs the wheels that arrived whole.
Its checks share the rest of 590 seconds: what one leaves goes to the next, and a check that is late is killed. Records
go to results/<device>.json, and to $OUT. FILE is the torch extension of TransformerEngine, compiled against the torch
of that machine (scripts/te_environment.sh); one for another version of torch does not import.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

from benchmarks import ROOT

SECONDS = 590
"""Of a call, from its start to its end."""
CALLS = {
    1: ("attention", "equality", "step", "memory", "prefixes"),
    2: ("fp8", "prefixes_behind", "recurrent"),
    3: ("shared_device", "step_8b", "step_moe"),
    4: ("generation", "where_time_goes", "host_reads", "demo", "logprob", "loss"),
}
"""Checks of each call, in the order of what they prove."""
WITH_ENGINE = 2
"""The call with TransformerEngine, in whose presence Megatron-Core takes other code paths."""
MODULES = ("torch", "megatron.core", "flash_attn.cute", "fla.ops.gated_delta_rule", "transformer_engine.pytorch")
PROBE = """
import importlib, sys
for name in sys.argv[1:]:
    try:
        print(f"{name}: {getattr(importlib.import_module(name), '__version__', 'imports')}", flush=True)
    except Exception as error:
        print(f"{name} does not import: {type(error).__name__}: {error}"[:300], flush=True)
"""
USES_ENGINE = f"import torch, {MODULES[-1]}"
MIB = 1 << 20
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_27_x86_64", "manylinux_2_24_x86_64", "manylinux_2_17_x86_64")
SUMS = "SHA256SUMS"
HOME = ROOT / ".venv-gpu"
"""The environments, and in `STORE` the wheels that arrived."""
STORE = HOME / "wheels"


def wanted() -> list[tuple[str, float, bool]]:
    """(requirement, MiB, whether only TransformerEngine's environment needs it) of each line of wheels.txt."""
    lines = (ROOT / "benchmarks" / "gpu" / "wheels.txt").read_text().splitlines()
    rows = [line.split() for line in lines if not line.startswith("#")]
    return [(name, float(size), bool(rest)) for name, size, *rest in rows]


def is_wheel_of(file: str, requirement: str) -> bool:
    name, version = requirement.split("==")
    return file.startswith(f"{name.replace('-', '_')}-{version}-")


def prepare(folder: Path, load: float, engine_wheel: Path | None) -> None:
    """Download all wheels, compare their sizes, and lay them out in loads."""
    if folder.exists():
        raise SystemExit(f"{folder} exists: name a new folder")
    whole, ready = folder / "whole", []
    download = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", "--pre"]
    download += ["--python-version=3.12", "--implementation=cp", *(f"--platform={one}" for one in PLATFORMS)]
    subprocess.run([*download, "--dest", str(whole), *(name for name, _, _ in wanted())], check=True)
    for name, size, _ in wanted():
        (file,) = [file for file in whole.iterdir() if is_wheel_of(file.name, name)]
        if abs(file.stat().st_size / MIB - size) > max(0.01, 0.02 * size):
            raise SystemExit(f"{file} has {file.stat().st_size / MIB:.2f} MiB, benchmarks/gpu/wheels.txt says {size}")
        ready.append(file)
    if engine_wheel is not None:
        ready.append(engine_wheel)
    place, room, sums = 1, int(load * MIB), []
    for file in ready:
        data, part, is_cut = file.read_bytes(), 0, file.stat().st_size > room
        while data:
            piece, data = data[:room], data[room:]
            name = f"{file.name}.part{part:02}" if is_cut else file.name
            (folder / str(place)).mkdir(exist_ok=True)
            (folder / str(place) / name).write_bytes(piece)
            sums.append(f"{hashlib.sha256(piece).hexdigest()}  {name}")
            print(f"load {place}: {len(piece) / MIB:7.2f} MiB  {name}")
            room, part = room - len(piece), part + 1
            if not room:
                place, room = place + 1, int(load * MIB)
    shutil.rmtree(whole)
    for one in folder.iterdir():
        (one / SUMS).write_text("\n".join(sums) + "\n")
    total = sum(file.stat().st_size for file in folder.rglob("*.whl*")) / MIB
    print(f"{total:.1f} MiB in {len(list(folder.iterdir()))} loads of {folder}")
    if engine_wheel is None:
        print("no --engine-wheel: TransformerEngine will not import, and the records will say so")


def collect(folder: Path) -> None:
    """Take over what arrived in `folder`, a load or a folder of loads, and join the pieces that are complete."""
    STORE.mkdir(parents=True, exist_ok=True)
    for listing in sorted(folder.rglob(SUMS)):
        shutil.copy(listing, STORE)
        sums = {name: digest for digest, name in map(str.split, listing.read_text().splitlines())}
        for file in listing.parent.glob("*.whl*"):
            if hashlib.sha256(file.read_bytes()).hexdigest() != sums.get(file.name):
                raise SystemExit(f"{file} is not what {listing} says: send this load again")
            shutil.copy(file, STORE)
    for name, pieces in carried().items():
        if name not in pieces and all((STORE / piece).exists() for piece in pieces):
            (STORE / name).write_bytes(b"".join((STORE / piece).read_bytes() for piece in pieces))


def carried() -> dict[str, list[str]]:
    """Pieces of each wheel by its name; a wheel in one piece is its own."""
    pieces: dict[str, list[str]] = {}
    listing = STORE / SUMS
    for line in listing.read_text().splitlines() if listing.exists() else ():
        name = line.split()[1]
        pieces.setdefault(name.split(".part")[0], []).append(name)
    return pieces


def make_environment(with_engine: bool) -> Path:
    """An environment over this Python with the wheels that arrived whole; returns its interpreter."""
    folder = HOME / ("engine" if with_engine else "plain")
    python, stamp = folder / "bin" / "python", folder / "installed"
    plain = [requirement for requirement, _, only in wanted() if not only]
    names = [name for name in carried() if with_engine or any(is_wheel_of(name, one) for one in plain)]
    wheels = [str(STORE / name) for name in names if (STORE / name).exists()]
    for piece in (piece for name in names for piece in carried()[name] if not (STORE / piece).exists()):
        print(f"{piece} is not here: its package is left out")
    if not stamp.exists() or stamp.read_text() != "\n".join(wheels):
        subprocess.run([sys.executable, "-m", "venv", "--clear", "--without-pip", str(folder)], check=True)
        (site,) = folder.glob("lib/python3*/site-packages")
        # Unlike --system-site-packages this also works over a Python that is itself an environment.
        (site / "base.pth").write_text(f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n")
        if (libraries := Path(sysconfig.get_path("purelib"), "nvidia")).exists():
            (site / "nvidia").symlink_to(libraries)  # TransformerEngine looks for cuDNN beside itself
        install = [str(python), "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-compile"]
        if wheels:
            subprocess.run([*install, "--ignore-installed", *wheels], check=True)
        stamp.write_text("\n".join(wheels))
    return python


def run_call(number: int, is_dry: bool) -> int:
    """Install, run the checks of a call, and copy the records to $OUT; returns the exit status."""
    started = time.monotonic()
    python = make_environment(number == WITH_ENGINE)
    subprocess.run([str(python), "-c", PROBE, *MODULES], cwd=ROOT, check=True, stderr=subprocess.DEVNULL)
    if number == WITH_ENGINE and is_dry:
        print("TransformerEngine's kernels do not run on a CPU: these checks run without it")
        python = make_environment(with_engine=False)
    elif number == WITH_ENGINE and subprocess.run([str(python), "-c", USES_ENGINE], capture_output=True).returncode:
        print("these checks run without TransformerEngine: beside a broken one Megatron-Core does not import either")
        python = make_environment(with_engine=False)
    installed = time.monotonic() - started
    command = [str(python), "-m", "benchmarks.gpu.checks", "--only", ",".join(CALLS[number])]
    dry = HOME / "dry.json"
    left = SECONDS - (time.monotonic() - started)
    status = subprocess.run([*command, *(["--dry", f"--out={dry}"] if is_dry else [f"--within={left}"])], cwd=ROOT)
    if is_dry:
        checks = json.loads(dry.read_text())["checks"]
        for name in CALLS[number]:
            outcome = f"{checks[name]['status']}, {len(checks[name]['exceeded'])} limits exceeded"
            print(f"| {number} | {name} | {checks[name]['seconds']:.0f} | {outcome} |")
    elif target := os.environ.get("OUT"):
        shutil.copy(max((ROOT / "results").glob("*.json"), key=lambda file: file.stat().st_mtime), target)
    took = time.monotonic() - started
    print(f"call {number}: {took:.0f} s, of them {installed:.0f} s to install\n", flush=True)
    return status.returncode


def call_number(text: str) -> int:
    if text not in map(str, CALLS):
        raise argparse.ArgumentTypeError(f"there is no call {text!r}: choose from {', '.join(map(str, CALLS))}")
    return int(text)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("prepare", help="download wheels and lay them out in loads")
    one.add_argument("folder", type=Path)
    one.add_argument("--load", type=float, default=48, help="MiB of a load")
    one.add_argument("--engine-wheel", type=Path, help="the wheel transformer_engine_torch")
    commands.add_parser("collect", help="take over loads").add_argument("wheels", type=Path)
    for name in ("call", "dry"):
        one = commands.add_parser(name, help="run calls")
        one.add_argument("numbers", nargs="*" if name == "dry" else 1, type=call_number)
        one.add_argument("--wheels", type=Path, help="loads to take over first")
    args = parser.parse_args()
    if args.command == "prepare":
        prepare(args.folder, args.load, args.engine_wheel)
        return 0
    if args.wheels is not None:
        collect(args.wheels)
    numbers = [] if args.command == "collect" else args.numbers or CALLS
    return max([run_call(number, args.command == "dry") for number in numbers], default=0)


if __name__ == "__main__":
    sys.exit(main())
