"""Count example files of ROLL, NeMo-RL, verl and slime that convert and start, and the reasons of those that do not.

    python scripts/count_peer_configs.py --roll ROLL --nemo-rl NEMO_RL --verl VERL --slime SLIME    some of them
    ... --list    omitted keys of every file, and errors that stop it

A converted file starts once its model and data are there if it passes all that `roll-batching train` checks before it
makes a process group or a model: `jobs.py` supplies each model's true config.json and lines of data. Where a file names
a placeholder, such as /path/to/model, but its name or comments say which model it is for (`meant` in models.json), it
is counted with that model, and once more on its own line.

Counted are ROLL's files under examples/ that use a Megatron strategy, and NeMo-RL's under examples/ that switch
sequence packing or dynamic batching on, both once their `defaults` are composed; of NeMo-RL's, those that switch it
on in the file itself once more. Of verl, counted are the shell scripts under examples/ that start a trainer, with a
reward, which verl chooses by the data; of slime, those under scripts/, examples/ and tests/ that start training.
"""

from __future__ import annotations

import argparse
import collections
import functools
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from roll_batching.errors import ConfigError
from roll_batching.jobs.config.yaml_source import read_yaml
from roll_batching.known_warnings import hide_known_warnings
from roll_batching.tools.conversion import ORIGINS, Conversion, Origin, convert_file
from tests.campaigns.peer_configs.jobs import PeerModels, is_placeholder, meant_model, what_stops, with_model

NOT_HERE = "is neither a directory on this machine"
BY_HAND = ("actor_infer.engine_args.urls", "rollout_args.url")
JUDGE_URL = ".reward_args.url"


def roll_files(root: Path) -> Iterator[Path]:
    for path in sorted((root / "examples").rglob("*.yaml")):
        if path.parent.name != "config" and "megatron_" in str(_composed(path, ORIGINS["roll"])):
            yield path


def nemo_rl_files(root: Path) -> Iterator[Path]:
    for path in sorted((root / "examples").rglob("*.yaml")):
        if _batched(_composed(path, ORIGINS["nemo_rl"])):
            yield path


def scripts(root: Path, folders: tuple[str, ...], program: str) -> Iterator[Path]:
    """Shell scripts below `folders` of a checkout that name the training program."""
    for path in sorted(path for folder in folders for path in (root / folder).rglob("*.sh")):
        if program in path.read_text(encoding="utf-8", errors="replace"):
            yield path


def verl_files(root: Path) -> Iterator[Path]:
    return scripts(root, ("examples",), "verl.trainer.")


def slime_files(root: Path) -> Iterator[Path]:
    return (path for path in scripts(root, ("scripts", "examples", "tests"), "--hf-checkpoint"))


def _batched(data: dict[str, Any]) -> bool:
    """Whether NeMo-RL's settings enable sequence packing or dynamic batching."""
    policy = data.get("policy")
    sections = (
        [policy.get(name) for name in ("sequence_packing", "dynamic_batching")] if isinstance(policy, dict) else []
    )
    return any(isinstance(section, dict) and section.get("enabled") for section in sections)


@functools.cache
def _composed(path: Path, origin: Origin) -> dict[str, Any]:
    try:
        return origin.compose(path).data
    except ConfigError:
        return {}


def kind_of(path: Path) -> str:
    """Pipeline of a file of ROLL, by its sections."""
    data = _composed(path, ORIGINS["roll"])
    for kind, keys in {
        "agentic": {"custom_envs", "train_env_manager"},
        "distillation": {"student", "student_train", "teacher"},
        "sft": {"sft_train"},
        "dpo": {"chosen_key"},
    }.items():
        if keys & set(data):
            return kind
    return "rlvr"


def count(title: str, files: list[Path], origin: Origin, root: Path, scratch: Path, *, listed: bool) -> None:
    models = PeerModels(scratch / "models")
    stops: collections.Counter[str] = collections.Counter()
    totals: collections.Counter[str] = collections.Counter()
    reasons: collections.Counter[str] = collections.Counter()
    lacking: collections.Counter[str] = collections.Counter()
    for path in files:
        kind = kind_of(path) if origin.name == "roll" else "inherited" if origin.name == "nemo_rl" else "scripts"
        if origin.name == "nemo_rl" and _batched(read_yaml(path).data):
            kind = "in the file itself"
        totals[f"{kind}: files"] += 1
        try:
            done = convert_file(path, origin)
        except ConfigError as error:
            totals[f"{kind}: do not convert"] += 1
            reasons[f"does not convert: {str(error).splitlines()[-1].strip()[:140]}"] += 1
            continue
        broken = [one for one in done.left_out if one.key == "(the whole file)"]
        totals[f"{kind}: {'do not load' if broken else 'convert'}"] += 1
        for key in sorted({_general(one.key) for one in done.left_out_as("refused", "unknown")}):
            reasons[key] += 1
        missing = [text for text in done.missing if NOT_HERE not in text]
        lacking.update(lacking_of(missing))
        if origin.name == "verl" and done.settings.get("task") is None:  # verl chooses it by the data
            done.settings.setdefault("reward_function", "math_verify")
        meant = meant_model(path.relative_to(root)) if is_placeholder(done.settings) else None
        settings = done.settings if meant is None else with_model(done.settings, meant)
        stopped = ["does not load"] if broken else what_stops(settings, models, scratch)
        stops.update(f"{kind}: {reason}" for reason in stopped)
        if not stopped:
            totals[f"{kind}: start once model and data are there"] += 1
            if meant is not None:
                totals[f"{kind}: of these, with the model that the file means"] += 1
            if any(key in BY_HAND or key.endswith(JUDGE_URL) for key in lacking_of(missing)):
                totals[f"{kind}: of these, with servers that are started by hand on other machines"] += 1
            if "actor_train.data_args.file_name" not in lacking_of(missing):
                totals[f"{kind}: of these, with data files that the file names"] += 1
            if not done.left_out_as("refused", "unknown"):
                totals[f"{kind}: of these, with nothing of effect left out"] += 1
        if listed:
            _list(path.relative_to(root), done, stopped, meant)
    print(f"{title}: {len(files)} files")
    for name, number in sorted(totals.items()):
        print(f"  {number:4} {name}")
    print("  left out, of effect or unknown (files):")
    for name, number in reasons.most_common():
        print(f"  {number:4} {name}")
    print("  to be filled in (files):")
    for name, number in lacking.most_common():
        print(f"  {number:4} {name}")
    print("  do not start (files; one may stop at several):")
    for name, number in sorted(stops.items(), key=lambda item: (item[0].split(":")[0], -item[1])):
        print(f"  {number:4} {name}")


def lacking_of(missing: list[str]) -> set[str]:
    """Keys that must be filled in."""
    return {text.split(":")[0] for text in missing}


def _general(key: str) -> str:
    return "rewards.*" if key.startswith("rewards.") else key


def _list(path: Path, done: Conversion, stopped: list[str], meant: str | None) -> None:
    print(path)
    if meant is not None:
        print(f"    with the model that the file means: {meant}")
    for reason in stopped:
        print(f"    does not start: {reason}")
    for one in done.left_out_as("refused", "unknown"):
        print(f"    {one.key}: {' '.join(one.why.split())[:160]}")
    for text in done.missing:
        print(f"    to be filled in: {text[:160]}")


def main() -> None:
    hide_known_warnings()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--roll", type=Path, help="checkout of alibaba/ROLL")
    parser.add_argument("--nemo-rl", type=Path, help="checkout of NVIDIA-NeMo/RL")
    parser.add_argument("--verl", type=Path, help="checkout of verl-project/verl")
    parser.add_argument("--slime", type=Path, help="checkout of THUDM/slime")
    parser.add_argument("--list", action="store_true", help="print the omitted keys of every file")
    args = parser.parse_args()
    os.environ.setdefault("HF_HOME", "/nonexistent")
    with tempfile.TemporaryDirectory() as folder:
        for title, root, files, origin in (
            ("ROLL", args.roll, roll_files, "roll"),
            ("NeMo-RL", args.nemo_rl, nemo_rl_files, "nemo_rl"),
            ("verl", args.verl, verl_files, "verl"),
            ("slime", args.slime, slime_files, "slime"),
        ):
            if root is not None:
                count(title, list(files(root)), ORIGINS[origin], root, Path(folder), listed=args.list)
