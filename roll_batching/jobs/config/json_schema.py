"""The JSON schema of job files, for editors: made from the settings classes and the table of foreign keys."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pydantic.json_schema import GenerateJsonSchema
from pydantic_core import core_schema

from roll_batching.jobs.config.foreign_keys import FOREIGN_KEYS, ForeignKey, Verdict
from roll_batching.jobs.config.job_keys import JobKeys
from roll_batching.jobs.config.yaml_source import REFERENCE
from roll_batching.settings.megatron_config import MEGATRON_STRATEGIES
from roll_batching.settings.role import StrategyArgs

Schema = dict[str, Any]

_REFERENCE: Schema = {"$ref": "#/$defs/Reference"}
_NOTES = {"description", "default", "deprecated"}
"""Keywords of a schema that restrict no value."""


def build_job_schema() -> Schema:
    """The JSON schema (draft 2020-12) of job files."""
    schema = JobKeys.model_json_schema(schema_generator=_Generator)
    sections = {name: _allow_references(section) for name, section in schema.pop("$defs").items()}
    sections["Reference"] = {
        "description": "Another key's value, as ${path.to.key}.",
        "type": "string",
        "pattern": REFERENCE.pattern,
    }
    job = _allow_references(schema) | {"title": "Job of roll-batching"}
    return {"$schema": _Generator.schema_dialect, **job, "$defs": sections}


class _Generator(GenerateJsonSchema):
    """Pydantic's generator for the settings of a file, which may be incomplete and have foreign keys."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False  # it would be the key again

    def model_schema(self, schema: core_schema.ModelSchema) -> Schema:
        section = super().model_schema(schema)
        # Overrides and model directories give keys, too; the loader reports missing ones.
        section.pop("required", None)
        keys: Schema = section["properties"]
        keys |= {key.name: _describe_foreign_key(key) for key in FOREIGN_KEYS.get(schema["cls"], {}).values()}
        if schema["cls"] is StrategyArgs:
            layout = keys["strategy_config"]
            keys["strategy_config"] = {key: value for key, value in layout.items() if key in _NOTES}
            is_megatron = {"strategy_name": {"enum": list(MEGATRON_STRATEGIES)}}
            section["if"] = {"properties": is_megatron}
            section["then"] = {"properties": {"strategy_config": layout}}
            section["else"] = {"properties": {"strategy_config": {"type": ["object", "null"]}}}  # an engine's options
        return section


def _describe_foreign_key(key: ForeignKey) -> Schema:
    values = {"enum": [None, *key.allowed]} if key.verdict is Verdict.REFUSED else {}
    return {"description": key.reason, "deprecated": True, **values}


def _allow_references(schema: Schema) -> Schema:
    """`schema` of a section or list, whose values may be references."""
    result = dict(schema)
    for key, inner in schema.items():
        if key == "properties":
            result[key] = {name: _allow_reference(value) for name, value in inner.items()}
        elif key == "prefixItems":
            result[key] = [_allow_reference(value) for value in inner]
        elif key in ("items", "additionalProperties") and isinstance(inner, dict):
            result[key] = _allow_reference(inner)
        elif key in ("then", "else"):
            result[key] = _allow_references(inner)
    return result


def _allow_reference(schema: Schema) -> Schema:
    """`schema` of a value, which may be a reference."""
    values = {key: inner for key, inner in schema.items() if key not in _NOTES}
    if not values:
        return schema
    options = list(_list_options(values))
    if not any(
        option.get("type") == "string" and not option.keys() & {"enum", "const", "pattern"} for option in options
    ):
        options.append(_REFERENCE)
    notes = {key: schema[key] for key in schema if key in _NOTES}
    return {**notes, **(options[0] if len(options) == 1 else {"anyOf": options})}


def _list_options(schema: Schema) -> Iterator[Schema]:
    """The alternatives of `schema`; those of alternatives are among them."""
    if "anyOf" in schema:
        for option in schema["anyOf"]:
            yield from _list_options(option)
    else:
        yield _allow_references(schema)
