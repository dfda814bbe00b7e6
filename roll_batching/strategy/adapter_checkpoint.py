"""What checkpoints of a model with adapters hold: the adapters, and digests of the frozen model's files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from roll_batching.distributed import exchange
from roll_batching.errors import CheckpointError
from roll_batching.huggingface.directory import CONFIG, directory_of
from roll_batching.strategy.checkpoint_files import check_regular
from roll_batching.strategy.checkpoint_folder import digests_of_pieces, pieces_of
from roll_batching.strategy.model_state import ModelState

PART = ".adapter."
"""Part of the names of an adapter's parameters."""
_READING = "reading the files of a frozen model"
_known: dict[tuple[Any, ...], dict[str, list[str]]] = {}
"""Digests of directories that this process has read, by path and the files' sizes and times."""


def describe_adapters(model: ModelState, group: Any) -> dict[str, Any] | None:
    """The adapters' entry in a checkpoint's record, or None. Collective: all ranks read a part of the files."""
    adapters = model.adapters
    if adapters is None:
        return None
    entry: dict[str, Any] = {"targets": list(adapters.targets), "rank": adapters.rank, "alpha": adapters.alpha}
    if adapters.base is None:
        return {**entry, "base": None}
    sizes, digests = read_directory(adapters.base, group)
    return {**entry, "base": {"sizes": sizes, "digests": digests}}


def without_base(model: ModelState, tensors: dict[str, Any]) -> dict[str, Any]:
    """The sharded state of a chunk as it is saved: the adapters alone, if the other weights are in a directory."""
    if model.adapters is None or model.adapters.base is None:
        return tensors
    return {name: piece for name, piece in tensors.items() if PART in name}


def check_adapters(model: ModelState, saved: dict[str, Any] | None, path: Path) -> None:
    """Raises `CheckpointError` unless the checkpoint `path`, with the entry `saved`, has the adapters of `model`."""
    adapters = model.adapters
    if saved is None and adapters is None:
        return
    if adapters is None:
        assert saved is not None
        raise CheckpointError(
            f"{path} holds LoRA adapters, and the model here has none: set model_args.lora_target: "
            f"{','.join(saved['targets'])}, lora_rank: {saved['rank']} and lora_alpha: {saved['alpha']:g}"
        )
    if saved is None:
        raise CheckpointError(
            f"{path} was saved without adapters, and the model here has some (model_args.lora_target): leave that out, "
            "or export the checkpoint (roll-batching export) and set model_args.model_name_or_path to the export"
        )
    settings = {"targets": list(adapters.targets), "rank": adapters.rank, "alpha": adapters.alpha}
    differing = [f"lora_{key.removesuffix('s')} is {saved[key]} there and {settings[key]} here" for key in settings
                 if saved[key] != settings[key]]  # fmt: skip
    if (saved["base"] is None) != (adapters.base is None):
        places = ("in the checkpoint", "in a model directory")
        differing.append(
            f"the frozen weights are {places[saved['base'] is not None]} there and {places[adapters.base is not None]} "
            "here"
        )
    if differing:
        raise CheckpointError(f"{path} has other adapters: {'; '.join(differing)}. Set the keys of its run")
    if adapters.base is None:
        return
    if not adapters.base_is_loaded:
        raise CheckpointError(
            f"{path} holds adapters only, and the frozen model was not loaded: call initialize() with weights=True"
        )
    sizes = _sizes(adapters.base)
    if changed := [name for name in sorted({*sizes, *saved["base"]["sizes"]})
                   if sizes.get(name) != saved["base"]["sizes"].get(name)]:  # fmt: skip
        raise CheckpointError(_other_base(path, adapters.base, changed))


def check_base_digests(model: ModelState, saved: dict[str, Any] | None, path: Path, group: Any) -> None:
    """Raises `RankError` unless the frozen model's files are the ones on which `path` was trained. Collective."""
    adapters = model.adapters
    if saved is None or adapters is None or adapters.base is None:
        return
    (_, now), before = read_directory(adapters.base, group), saved["base"]["digests"]
    if changed := [name for name in now if now[name] != before.get(name)]:
        raise CheckpointError(_other_base(path, adapters.base, changed))


def _other_base(path: Path, base: str, files: list[str]) -> str:
    return (
        f"{path} holds adapters of another model than {base}: {', '.join(files[:3])} differ in size or content. Set "
        "model_args.model_name_or_path to the model that they were trained on"
    )


def _sizes(base: str) -> dict[str, int]:
    folder = directory_of(base)
    names = [CONFIG, *(file.name for file in folder.glob("*.safetensors"))]
    return {name: check_regular(folder / name) for name in sorted(names)}


def read_directory(base: str, group: Any) -> tuple[dict[str, int], dict[str, list[str]]]:
    """Sizes of a model directory's files, and digests of their pieces, by name, the same on all ranks. Collective.

    Raises `RankError` on all ranks where one cannot read them, and `CheckpointError` where machines have other files.
    """
    keys: list[tuple[Any, ...]] = []

    def look() -> tuple[dict[str, int], bool]:
        folder, sizes = directory_of(base), _sizes(base)
        stamps = tuple((folder / name).stat().st_mtime_ns for name in sizes)
        keys.append((folder, *sizes.items(), *stamps))
        return sizes, keys[0] in _known

    directories = exchange(group, _READING, look)
    sizes, (key,) = directories[0][0], keys
    if any(other != sizes for other, _ in directories):
        raise CheckpointError(f"{base} has other files on other machines: give all machines the same model directory")
    if not all(is_known for _, is_known in directories):
        tasks, ranks = pieces_of(sizes), len(directories)
        rank = 0 if group is None else group.rank()
        shares = exchange(group, _READING, lambda: digests_of_pieces(key[0], tasks[rank::ranks]))
        digests = {task: digest for share in shares for task, digest in share.items()}
        _known[key] = {name: [digests[task] for task in tasks if task[0] == name] for name in sizes}
    return sizes, _known[key]
