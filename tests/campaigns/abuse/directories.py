"""Model directories and earlier runs, as abuses find and change them."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.campaigns.abuse.runner import RUN, SAVING, Lost, NotReachedError, Scene, finish, limit, started, write_job
from tests.campaigns.abuse.scenes import CHECKPOINTS, METRICS

_WRITE = """
from pathlib import Path
from tests.huggingface import tiny
tiny.write_model(Path({folder!r}), {name!r})
tiny.write_tokenizer(Path({folder!r}))
"""
FROM_MODEL: dict[str, Any] = {
    "pretrain": "model",
    "tokenizer": {"type": "hf", "name_or_path": "model"},
    "actor_train.model_args": {},
}
"""Settings of a job that starts from the directory `model`."""
WEIGHTS = "model.safetensors"


def tiny_model(home: Path, name: str) -> Path:
    """A tiny model's directory, shared by the abuses of a campaign."""
    folder = home.parent / f"model-{name}"
    if not folder.exists():
        partial = folder.with_suffix(".partial")
        with started(home, "-c", _WRITE.format(folder=str(partial), name=name), log="making") as process:
            if process.wait(limit(120)):
                raise NotReachedError(f"no model: {(home / 'making').read_text()[-300:]}")
        partial.rename(folder)
    return folder


def _nothing(_: Path) -> None:
    return


def models(
    change: Callable[[Path], object] = _nothing, *, left: Callable[[Path], str] = lambda home: "", **names: str
) -> Scene:
    """Copies of tiny models, as `folder=name`; `change` gets the job's folder, `left` checks it afterwards."""

    @contextlib.contextmanager
    def scene(home: Path) -> Iterator[Lost]:
        for folder, name in names.items():
            shutil.copytree(tiny_model(home, name), home / folder)
        change(home)
        yield lambda: left(home)

    return scene


def earlier(
    key: str,
    settings: Mapping[str, Any],
    damage: Callable[[Path], object] = _nothing,
    *,
    steps: int | None = None,
    **names: str,
) -> Scene:
    """A complete run with two checkpoints, shared under `key`; `damage` changes its second checkpoint.

    The abused job must leave its metrics as they were, or have `steps` steps in them.
    """

    @contextlib.contextmanager
    def scene(home: Path) -> Iterator[Lost]:
        kept = home.parent / f"earlier-{key}"
        if not kept.exists():
            making = kept.with_suffix(".partial")
            making.mkdir()
            write_job(making, {**settings, **SAVING}, {})
            for folder, name in names.items():
                shutil.copytree(tiny_model(home, name), making / folder)
            if fault := finish(making, log="earlier"):
                raise NotReachedError(fault)
            making.rename(kept)
        for folder in ("runs", *names):
            shutil.copytree(kept / folder, home / folder)
        before = (home / METRICS).read_bytes()
        damage(home / CHECKPOINTS / "rl-000002")

        def lost() -> str:
            if steps is not None:
                found = [json.loads(line)["step"] for line in (home / METRICS).read_text().splitlines()]
                return "" if found == list(range(1, steps + 1)) else f"metrics hold the steps {found}"
            return "" if (home / METRICS).read_bytes() == before else "metrics.jsonl was changed"

        yield lost

    return scene


def with_nan(tensor: str, file: str = f"model/{WEIGHTS}") -> Callable[[Path], None]:
    """One value of a tensor in a safetensors file becomes NaN."""

    def change(home: Path) -> None:
        from safetensors.torch import load_file, save_file

        tensors = load_file(home / file)
        tensors[tensor].view(-1)[3] = float("nan")
        save_file(tensors, home / file, metadata={"format": "pt"})

    return change


def without_tensors(names: Sequence[str], file: str = f"model/{WEIGHTS}") -> Callable[[Path], None]:
    """Takes tensors out of a safetensors file."""

    def change(home: Path) -> None:
        from safetensors.torch import load_file, save_file

        tensors = {name: one for name, one in load_file(home / file).items() if name not in names}
        save_file(tensors, home / file, metadata={"format": "pt"})

    return change


def truncated(file: str = f"model/{WEIGHTS}") -> Callable[[Path], None]:
    """Cuts a file in half."""

    def change(home: Path) -> None:
        content = (home / file).read_bytes()
        (home / file).write_bytes(content[: len(content) // 2])

    return change


def edited_json(file: str, **changes: Any) -> Callable[[Path], None]:
    """Sets keys of a JSON file in the job's folder."""

    def change(home: Path) -> None:
        (home / file).write_text(json.dumps(json.loads((home / file).read_text()) | changes))

    return change


def other_vocabulary(folder: str) -> Callable[[Path], None]:
    """Exchanges the ids of two tokens in the tokenizer of a directory."""

    def change(home: Path) -> None:
        file = home / folder / "tokenizer.json"
        described = json.loads(file.read_text())
        ids = described["model"]["vocab"]
        ids["a"], ids["b"] = ids["b"], ids["a"]
        file.write_text(json.dumps(described))

    return change


def _has_content(path: Path) -> bool:
    return any(one.is_file() and one.stat().st_size for one in (path, *path.rglob("*")))


def nothing_written(home: Path) -> str:
    """A fault if the run wrote rows, checkpoints or a model."""
    found = {path.name for path in (home / RUN).glob("*")} & {"metrics.jsonl", "checkpoints", "model", "adapter"}
    filled = [name for name in sorted(found) if _has_content(home / RUN / name)]
    return f"the run wrote {', '.join(filled)}" if filled else ""
