"""Interface of attention backends: the kernels that compute attention over packs.

A backend is one class in one file. It builds the attention module of a layer, makes the metadata that this module
needs of a pack beyond Megatron's PackedSeqParams, and states its requirements, whether it applies RoPE, and whether it
decodes with a cache. A configuration names it: `attention_backend: package.module:MyBackend`.
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
from roll_batching.packing.pack_layout import PackLayout, PackSlice
from roll_batching.registry import load_dotted
from roll_batching.settings.attention_backends import ATTENTION_BACKENDS, AUTO, AttentionEntry, default_entries

Rotation: TypeAlias = Callable[[torch.Tensor, torch.Tensor, PackedSeqParams], tuple[torch.Tensor, torch.Tensor]]
"""(query, key, params of the pass) -> query and key rotated by their positions."""


@dataclass(frozen=True, kw_only=True)
class AttentionRequirements:
    """Requirements of a backend; a model or device that does not meet them is refused before the first pass."""

    devices: tuple[str, ...] = ("cpu", "cuda")
    """Types of devices."""
    dtypes: tuple[torch.dtype, ...] | None = None
    """Dtypes of queries, keys and values; None: any."""
    largest_head: int | None = None
    """Most channels of a head; None: any number."""
    head_multiple: int = 1
    """Channels of a head must be a multiple of this."""
    compute_capability: tuple[int, int] | None = None
    """Lowest compute capability of a CUDA device; None: any."""
    libraries: tuple[tuple[str, str], ...] = ()
    """Distributions that must be installed, with their earliest versions."""
    instead: str = "choose another attention_backend"
    """The remedy if a library is not to be installed."""
    device_limits: Callable[..., list[str]] | None = None
    """Refusals that depend on the device and the model together: called with the keywords `compute_capability`,
    `head_dim`, `value_dim`, `has_window` and `has_sinks` of a supported dtype on CUDA; None: no others."""

    def missing(self, versions: Mapping[str, str]) -> list[str]:
        """Messages for `libraries` that are missing or too old among the installed `versions`."""
        problems = []
        for library, earliest in self.libraries:
            installed = versions.get(library)
            if installed is None or major_minor(installed) < major_minor(earliest):
                status = "is not installed" if installed is None else f"is {installed} here"
                problems.append(f"{library}, which {status}: install {library} {earliest} or later")
        return problems


@runtime_checkable
class AttentionBackend(Protocol):
    """Attention over packs. Derive from it, or write a class with the same members.

    A backend has no state. It is constructed without arguments, once per process.
    """

    name: str
    """Name in messages."""
    requirements: AttentionRequirements = AttentionRequirements()
    rotates: bool = False
    """Whether its cores apply RoPE. If not, the GPTModel does before them; without TransformerEngine's fused kernel,
    that waits for the device in every layer."""
    decodes: bool = False
    """Whether its cores accept `modeling.decode.DecodeParams`, with a cache of keys and values. If not, generation
    computes the whole sequence again for each token."""
    dense_decodes: bool = False
    """Whether generation may use the cores of the dense backend, which have a cache, in place of its cores. They
    compute causal attention with RoPE. Only for models that a strategy has built: of others the rotation is unknown."""

    windows: bool = False
    """Whether its cores apply `TransformerConfig.window_size`. If not, samples longer than the window are refused."""

    sinks: bool = False
    """Whether its cores have the parameter of `TransformerConfig.softmax_type: learnable`."""

    narrow_values: bool = False
    """Whether its cores take values with fewer channels than keys. If not, multi-latent attention is refused."""

    context_size_per_pack: bool = False
    """Whether its cores exchange keys over `PackedParams.context_group`. If not, plans with a context-parallel size per
    pack are refused."""

    shares_prefixes: bool = False
    """Whether its metadata reads `spans_of`, whose keys of one sample may be several runs of tokens. If not, packs
    whose samples share prefixes are refused."""

    slices: bool = False
    """Whether its cores attend to keys that earlier slices keep, as `modeling.attention.core.PackedCore` does, and its
    metadata reads of a layout only `spans_of`, `restore` and `cp_size`. If not, packs are not cut into slices."""

    def for_window(self, window: int) -> AttentionBackend:
        """The backend for a model some of whose layers have a sliding window of `window` tokens.

        Backends with `windows` whose metadata depends on it return another one, equal for equal windows.
        """
        return self

    @abstractmethod
    def build_core(self, rotation: Rotation | None, **arguments: Any) -> torch.nn.Module:
        """Module that computes attention in one layer, as Megatron's `core_attention`.

        Args:
            rotation: RoPE to apply to queries and keys; None if the model applies it, or has none.
            arguments: Megatron's arguments of a core attention, such as `config`, `layer_number`, `softmax_scale` and
                `pg_collection`.

        Its forward gets queries, keys and values [tokens / cp, heads, head_dim] and, as `packed_seq_params`,
        `PackedParams`; it returns [tokens / cp, heads * head_dim]. A query attends to its segment up to itself,
        and with `shares_prefixes` to the prefix of its sample, earlier in the pack. Under
        context parallelism the inputs are those of this rank's tokens; `packing.collectives.gather_keys` gathers keys.
        """
        ...

    def metadata(self, layout: PackLayout | PackSlice, cp_rank: int, device: torch.device) -> Any:
        """Data of a pack for the cores beyond PackedSeqParams, which they get as `PackedParams.attention`.

        Computed once per pack, on the host, for all layers, without waiting for the device. `device` is the device
        where the pack is made, which for CUDA is the host: tensors are copied with the pack, also those in
        dataclasses, dicts, lists and tuples.
        """
        return None


def attention_backend(choice: AttentionBackend | str, device_type: str) -> AttentionBackend:
    """Attention backend for a choice and a device type.

    Args:
        choice: a backend, a registered name, `package.module:MyBackend`, or "auto", which depends on the device and on
            installed libraries.
        device_type: "cpu" or "cuda".

    Raises:
        ConfigError: for an unknown name, a path that cannot be imported, or an object that is not a backend.
    """
    if not isinstance(choice, str):
        return _check_backend(choice, type(choice).__name__)
    entry = default_attention(device_type) if choice == AUTO else ATTENTION_BACKENDS.get(choice)
    return _load_backend(choice if entry is None else entry.target)


def attention_name(backend: AttentionBackend | None) -> str:
    """Name of a model's attention in errors; None: a core that the caller built."""
    return "the model's own attention" if backend is None else f"the attention backend {backend.name}"


@functools.cache
def default_attention(device_type: str) -> AttentionEntry:
    """Backend that "auto" means on a device type: the first entry whose libraries are installed."""
    entries = default_entries(device_type)
    for entry in entries:
        requirements = _load_backend(entry.target).requirements
        if not requirements.missing(installed_versions(name for name, _ in requirements.libraries)):
            return entry
    return entries[-1]


def installed_versions(distributions: Iterable[str]) -> dict[str, str]:
    """Version of each of `distributions` that is installed."""
    versions = {}
    for name in distributions:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def major_minor(version: str) -> tuple[int, int]:
    """First two numbers of a version."""
    major, minor = version.split(".")[:2]
    return int(major), int(minor)


@functools.cache
def _load_backend(path: str) -> AttentionBackend:
    backend = load_dotted(ATTENTION_BACKENDS.kind, path)
    if inspect.isclass(backend):
        try:
            backend = backend()
        except Exception as error:
            raise ConfigError(f"attention backend {path!r} cannot be made without arguments: {error}") from error
    return _check_backend(backend, path)


def _check_backend(candidate: Any, choice: str) -> AttentionBackend:
    missing = [
        name
        for name in ("name", "requirements", "rotates", "decodes", "build_core", "metadata")
        if not hasattr(candidate, name)
    ]
    if missing:
        raise ConfigError(
            f"attention backend {choice!r} is a {type(candidate).__name__} without {', '.join(missing)}: derive it "
            f"from roll_batching.packing.AttentionBackend, or choose one of {', '.join(ATTENTION_BACKENDS.names)}"
        )
    backend: AttentionBackend = candidate
    return backend
