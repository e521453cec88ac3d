"""The JSON Schema of a manifest, for editors and for the docs."""

from typing import Any

from lpconv.batch.fields import FIELDS
from lpconv.batch.manifest import DEFAULT_KEYS, JOB_KEYS, MANIFEST_KEYS, MANIFEST_VERSION

__all__ = ["manifest_schema"]

_JOB_FIELDS: dict[str, dict[str, Any]] = {
    "id": {
        "type": "string",
        "pattern": "^[A-Za-z0-9][A-Za-z0-9._-]*$",
        "description": "name of the job, unique in the manifest",
    },
    "model": {
        "type": "string",
        "minLength": 1,
        "description": "directory (relative to the manifest), hub id, alias, or demo",
    },
    "output": {
        "type": "string",
        "minLength": 1,
        "description": "folder to write, relative to the manifest; out/ID if left out",
    },
}


def manifest_schema() -> dict[str, Any]:
    """The schema of manifests (JSON Schema 2020-12). Keys of several words are listed with dashes as well."""
    top: dict[str, Any] = {
        "version": {"const": MANIFEST_VERSION},
        "defaults": _mapping(DEFAULT_KEYS) | {"description": "settings of every job that does not say otherwise"},
        "jobs": {"type": "array", "minItems": 1, "items": _mapping(JOB_KEYS) | {"required": ["id"]}},
    }
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "lpconv batch manifest",
        "type": "object",
        "properties": {key: top[key] for key in MANIFEST_KEYS},
        "required": ["version", "jobs"],
        "additionalProperties": False,
    }


def _mapping(keys: tuple[str, ...]) -> dict[str, Any]:
    properties: dict[str, Any] = {}
    for key in keys:
        schema = FIELDS[key].schema | {"description": FIELDS[key].doc} if key in FIELDS else _JOB_FIELDS[key]
        properties |= {key: schema, key.replace("_", "-"): schema}
    return {"type": "object", "properties": properties, "additionalProperties": False}
