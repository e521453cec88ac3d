"""The JSON Schema of a manifest, for editors and for the docs."""

from collections.abc import Mapping
from typing import Any

from lpconv.batch.kinds import KINDS
from lpconv.batch.manifest import COMMON_FIELDS, DEFAULT_KIND, MANIFEST_KEYS, MANIFEST_VERSION
from lpconv.batch.reading import schema_of
from lpconv.options import Declared

__all__ = ["manifest_schema"]


def manifest_schema() -> dict[str, Any]:
    """The schema of manifests (JSON Schema 2020-12). Keys of several words are listed with dashes as well."""
    top: dict[str, Any] = {
        "version": {"const": MANIFEST_VERSION},
        "defaults": _defaults(),
        "jobs": {"type": "array", "minItems": 1, "items": {"oneOf": [_job(kind) for kind in KINDS]}},
    }
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "lpconv batch manifest",
        "type": "object",
        "properties": {key: top[key] for key in MANIFEST_KEYS},
        "required": ["version", "jobs"],
        "additionalProperties": False,
    }


def _job(kind: str) -> dict[str, Any]:
    """A job of one kind: its keys, and the name of the kind, which may be left out for the default one."""
    schema = _mapping(COMMON_FIELDS | dict(KINDS[kind].fields))
    schema["properties"]["kind"] = {"const": kind, "description": COMMON_FIELDS["kind"].help}
    return schema | {"required": ["id"] if kind == DEFAULT_KIND else ["id", "kind"]}


def _defaults() -> dict[str, Any]:
    """Settings of conversions, and of each other kind under its name."""
    schema = _mapping({"model": COMMON_FIELDS["model"], **KINDS[DEFAULT_KIND].fields})
    for name, kind in KINDS.items():
        if name != DEFAULT_KIND:
            described = {"description": f"settings of every job of kind {name} that does not say otherwise"}
            schema["properties"][name] = _mapping({"model": COMMON_FIELDS["model"], **kind.fields}) | described
    return schema | {"description": "settings of every job that does not say otherwise"}


def _mapping(fields: Mapping[str, Declared]) -> dict[str, Any]:
    properties: dict[str, Any] = {}
    for key, declared in fields.items():
        schema = schema_of(declared)
        properties |= {key: schema, key.replace("_", "-"): schema}
    return {"type": "object", "properties": properties, "additionalProperties": False}
