"""What the device and the installed libraries cannot compute, said before the first forward pass meets it."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch

from roll_batching.packing.attention_backend import AttentionBackend


@dataclass(frozen=True, kw_only=True)
class Installed:
    """What the answer of `refusals` depends on beside the model."""

    versions: Mapping[str, str] = field(default_factory=dict)
    """Of installed distributions."""
    compute_capability: tuple[int, int] | None
    """Of the CUDA device; None on the CPU."""
    router_product: bool
    """Whether Megatron has a product for its routers (before 0.17 it comes from TransformerEngine alone)."""

    @classmethod
    def here(cls, device: torch.device, distributions: Iterable[str] = ()) -> Installed:
        """What this process runs on, with the versions of some distributions."""
        from megatron.core.transformer.moe import moe_utils

        return cls(
            versions=_versions(distributions),
            compute_capability=torch.cuda.get_device_capability(device) if device.type == "cuda" else None,
            router_product=hasattr(moe_utils, "te_general_gemm"),
        )


def refusals_here(
    *, device: torch.device, dtype: torch.dtype, head_dim: int, experts: bool, backend: AttentionBackend | None
) -> list[str]:
    """`refusals` of what is installed here."""
    libraries = [] if backend is None else [name for name, _ in backend.requirements.libraries]
    return refusals(
        device=device.type,
        dtype=dtype,
        head_dim=head_dim,
        experts=experts,
        backend=backend,
        installed=Installed.here(device, libraries),
    )


def refusals(
    *,
    device: str,
    dtype: torch.dtype,
    head_dim: int,
    experts: bool,
    backend: AttentionBackend | None,
    installed: Installed,
) -> list[str]:
    """Everything that would fail inside the first forward pass, each with what to install or to set. Pure.

    Args:
        device: "cpu" or "cuda".
        dtype: of queries, keys and values.
        head_dim: width of a head.
        experts: whether the model has a mixture of experts.
        backend: what attends; None where a model brings an attention core of its own.
        installed: versions and device.
    """
    problems = []
    if experts and not installed.router_product:
        problems.append(
            "this Megatron-Core computes the router of a mixture of experts with TransformerEngine alone, which is not "
            "installed: install transformer-engine, or megatron-core 0.17 or later"
        )
    if backend is not None:
        problems += _attention_refusals(backend, device, dtype, head_dim, installed)
    return problems


def _attention_refusals(
    backend: AttentionBackend, device: str, dtype: torch.dtype, head_dim: int, installed: Installed
) -> list[str]:
    needs, name = backend.requirements, f"the attention backend {backend.name}"
    if device not in needs.devices:
        return [f"{name} runs on {' and '.join(needs.devices)}, not on {device}: choose another attention_backend"]
    problems = []
    for library, earliest in needs.libraries:
        found = installed.versions.get(library)
        if found is None or _major_minor(found) < _major_minor(earliest):
            here = "is not installed" if found is None else f"is {found} here"
            problems.append(
                f"{name} needs {library}, which {here}: install {library} {earliest} or later, or choose another "
                "attention_backend"
            )
    if needs.compute_capability is not None and installed.compute_capability is not None:
        if installed.compute_capability < needs.compute_capability:
            least, this = (".".join(map(str, x)) for x in (needs.compute_capability, installed.compute_capability))
            problems.append(
                f"{name} needs compute capability {least} or later, this GPU has {this}: use another GPU, or choose "
                "another attention_backend"
            )
    if needs.dtypes is not None and dtype not in needs.dtypes:
        known = " and ".join(_word(one) for one in needs.dtypes)
        problems.append(
            f"{name} computes in {known}, not in {_word(dtype)}: set model_args.dtype to auto or bf16 "
            "(TransformerConfig.bf16 and params_dtype in a model of your own), or choose another attention_backend"
        )
    if head_dim > (needs.largest_head or head_dim) or head_dim % needs.head_multiple:
        limit = "" if needs.largest_head is None else f" of up to {needs.largest_head} channels,"
        problems.append(
            f"{name} takes heads{limit} a multiple of {needs.head_multiple}, not of {head_dim}: change kv_channels (or "
            "hidden_size and num_attention_heads), or choose another attention_backend"
        )
    return problems


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _versions(distributions: Iterable[str]) -> dict[str, str]:
    found = {}
    for name in distributions:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _major_minor(version: str) -> tuple[int, int]:
    major, minor = version.split(".")[:2]
    return int(major), int(minor)
