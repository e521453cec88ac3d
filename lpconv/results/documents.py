"""Convert records to JSON and back: `to_json`, `from_json`, document text, and the schema version."""

import dataclasses
import functools
import html
import json
import math
import types
import typing
from collections.abc import Iterator
from typing import Annotated, Any, TypeVar

from lpconv.errors import InputError

SCHEMA_VERSION = 1

T = TypeVar("T")


class Shown:
    """Base of records that users see in Python: their `repr` is short, and a notebook shows a table."""

    def __init_subclass__(cls) -> None:
        cls.__repr__ = Shown.__repr__  # type: ignore[method-assign]  # `dataclass` keeps a `repr` that the class has

    def __repr__(self) -> str:
        return _short(self)

    def _repr_html_(self) -> str:
        rows = (f"<tr><th>{name}</th><td>{html.escape(text)}</td></tr>" for name, text in _texts(self))
        return f"<table>{''.join(rows)}</table>"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result(Shown):
    """Document that a command prints or writes."""

    schema_version: int = SCHEMA_VERSION
    kind: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunResult(Result):
    """Result of a run that writes a folder: `options` are the settings that determine it, `versions` the libraries'.

    `seconds` is the time of the command, without what it resumed, and `command` repeats the run.
    """

    output: str
    seconds: float
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    versions: dict[str, str] = dataclasses.field(default_factory=dict)
    command: str | None = None
    warnings: tuple[str, ...] = ()


# Strings restricted to these values; `from_json` rejects others.
RunRole = Annotated[str, ("run", "twin")]
TensorRole = Annotated[str, ("weight", "input", "output", "grad_output", "grad_input", "weight_grad")]
Purpose = Annotated[str, ("infer", "train")]


def to_json(value: Any) -> Any:
    """Convert records, tuples and dicts to JSON values. Infinities become "inf" and "-inf", and NaN becomes "nan"."""
    if value is None or isinstance(value, (str, int)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {name: to_json(getattr(value, name)) for name in type(value).__dataclass_fields__}
    if isinstance(value, dict):
        return {str(k): to_json(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_json(v) for v in value]
    return value


def _texts(record: Any) -> Iterator[tuple[str, str]]:
    """Names and short texts of the fields that have a value."""
    values = ((name, getattr(record, name)) for name in type(record).__dataclass_fields__)
    return ((name, _short(value)) for name, value in values if value not in (None, (), {}))


def _short(value: Any) -> str:
    """Text for a value: of tuples and mappings only how many entries they have."""
    if dataclasses.is_dataclass(value):
        return f"{type(value).__name__}({', '.join(f'{name}={text}' for name, text in _texts(value))})"
    if isinstance(value, (tuple, dict)):
        return f"<{len(value)} entries>"
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def json_text(record: Any) -> str:
    """Return a record as a JSON document in plain ASCII: sorted keys, two spaces of indent, one final newline.

    Equal records give equal text; option values without a JSON form become strings. Infinite and NaN numbers become the
    strings of `to_json`, because parsers reject bare tokens.
    """
    return json.dumps(to_json(record), indent=2, sort_keys=True, allow_nan=False, default=str) + "\n"


def ordered_json_text(document: Any) -> str:
    """Return JSON for people to read: indented, keys in their own order. Pass records through `to_json` first."""
    return json.dumps(document, indent=2, ensure_ascii=False) + "\n"


def json_line(record: Any) -> str:
    """Return a record as JSON on one line."""
    return json.dumps(to_json(record), allow_nan=False) + "\n"


def fields_from(base: type, record: Any) -> dict[str, Any]:
    """Return the fields that `record` shares with `base`, by name, to build another record that extends `base`."""
    return {f.name: getattr(record, f.name) for f in dataclasses.fields(base) if hasattr(record, f.name)}


def from_json(cls: type[T], data: Any) -> T:
    """Create a record of type `cls` from a JSON document.

    Unknown keys are ignored, so that older readers open newer files.

    Raises InputError for a missing key or another `schema_version`.
    """
    try:
        return typing.cast(T, _decode(cls, data))
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as e:
        raise InputError(
            f"this is not a {cls.__name__} document: {e}", hint="it may have been written by another version of lpconv"
        ) from e


def _decode(kind: Any, data: Any) -> Any:
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        if data is None:
            return None
        return _decode(next(a for a in args if a is not type(None)), data)
    if origin is Annotated:
        choices = kind.__metadata__[0]
        if isinstance(choices, tuple) and data not in choices:  # other metadata is an `Option`, checked elsewhere
            raise ValueError(f"{data!r:.80} is not one of {', '.join(choices)}")
        return _decode(args[0], data)
    if origin is tuple:
        return tuple(_decode(args[0], v) for v in _check_type(list, data))
    if dataclasses.is_dataclass(kind):
        return _decode_record(typing.cast(type, kind), data)
    if kind is float:
        return float(data)
    if origin is dict:
        return {name: _decode(args[1], value) for name, value in _check_type(dict, data).items()}
    return _check_type(kind, data)


def _check_type(kind: Any, data: Any) -> Any:
    if kind is not Any and type(data) is not kind:  # not isinstance, because True is not a number here
        raise TypeError(f"{data!r:.80} is not a {kind.__name__}")
    if type(data) is int and abs(data) >= 2**63:
        raise ValueError(f"{data:.3g} is not a 64-bit number")
    return data


def _decode_record(cls: type, data: dict[str, Any]) -> Any:
    version = _check_type(dict, data).get("schema_version", SCHEMA_VERSION)
    if version != SCHEMA_VERSION:
        raise ValueError(f"it has schema_version {version}, but this lpconv reads {SCHEMA_VERSION}")
    return cls(**{n: _decode(kind, data[n]) for n, kind in _kinds(cls) if n in data})


@functools.cache
def _kinds(cls: type) -> tuple[tuple[str, Any], ...]:
    """(name, type) of each field of a record; cached, since type hints are slow to resolve."""
    hints = typing.get_type_hints(cls, include_extras=True)
    return tuple((f.name, hints[f.name]) for f in dataclasses.fields(cls))
