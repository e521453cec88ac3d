"""Read a manifest: the file (YAML, TOML or JSON), its settings as option values, and its JSON Schema.

YAML scalars stay text. PyYAML follows YAML 1.1, in which ``on`` and ``no`` are booleans, ``1e-3`` is text and ``010``
is eight; the fields of the manifest know their types, so no type has to be guessed. Duplicate keys are an error in all
three kinds of file. pydantic parses the settings, with error messages by lpconv.
"""

import dataclasses
import functools
import json
import reprlib
import tomllib
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import AfterValidator, Field, PlainValidator, TypeAdapter, WithJsonSchema

from lpconv.batch.kinds import COMMON_FIELDS, DEFAULT_KIND, KINDS, MANIFEST_VERSION, SHARED_FIELDS
from lpconv.errors import UsageError
from lpconv.lookup import find, nearest
from lpconv.options import Declared, check_value, options_of
from lpconv.plan.options import ConvertOptions, FormatRule, parse_rule
from lpconv.storage.header import unique_keys
from lpconv.storage.place import read_small

_FULL = Field(pattern=r"\S")  # not empty, not blank
_NULL = (None, "", "null", "~")


def read_document(path: Path) -> Any:
    """Return the parsed manifest file. Raises InputError if it cannot be read, UsageError if it does not parse."""
    parse = find("kind of manifest", path.suffix.lower(), _PARSERS)
    try:
        return parse(read_small(path).decode())
    except (yaml.YAMLError, ValueError, OverflowError, RecursionError) as e:
        kind = path.suffix.lstrip(".").upper()
        raise UsageError(f"`{path}` is not valid {kind}: {e}", hint="docs/batch.md shows a valid manifest") from e


class _TextLoader(yaml.BaseLoader):
    """YAML loader that keeps every scalar as text, so no type is guessed."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node)
            if isinstance(key, str) and key in seen:
                raise yaml.constructor.ConstructorError(None, None, f"key `{key}` occurs twice", key_node.start_mark)
            seen |= {key} if isinstance(key, str) else set()
        return super().construct_mapping(node, deep)


_parse_yaml = functools.partial(yaml.load, Loader=_TextLoader)
_PARSERS: dict[str, Callable[[str], Any]] = {
    ".yaml": _parse_yaml,
    ".yml": _parse_yaml,
    ".toml": tomllib.loads,
    ".json": functools.partial(json.loads, object_pairs_hook=unique_keys),
}


def read_setting(declared: Declared, raw: Any) -> Any:
    """Parse an option's value from a document. Raises UsageError, with the place inside the value, if it is invalid."""
    if declared.nullable and raw in _NULL:
        return None
    if not declared.is_many:
        return _read_one(declared, raw, "")
    if isinstance(raw, list):
        return tuple(_read_one(declared, one, f"[{i}]") for i, one in enumerate(raw))
    if declared.type is FormatRule:
        raise UsageError(f"expected a list of rules, not {_show(raw)}", hint=_RULE_HINT)
    return (_read_one(declared, raw, ""),)


def _read_one(declared: Declared, raw: Any, place: str) -> Any:
    with prefix_errors(place):
        try:
            if isinstance(raw, bool) and declared.type in (int, float):
                raise ValueError("pydantic would read True as 1")
            return _adapter(declared).validate_python(raw)
        except ValueError as e:  # pydantic's errors are of this type
            raise UsageError(f"expected {declared.expected}, not {_show(raw)}", hint=declared.hint) from e


@contextmanager
def prefix_errors(place: str) -> Iterator[None]:
    """Prefix the message of a UsageError with its place in the manifest."""
    try:
        yield
    except UsageError as e:
        separator = "" if not place or e.message.startswith(("[", ".")) else ": "
        raise UsageError(f"{place}{separator}{e.message}", hint=e.hint, details=e.details) from e


def manifest_schema() -> dict[str, Any]:
    """The JSON Schema (2020-12) of manifests. Keys of several words are also allowed with dashes."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "lpconv batch manifest",
        "type": "object",
        "properties": {
            "version": {"const": MANIFEST_VERSION},
            "defaults": _defaults(),
            "jobs": {"type": "array", "minItems": 1, "items": {"oneOf": [_job(kind) for kind in KINDS]}},
        },
        "required": ["version", "jobs"],
        "additionalProperties": False,
    }


def _job(kind: str) -> dict[str, Any]:
    """Schema of a job of one kind: its keys, and the name of the kind, which is optional for the default kind."""
    schema = _mapping(COMMON_FIELDS | KINDS[kind].fields)
    schema["properties"]["kind"] = {"const": kind, "description": COMMON_FIELDS["kind"].help}
    return schema | {"required": ["id"] if kind == DEFAULT_KIND else ["id", "kind"]}


def _defaults() -> dict[str, Any]:
    """Schema of `defaults`: settings of conversions, and of each other kind under its name."""
    schema = _mapping(SHARED_FIELDS | KINDS[DEFAULT_KIND].fields)
    for name, kind in KINDS.items():
        if name != DEFAULT_KIND:
            described = {"description": f"default settings of jobs of kind {name}"}
            schema["properties"][name] = _mapping(SHARED_FIELDS | kind.fields) | described
    return schema | {"description": "default settings of all jobs"}


def _mapping(fields: Mapping[str, Declared]) -> dict[str, Any]:
    properties: dict[str, Any] = {}
    for key, declared in fields.items():
        schema = schema_of(declared)
        properties |= {key: schema, key.replace("_", "-"): schema}
    return {"type": "object", "properties": properties, "additionalProperties": False}


def schema_of(declared: Declared) -> dict[str, Any]:
    """JSON Schema of one option."""
    schema = _adapter(declared).json_schema()
    if declared.is_many:
        listed = {"type": "array", "items": schema}
        schema = listed if declared.type is FormatRule else {"anyOf": [schema, listed]}
    if declared.nullable:
        schema = {"anyOf": [schema, {"type": "null"}]}
    if declared.default not in (dataclasses.MISSING, None, (), ""):
        schema["default"] = list(declared.default) if declared.is_many else declared.default
    return schema | {"description": declared.help}


@functools.cache
def _adapter(declared: Declared) -> TypeAdapter[Any]:
    """The pydantic adapter that parses one value of an option."""
    o = declared.option
    if declared.type is FormatRule:
        return TypeAdapter(Annotated[Any, PlainValidator(_read_rule), WithJsonSchema(_RULE_SCHEMA)])
    if o.parse is not None:
        accepted: TypeAdapter[Any] = TypeAdapter(o.given)
        read = PlainValidator(
            lambda raw: declared.read(str(accepted.validate_python(raw, strict=True))), json_schema_input_type=o.given
        )
        return TypeAdapter(Annotated[Any, read])
    if o.choices is not None:
        known = AfterValidator(lambda name: check_value(declared, name))
        return TypeAdapter(Annotated[str, _FULL, known, WithJsonSchema({"enum": list(o.choices)})])
    if declared.type is bool:
        return TypeAdapter(bool)
    if declared.type is str:
        return TypeAdapter(Annotated[str, _FULL])
    is_finite = Field(allow_inf_nan=None if declared.type is int else False)
    number: Any = Annotated[declared.type, *declared.bounds, is_finite]
    return TypeAdapter(number)


def read_mapping(
    raw: Any, known: Collection[str], place: str, *, elsewhere: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """A mapping with dashes in its keys replaced by underscores. Raises UsageError, with `place`, for unknown keys.

    `elsewhere` has hints for keys that are valid in another place.
    """
    hints = _NOT_A_KEY | dict(elsewhere or {})
    if not isinstance(raw, Mapping):
        raise UsageError(f"{place or 'manifest'}: expected a mapping, not {_show(raw)}", hint=_keys_hint(known))
    fields: dict[str, Any] = {}
    for key, value in raw.items():
        name = str(key).replace("-", "_")
        where = f"{place.rstrip('.')}.{key}" if place else str(key)
        if name not in known:
            near = nearest(name, known)
            hint = f"did you mean `{near}`?" if near else _keys_hint(known)
            raise UsageError(f"{where}: unknown key", hint=hints.get(name, hint))
        if name in fields:
            raise UsageError(
                f"{where}: the key occurs twice, once with - and once with _", hint="keep only one of them"
            )
        fields[name] = value
    return fields


_NOT_A_KEY = {"resume": "pass --resume on the command line instead", "bits": "did you mean `budget_bits`?"}


def _keys_hint(known: Collection[str]) -> str:
    return "known keys: " + ", ".join(known)


def _show(raw: Any) -> str:
    if raw in (None, ""):
        return "nothing"
    # Shortened: with aliases, a YAML document of a few lines can become huge when printed.
    return f"`{raw[:80] if isinstance(raw, str) else reprlib.repr(raw)}`"


def _read_rule(raw: Any) -> FormatRule:
    """Parse a rule: PATTERN=FORMAT, or the two in a mapping."""
    if isinstance(raw, str):
        return parse_rule(raw)
    if not isinstance(raw, Mapping):
        raise UsageError(f"expected a rule, not {_show(raw)}", hint=_RULE_HINT)
    rule = read_mapping(raw, ("match", "format", "keep"), ".")
    is_kept = str(rule.pop("keep", False)).casefold() in ("true", "yes", "on")
    if "match" not in rule or is_kept == ("format" in rule):
        raise UsageError("a rule needs `match` and either `format` or `keep: true`", hint=_RULE_HINT)
    return parse_rule(f"{rule['match']}={'keep' if is_kept else rule['format']}")


_RULE_HINT = "for example {match: '*lm_head*', keep: true} or {match: 're:down_proj', format: bf16}"
_RULE_FORMATS = list(options_of(ConvertOptions)["format"].option.choices or ())
_RULE_SCHEMA = {
    "anyOf": [
        {"type": "string", "pattern": ".=."},
        {
            "type": "object",
            "properties": {
                "match": {"type": "string", "minLength": 1},
                "format": {"anyOf": [{"enum": _RULE_FORMATS}, {"type": "number"}]},  # or a number of bits
                "keep": {"const": True},
            },
            "required": ["match"],
            "oneOf": [{"required": ["format"]}, {"required": ["keep"]}],
            "additionalProperties": False,
        },
    ]
}
