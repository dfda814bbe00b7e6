"""The seam between packs and the kernels that attend to them.

An attention backend is one class in one file. It says which module computes attention in a layer, what that module
wants to know of a pack beyond Megatron's PackedSeqParams, whether it rotates queries and keys, whether it decodes with
a cache, and what it needs to run. A configuration names it: `attention_backend: package.module:MyBackend`.
"""

from __future__ import annotations

import functools
import importlib.metadata
import inspect
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, runtime_checkable

import torch
from megatron.core.packed_seq_params import PackedSeqParams

from roll_batching.errors import ConfigError
from roll_batching.packing.layout import PackLayout
from roll_batching.registry import load_dotted
from roll_batching.settings.attention_backends import ATTENTION_BACKENDS, AUTO, AttentionEntry, default_entries

Rotation: TypeAlias = Callable[[torch.Tensor, torch.Tensor, PackedSeqParams], tuple[torch.Tensor, torch.Tensor]]
"""(query, key, the pass's params) -> query and key rotated by their positions."""


@dataclass(frozen=True, kw_only=True)
class AttentionRequirements:
    """What a backend's kernels can compute; whatever else is asked of them is refused before the first pass."""

    devices: tuple[str, ...] = ("cpu", "cuda")
    """Types of devices."""
    dtypes: tuple[torch.dtype, ...] | None = None
    """Of queries, keys and values; None: any."""
    largest_head: int | None = None
    """Channels of a head at most."""
    head_multiple: int = 1
    """Channels of a head are a multiple of this."""
    compute_capability: tuple[int, int] | None = None
    """Of a CUDA device, at least."""
    libraries: tuple[tuple[str, str], ...] = ()
    """Distributions that must be installed, each with its earliest version."""

    def missing(self, versions: Mapping[str, str]) -> list[str]:
        """What of `libraries` is not among installed `versions`, each in words with what to install."""
        problems = []
        for library, earliest in self.libraries:
            found = versions.get(library)
            if found is None or major_minor(found) < major_minor(earliest):
                here = "is not installed" if found is None else f"is {found} here"
                problems.append(f"{library}, which {here}: install {library} {earliest} or later")
        return problems


@runtime_checkable
class AttentionBackend(Protocol):
    """One way to compute attention over packs. Derive from it, or write a class with the same members.

    A backend has no state of its own: it is made without arguments, once per process.
    """

    name: str
    """For messages."""
    requirements: AttentionRequirements = AttentionRequirements()
    rotates: bool = False
    """Whether its cores apply the rotation that they are given. Where not, the GPTModel rotates before them: without
    TransformerEngine's fused kernel that waits for the device in every layer."""
    decodes: bool = False
    """Whether its cores take `modeling.decode.DecodeParams`, with a cache of keys and values. Where not, generation
    computes whole sequences again for every token."""
    dense_decodes: bool = False
    """Whether generation may put the dense backend's cores, which have a cache, in the place of its own: they compute
    causal attention with RoPE. Models that a strategy built only: of others it does not know the rotation."""

    windows: bool = False
    """Whether its cores heed `TransformerConfig.window_size`. Where not, samples longer than the window are refused."""

    @abstractmethod
    def build_core(self, rotation: Rotation | None, **arguments: Any) -> torch.nn.Module:
        """The module that attends in one layer, a `core_attention` of Megatron's.

        Args:
            rotation: to be applied to queries and keys; None where the model rotates, or nobody.
            arguments: what Megatron gives a core attention: `config`, `layer_number`, `softmax_scale`,
                `pg_collection` and the like.

        Its forward gets queries, keys and values [tokens / cp, heads, head_dim] and, as `packed_seq_params`,
        `PackedParams`; it returns [tokens / cp, heads * head_dim]. A query sees its own segment up to itself. Under
        context parallelism it holds this rank's rows; `packing.collectives.gather_keys` gathers the others' keys.
        """
        ...

    def metadata(self, layout: PackLayout, cp_rank: int, device: torch.device) -> Any:
        """What the cores want of a pack beyond PackedSeqParams, as they find it in `PackedParams.attention`.

        Made once per pack, on the host, and used by every layer; nothing here may wait for the device. `device` is
        where the pack is made, which for CUDA is the host: tensors travel on with the pack, alone or inside
        dataclasses, dicts, lists and tuples.
        """
        return None


def attention_backend(choice: AttentionBackend | str, device_type: str) -> AttentionBackend:
    """The backend that `choice` stands for on a type of device.

    Args:
        choice: a backend, a registered name, `package.module:MyBackend`, or "auto", which follows the device and what
            is installed.
        device_type: "cpu" or "cuda".

    Raises:
        ConfigError: for an unknown name, for what cannot be imported, and for what is no backend.
    """
    if not isinstance(choice, str):
        return _checked(choice, type(choice).__name__)
    entry = default_attention(device_type) if choice == AUTO else ATTENTION_BACKENDS.get(choice)
    return _loaded(choice if entry is None else entry.target)


@functools.cache
def default_attention(device_type: str) -> AttentionEntry:
    """What "auto" stands for on a type of device: the first entry whose libraries are installed."""
    entries = default_entries(device_type)
    for entry in entries:
        needs = _loaded(entry.target).requirements
        if not needs.missing(installed_versions(name for name, _ in needs.libraries)):
            return entry
    return entries[-1]


def installed_versions(distributions: Iterable[str]) -> dict[str, str]:
    """The versions of those distributions that are installed."""
    found = {}
    for name in distributions:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def major_minor(version: str) -> tuple[int, int]:
    """The first two numbers of a version."""
    major, minor = version.split(".")[:2]
    return int(major), int(minor)


@functools.cache
def _loaded(path: str) -> AttentionBackend:
    found = load_dotted(ATTENTION_BACKENDS.kind, path)
    if inspect.isclass(found):
        try:
            found = found()
        except Exception as error:
            raise ConfigError(f"attention backend {path!r}: it cannot be made without arguments ({error})") from error
    return _checked(found, path)


def _checked(found: Any, choice: str) -> AttentionBackend:
    missing = [
        name
        for name in ("name", "requirements", "rotates", "decodes", "build_core", "metadata")
        if not hasattr(found, name)
    ]
    if missing:
        raise ConfigError(
            f"attention backend {choice!r} is a {type(found).__name__} without {', '.join(missing)}: derive it from "
            f"roll_batching.packing.AttentionBackend, or choose one of {', '.join(ATTENTION_BACKENDS.names)}"
        )
    backend: AttentionBackend = found
    return backend
