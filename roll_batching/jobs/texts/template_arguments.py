"""Variables of a chat template beside the messages: which a template reads, and those of a record."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from roll_batching.errors import ConfigError, DataError

if TYPE_CHECKING:
    from jinja2 import nodes

TOOLS = "tools"
KWARGS = "chat_template_kwargs"
"""Key of a record's own variables, and of the job's."""
SETTINGS = f"actor_train.data_args.{KWARGS}"
_GENERATION = re.compile(r"\{%-?\s*(end)?generation\s*-?%\}")
_GIVEN = frozenset({"messages", "add_generation_prompt", "raise_exception", "strftime_now"})
"""Variables that transformers sets at every call; it also sets one for each special token (`bos_token`)."""


@functools.lru_cache(maxsize=16)
def variables_of(template: str) -> frozenset[str]:
    """Names that `template` reads and neither it nor transformers sets. Empty if it cannot be parsed."""
    import jinja2
    from jinja2 import meta, nodes

    environment = jinja2.Environment(extensions=["jinja2.ext.loopcontrols"])
    try:
        parsed = environment.parse(_GENERATION.sub("", template))
    except jinja2.TemplateError:
        return frozenset()  # rendering it names the fault
    # Jinja counts names that are set inside a loop or a branch as undeclared. Variables are tested or read before.
    first: dict[str, str] = {}
    for name in _names(parsed):
        first.setdefault(name.name, name.ctx)
    assigned = {name for name, use in first.items() if use == "store"}
    tested = {test.node.name for test in parsed.find_all(nodes.Test) if isinstance(test.node, nodes.Name)}
    names = meta.find_undeclared_variables(parsed) - (assigned - tested) - _GIVEN
    return frozenset(name for name in names if not name.endswith("_token"))


def _names(node: nodes.Node) -> Iterator[nodes.Name]:
    """Names in the order of evaluation: `{% set tools = tools or [] %}` reads the variable first."""
    from jinja2 import nodes

    children = list(node.iter_child_nodes())
    if isinstance(node, nodes.Assign | nodes.For):
        children[:2] = children[1::-1]  # the target comes before the value
    for child in children:
        yield from [child] if isinstance(child, nodes.Name) else _names(child)


@dataclass(frozen=True, kw_only=True)
class TemplateArguments:
    """Variables that a chat template gets: the job's, and those that a record holds."""

    tools: str | None = None
    """Key of a record's tools."""
    columns: Mapping[str, str] = field(default_factory=dict)
    """By variable, the key of a record with its value."""
    values: Mapping[str, Any] = field(default_factory=dict)
    """For all records."""

    def check(self, variables: frozenset[str]) -> None:
        """Raises ConfigError for a variable of the settings that is not among the template's `variables`."""
        for key, names in (("chat_template_columns", self.columns), (KWARGS, self.values)):
            for name in names:
                if name not in variables:
                    raise ConfigError(
                        f"actor_train.data_args.{key} sets {name!r}, which the tokenizer's chat template does not "
                        f"read. It reads: {', '.join(sorted(variables)) or 'the messages alone'}"
                    )

    def of(self, record: Mapping[str, Any]) -> dict[str, Any]:
        """The variables of a record. Raises DataError for tools that are no list of objects, and the like."""
        own = record.get(KWARGS)
        if own is not None and not isinstance(own, Mapping):
            raise DataError(f"{KWARGS!r} must be an object of variables of the chat template, got {_kind(own)}")
        columns = {name: record[key] for name, key in self.columns.items() if record.get(key) is not None}
        variables = {**self.values, **(own or {}), **columns}
        tools = None if self.tools is None else record.get(self.tools)
        return variables if tools is None or tools == [] else {**variables, TOOLS: _tools(tools, str(self.tools))}

    def notices(self, records: Iterable[Mapping[str, Any]], variables: frozenset[str]) -> list[str]:
        """Keys of `records` that the template's `variables` would take and do not get, and values that none takes."""
        held, own = set[str](), set[str]()
        for record in records:
            held |= {name for name, value in record.items() if value is not None}
            own |= set(record.get(KWARGS) or ())
        sources = dict(self.columns) | ({} if self.tools is None else {TOOLS: self.tools})
        notices = []
        for name in sorted(held & variables - sources.keys() - self.values.keys() - own):
            cure = f"tools: {TOOLS}" if name == TOOLS else f"chat_template_columns: {{{name}: {name}}}"
            text = f"records have {name!r}, which the chat template reads and does not get"
            notices.append(f"{text}: set actor_train.data_args.{cure}")
        for name, key in sources.items():
            if key in held and name not in variables:
                notices.append(f"records have {key!r}, and the chat template reads no {name}: it leaves them out")
            if key not in held and (name, key) != (TOOLS, TOOLS):
                notices.append(f"no record has {key!r}, which actor_train.data_args names for {name}")
        if unread := sorted(own - variables):
            notices.append(f"{KWARGS} of records sets {', '.join(unread)}, which the chat template does not read")
        return notices


NO_ARGUMENTS = TemplateArguments()


def _tools(value: Any, key: str) -> list[Any]:
    """The tools of a record: a list of objects, or its JSON text."""
    try:
        tools = json.loads(value) if isinstance(value, str) else value
    except ValueError:
        tools = value
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise DataError(
            f"{key!r} must be a list of tools, each an object such as {{'type': 'function', 'function': {{...}}}}, or "
            f"its JSON text; got {_kind(value)} (actor_train.data_args.tools names the key; null: none)"
        )
    return tools


def _kind(value: Any) -> str:
    return f"{type(value).__name__} {str(value)[:40]!r}"
