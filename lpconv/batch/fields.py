"""How one setting of a job is read from a manifest, and what JSON Schema says of it.

A reader turns a scalar or list of the document into the value of a setting, or raises UsageError. Text stands for
numbers and booleans too, because YAML arrives as text (see `document`).
"""

import math
import reprlib
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from lpconv.convert.options import FormatRule, parse_rule, parse_size
from lpconv.errors import UsageError
from lpconv.formats.spec import get_format
from lpconv.gates import GateTable
from lpconv.lookup import find, nearest

__all__ = [
    "AMOUNT",
    "COUNT",
    "COUNTS",
    "FLAG",
    "NUMBER",
    "SCALE",
    "SIZE",
    "TEXT",
    "TEXTS",
    "WHOLE",
    "Field",
    "Reading",
    "field",
    "gates",
    "one_of",
    "read_mapping",
    "read_text",
    "rules",
    "some_of",
]

Reader = Callable[[Any], Any]
Reading = tuple[Reader, dict[str, Any]]  # and the schema of what it reads

_TRUE = frozenset({"true", "yes", "on"})
_FALSE = frozenset({"false", "no", "off"})
_NULL = (None, "", "null", "~")


@dataclass(frozen=True, kw_only=True)
class Field:
    """One setting: how to read it, what JSON Schema says of it, and its meaning. `nullable` ones may be null.

    `is_path` says that it names a file as `model` names a directory: relative to the manifest's folder.
    """

    read: Reader
    schema: dict[str, Any]
    doc: str
    nullable: bool = False
    is_path: bool = False

    def value(self, raw: Any) -> Any:
        """The setting's value in a document. UsageError where it does not fit."""
        return None if self.nullable and raw in _NULL else self.read(raw)


def read_mapping(
    raw: Any, known: Collection[str], place: str, *, elsewhere: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """A mapping with its keys in underscored spelling. UsageError, with `place`, for a key not in `known`.

    `elsewhere` has hints for keys that would be known in another place.
    """
    hints = _NOT_A_KEY | dict(elsewhere or {})
    if not isinstance(raw, Mapping):
        raise UsageError(f"{place or 'manifest'}: expected a mapping, not {_show(raw)}", hint=_keys_hint(known))
    fields: dict[str, Any] = {}
    for key, value in raw.items():
        name = str(key).replace("-", "_")
        where = f"{place}.{key}".lstrip(".")
        if name not in known:
            near = nearest(name, known)
            hint = f"did you mean `{near}`?" if near else _keys_hint(known)
            raise UsageError(f"{where}: unknown key", hint=hints.get(name, hint))
        if name in fields:
            raise UsageError(f"{where}: given twice, with - and with _", hint="keep one of them")
        fields[name] = value
    return fields


def read_text(raw: Any) -> str:
    """Text that is not empty."""
    if not isinstance(raw, str) or not raw.strip():
        raise UsageError(f"expected text, not {_show(raw)}", hint="put quotes around it")
    return raw


_NOT_A_KEY = {"resume": "resuming belongs to a run, not to a manifest: pass --resume"}


def _keys_hint(known: Collection[str]) -> str:
    return "known keys: " + ", ".join(known)


def _show(raw: Any) -> str:
    if raw in (None, ""):
        return "nothing"
    # Cut short: aliases make a YAML document of a few lines as large as memory when it is written out.
    return f"`{raw[:80] if isinstance(raw, str) else reprlib.repr(raw)}`"


def _read_flag(raw: Any) -> bool:
    if isinstance(raw, bool):
        return raw
    word = raw.strip().casefold() if isinstance(raw, str) else ""
    if word not in _TRUE | _FALSE:
        raise UsageError(f"expected true or false, not {_show(raw)}", hint="write true or false")
    return word in _TRUE


def _read_whole(raw: Any, least: int = 0) -> int:
    text = str(raw).strip()
    if isinstance(raw, bool) or not (text.isascii() and text.isdigit()) or int(text) < least:
        raise UsageError(f"expected a whole number from {least} on, not {_show(raw)}", hint="for example 2")
    return int(text)


def _read_count(raw: Any) -> int:
    return _read_whole(raw, least=1)


def _read_counts(raw: Any) -> tuple[int, ...]:
    return tuple(_read_count(item) for item in raw) if isinstance(raw, list) else (_read_count(raw),)


def _number(raw: Any) -> float:
    try:
        return math.nan if isinstance(raw, bool) else float(raw)
    except (TypeError, ValueError):
        return math.nan


def _read_number(raw: Any) -> float:
    if not 0 < _number(raw) < math.inf:
        raise UsageError(f"expected a number above zero, not {_show(raw)}", hint="for example 4.5")
    return _number(raw)


def _read_amount(raw: Any) -> float:
    if not 0 <= _number(raw) < math.inf:
        raise UsageError(f"expected a number from zero on, not {_show(raw)}", hint="for example 0.1")
    return _number(raw)


def _read_scale(raw: Any) -> str:
    """A name, or a number as text, which is how a loss scale is asked for."""
    return read_text(raw if isinstance(raw, (str, bool)) else str(raw))


def _read_size(raw: Any) -> int:
    if isinstance(raw, bool) or not isinstance(raw, (int, str)):
        raise UsageError(f"expected a size, not {_show(raw)}", hint="for example 4GB, 512MiB or 1000000")
    return parse_size(str(raw))


def _read_texts(raw: Any) -> tuple[str, ...]:
    if not isinstance(raw, list):
        return (read_text(raw),)
    return tuple(read_text(item) for item in raw)


def _read_rules(raw: Any) -> tuple[FormatRule, ...]:
    if not isinstance(raw, list):
        raise UsageError(f"expected a list of rules, not {_show(raw)}", hint=_RULE_HINT)
    return tuple(_read_rule(item, f"[{i}]") for i, item in enumerate(raw))


_RULE_HINT = "for example {match: lm_head, keep: true} or {match: 're:down_proj$', format: bf16}"


def _read_rule(raw: Any, place: str) -> FormatRule:
    if isinstance(raw, str):
        return parse_rule(raw)
    rule = read_mapping(raw, ("match", "format", "keep"), place)
    keep = _read_flag(rule.get("keep", False))
    if "match" not in rule or keep == ("format" in rule):
        raise UsageError(f"{place}: a rule has `match` and either `format` or `keep: true`", hint=_RULE_HINT)
    format_name = "keep" if keep else get_format(read_text(rule["format"])).name
    return FormatRule(pattern=read_text(rule["match"]), format=format_name)


TEXT: Reading = (read_text, {"type": "string", "minLength": 1})
TEXTS: Reading = (_read_texts, {"anyOf": [TEXT[1], {"type": "array", "items": TEXT[1]}]})
COUNT: Reading = (_read_count, {"type": "integer", "minimum": 1})
COUNTS: Reading = (_read_counts, {"anyOf": [COUNT[1], {"type": "array", "items": COUNT[1]}]})
WHOLE: Reading = (_read_whole, {"type": "integer", "minimum": 0})
NUMBER: Reading = (_read_number, {"type": "number", "exclusiveMinimum": 0})
AMOUNT: Reading = (_read_amount, {"type": "number", "minimum": 0})
SCALE: Reading = (_read_scale, {"type": ["string", "number"]})
SIZE: Reading = (_read_size, {"type": ["integer", "string"], "examples": ["4GB", "512MiB", 1000000]})
FLAG: Reading = (_read_flag, {"type": "boolean"})


def one_of(what: str, names: Iterable[str]) -> Reading:
    """One of some names; an unknown one gets the nearest known as its hint."""
    known = {name: name for name in names}
    return lambda raw: find(what, read_text(raw), known), {"enum": list(known)}


def some_of(what: str, names: Iterable[str]) -> Reading:
    """One of some names, or a list of them."""
    read, schema = one_of(what, names)
    return (
        lambda raw: tuple(map(read, raw)) if isinstance(raw, list) else (read(raw),),
        {"anyOf": [schema, {"type": "array", "items": schema}]},
    )


def gates(table: GateTable[Any]) -> Reading:
    """Conditions on the figures of a table."""
    return lambda raw: tuple(table.parse(x).expression for x in _read_texts(raw)), TEXTS[1]


def rules(formats: Iterable[str]) -> Reading:
    """Formats of single tensors, by pattern."""
    rule = {
        "type": "object",
        "properties": {"match": TEXT[1], "format": {"enum": list(formats)}, "keep": {"const": True}},
        "required": ["match"],
        "oneOf": [{"required": ["format"]}, {"required": ["keep"]}],
        "additionalProperties": False,
    }
    return _read_rules, {"type": "array", "items": {"anyOf": [{"type": "string", "pattern": ".=."}, rule]}}


def field(reading: Reading, doc: str, *, nullable: bool = False, is_path: bool = False) -> Field:
    """A field that takes what `reading` reads."""
    read, schema = reading
    schema = {"anyOf": [schema, {"type": "null"}]} if nullable else schema
    return Field(read=read, schema=schema, doc=doc, nullable=nullable, is_path=is_path)
