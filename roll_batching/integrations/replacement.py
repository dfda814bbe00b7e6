"""Reversible replacement of a host's functions, after a check of their signatures."""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
import logging
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from roll_batching.errors import IntegrationError

logger = logging.getLogger("roll_batching")


@dataclass(frozen=True, kw_only=True)
class Replacement:
    """One function of a host, or method of one of its classes, and what replaces it."""

    module: str
    """The module that defines it, such as `verl.utils.seqlen_balancing`."""
    name: str
    """Its name there: `function`, or `Class.method`."""
    by: Callable[..., Any]
    """The replacement, with the parameters of the original that it was written for."""

    @property
    def path(self) -> str:
        """Dotted path of the original."""
        return f"{self.module}.{self.name}"

    @property
    def parameters(self) -> tuple[str, ...]:
        """Names of the parameters, in order."""
        return tuple(inspect.signature(self.by).parameters)


def refuse_unsupported(what: str, problems: Mapping[str, bool]) -> None:
    """Raises an `IntegrationError` that lists `problems` of `what`; does nothing for an empty list."""
    if refused := [problem for problem, is_so in problems.items() if is_so]:
        raise IntegrationError(f"{what} under roll-batching: {'; '.join(refused)}")


class Integration:
    """Replacements in one host, which are active between `patch()` and `unpatch()`.

    `patch` rebinds each name where it is defined and in every module of the host that has already imported it;
    later imports take the replacement from the defining module. `unpatch` gives all of them back. Both are idempotent.
    """

    def __init__(
        self, host: str, *replacements: Replacement, package: str, distribution: str, tried: tuple[str, ...]
    ) -> None:
        self.host = host
        self._replacements = replacements
        self._package = package
        self._distribution = distribution
        self._tried = tried
        self._originals: dict[str, Any] = {}

    @property
    def patched(self) -> bool:
        """Whether the replacements are in place."""
        return bool(self._originals)

    def original(self, replacement: Replacement) -> Any:
        """The host's own function. Call only while patched."""
        return self._originals[replacement.path]

    def patch(self) -> None:
        """Puts all replacements in place, or none.

        Raises IntegrationError if the host is not installed, lacks one of the functions, or has another signature.
        """
        if self.patched:
            return
        owners = {replacement.path: self._owner(replacement) for replacement in self._replacements}
        for replacement in self._replacements:
            self._check(replacement, owners[replacement.path])
        for replacement in self._replacements:
            owner, name = owners[replacement.path]
            self._originals[replacement.path] = inspect.getattr_static(owner, name)
            self._rebind(owner, name, self._originals[replacement.path], replacement.by)
        names = ", ".join(replacement.path for replacement in self._replacements)
        logger.warning("roll-batching plans for %s %s now: it replaces %s", self.host, self._version(), names)

    def unpatch(self) -> None:
        """Gives the host its own functions back."""
        for replacement in self._replacements:
            if replacement.path in self._originals:
                owner, name = self._owner(replacement)
                self._rebind(owner, name, replacement.by, self._originals.pop(replacement.path))

    def _owner(self, replacement: Replacement) -> tuple[Any, str]:
        """The module or class that holds the name, and the name in it."""
        try:
            owner: Any = importlib.import_module(replacement.module)
        except ImportError as error:
            raise IntegrationError(
                f"{self.host}: importing {replacement.module} failed ({error}). Install {self.host}, or leave "
                "roll_batching.integrations out"
            ) from error
        *outer, name = replacement.name.split(".")
        for part in outer:
            owner = getattr(owner, part, None)
        return owner, name

    def _check(self, replacement: Replacement, place: tuple[Any, str]) -> None:
        owner, name = place
        function = getattr(owner, name, None) if owner is not None else None
        tried = " and ".join(self._tried)
        if not callable(function):
            raise IntegrationError(
                f"{self.host} {self._version()} has no {replacement.path}, which roll-batching would replace. It was "
                f"written for {self.host} {tried}: install one of these, or leave roll_batching.integrations out"
            )
        parameters = tuple(inspect.signature(function).parameters)
        if parameters != replacement.parameters:
            raise IntegrationError(
                f"{self.host} {self._version()}: {replacement.path} has the parameters ({', '.join(parameters)}), not "
                f"({', '.join(replacement.parameters)}) as {self.host} {tried}: install one of these, or leave "
                "roll_batching.integrations out"
            )

    def _rebind(self, owner: Any, name: str, old: Any, new: Any) -> None:
        setattr(owner, name, new)
        if inspect.isclass(owner):
            return
        for module_name, module in list(sys.modules.items()):
            inside = module_name == self._package or module_name.startswith(f"{self._package}.")
            if inside and getattr(module, name, None) is old:  # a module may be None: an import that is forbidden
                setattr(module, name, new)

    def _version(self) -> str:
        """The host's version, as its package or its installation names it."""
        version = getattr(sys.modules.get(self._package), "__version__", None)
        try:
            return str(version or importlib.metadata.version(self._distribution))
        except importlib.metadata.PackageNotFoundError:
            return "(a checkout without a version)"


def policy_worker(module: str, name: str, after_init: Callable[[Any], None] = lambda worker: None) -> Any:
    """`MegatronPolicyWorker`: NeMo-RL's worker as a class of `module`, for Ray's workers to import.

    `after_init` is called with each new worker. Raises AttributeError for another `name`.
    """
    if name != "MegatronPolicyWorker":
        raise AttributeError(f"module {module!r} has no attribute {name!r}")
    import ray

    base = importlib.import_module("nemo_rl.models.policy.workers.megatron_policy_worker").MegatronPolicyWorkerImpl
    environment = importlib.import_module("nemo_rl.models.policy.utils").get_runtime_env_for_policy_worker

    def initialize(self: Any, *args: Any, **kwargs: Any) -> None:
        base.__init__(self, *args, **kwargs)
        after_init(self)

    members = {"__module__": module, "__doc__": base.__doc__, "__init__": initialize}
    implementation = type("MegatronPolicyWorkerImpl", (base,), members)
    worker: Any = ray.remote(runtime_env=environment("megatron_policy_worker"))(implementation)
    vars(sys.modules[module]).update(MegatronPolicyWorkerImpl=implementation, MegatronPolicyWorker=worker)
    return worker
