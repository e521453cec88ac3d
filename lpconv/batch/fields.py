"""The fields of a job that are settings of its conversion: how each is read from a manifest, and its JSON schema.

A reader turns a scalar or list of the document into the value of the `ConvertOptions` field of the same name, or
raises UsageError. Text stands for numbers and booleans too, because YAML arrives as text (see `document`).
"""

import math
import reprlib
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from lpconv.convert.gates import parse_gate
from lpconv.convert.options import LAYOUTS, VERIFY_LEVELS, FormatRule, parse_rule, parse_size
from lpconv.errors import UsageError
from lpconv.formats.spec import get_format
from lpconv.lookup import find, nearest
from lpconv.methods import METHODS

__all__ = ["FIELDS", "Field", "read_mapping", "read_text"]

Reader = Callable[[Any], Any]

_TRUE = frozenset({"true", "yes", "on"})
_FALSE = frozenset({"false", "no", "off"})
_NULL = (None, "", "null", "~")


@dataclass(frozen=True, kw_only=True)
class Field:
    """One setting: how to read it, what JSON Schema says of it, and its meaning. `nullable` ones may be null."""

    read: Reader
    schema: dict[str, Any]
    doc: str
    nullable: bool = False

    def value(self, raw: Any) -> Any:
        """The setting's value in a document, as `ConvertOptions` has it. UsageError where it does not fit."""
        return None if self.nullable and raw in _NULL else self.read(raw)


def read_mapping(raw: Any, known: Collection[str], place: str) -> dict[str, Any]:
    """A mapping with its keys in underscored spelling. UsageError, with `place`, for a key not in `known`."""
    if not isinstance(raw, Mapping):
        raise UsageError(f"{place or 'manifest'}: expected a mapping, not {_show(raw)}", hint=_keys_hint(known))
    fields: dict[str, Any] = {}
    for key, value in raw.items():
        name = str(key).replace("-", "_")
        where = f"{place}.{key}".lstrip(".")
        if name not in known:
            near = nearest(name, known)
            hint = f"did you mean `{near}`?" if near else _keys_hint(known)
            raise UsageError(f"{where}: unknown key", hint=_NOT_A_KEY.get(name, hint))
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


def _read_count(raw: Any) -> int:
    text = str(raw).strip()
    if isinstance(raw, bool) or not (text.isascii() and text.isdigit()) or int(text) < 1:
        raise UsageError(f"expected a whole number from 1 on, not {_show(raw)}", hint="for example 2")
    return int(text)


def _read_number(raw: Any) -> float:
    try:
        number = math.nan if isinstance(raw, bool) else float(raw)
    except (TypeError, ValueError):
        number = math.nan
    if not 0 < number < math.inf:
        raise UsageError(f"expected a number above zero, not {_show(raw)}", hint="for example 4.5")
    return number


def _read_size(raw: Any) -> int:
    if isinstance(raw, bool) or not isinstance(raw, (int, str)):
        raise UsageError(f"expected a size, not {_show(raw)}", hint="for example 4GB, 512MiB or 1000000")
    return parse_size(str(raw))


def _read_texts(raw: Any) -> tuple[str, ...]:
    if not isinstance(raw, list):
        return (read_text(raw),)
    return tuple(read_text(item) for item in raw)


def _read_gates(raw: Any) -> tuple[str, ...]:
    return tuple(parse_gate(text).expression for text in _read_texts(raw))


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


def _one_of(what: str, names: Iterable[str]) -> tuple[Reader, dict[str, Any]]:
    known = {name: name for name in names}
    return lambda raw: find(what, read_text(raw), known), {"enum": list(known)}


_FORMATS = dict.fromkeys(f for m in METHODS.values() for f in m.formats)
_RESIDUALS = dict.fromkeys(r for m in METHODS.values() for r in (*m.residuals, *(["fp16"] if m.residuals else [])))
_TEXT: dict[str, Any] = {"type": "string", "minLength": 1}
_TEXTS: dict[str, Any] = {"anyOf": [_TEXT, {"type": "array", "items": _TEXT}]}
_COUNT: dict[str, Any] = {"type": "integer", "minimum": 1}
_NUMBER: dict[str, Any] = {"type": "number", "exclusiveMinimum": 0}
_SIZE: dict[str, Any] = {"type": ["integer", "string"], "examples": ["4GB", "512MiB", 1000000]}
_FLAG: dict[str, Any] = {"type": "boolean"}
_RULES: dict[str, Any] = {
    "type": "array",
    "items": {
        "anyOf": [
            {"type": "string", "pattern": ".=."},
            {
                "type": "object",
                "properties": {"match": _TEXT, "format": {"enum": list(_FORMATS)}, "keep": {"const": True}},
                "required": ["match"],
                "oneOf": [{"required": ["format"]}, {"required": ["keep"]}],
                "additionalProperties": False,
            },
        ]
    },
}


def _field(reading: tuple[Reader, dict[str, Any]], doc: str, *, nullable: bool = False) -> Field:
    read, schema = reading
    return Field(read=read, schema={"anyOf": [schema, {"type": "null"}]} if nullable else schema, doc=doc,
                 nullable=nullable)  # fmt: skip


FIELDS: dict[str, Field] = {
    "method": _field(_one_of("method", METHODS), "how the weights are rewritten"),
    "format": _field(_one_of("format", _FORMATS), "the number format on disk; null is the method's own", nullable=True),
    "residual": _field(_one_of("residual", _RESIDUALS), "collage: the form of the residual", nullable=True),
    "layout": _field(_one_of("layout", LAYOUTS), "lpconv's own, or one that another package opens"),
    "scale": _field(_one_of("scale", ("pow2", "exact")), "scales as powers of two, or as they come"),
    "budget_bits": _field((_read_number, _NUMBER), "multipoint: stored bits per element", nullable=True),
    "points_max": _field((_read_count, _COUNT), "multipoint: most points of a row", nullable=True),
    "include": _field((_read_texts, _TEXTS), "only tensors whose name matches one of these patterns are converted"),
    "exclude": _field((_read_texts, _TEXTS), "tensors whose name matches one of these patterns are kept"),
    "rules": _field((_read_rules, _RULES), "formats of single tensors, by pattern"),
    "revision": _field((read_text, _TEXT), "branch, tag or commit hash of a hub model", nullable=True),
    "max_memory": _field((_read_size, _SIZE), "bound of the buffers", nullable=True),
    "workers": _field((_read_count, _COUNT), "threads", nullable=True),
    "max_shard_size": _field((_read_size, _SIZE), "largest output file; null is as the source's", nullable=True),
    "verify": _field(_one_of("verification level", VERIFY_LEVELS), "how deep the output is verified"),
    "gates": _field((_read_gates, _TEXTS), "conditions on the verification that must hold, such as sqnr>=25"),
    "force": _field((_read_flag, _FLAG), "replace an output that is there"),
    "trust_remote_code": _field((_read_flag, _FLAG), "let the checkpoint's own code run when it is verified"),
}
