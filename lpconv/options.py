"""Options, each declared once. The command line, manifests, their JSON Schema and the docs derive from these records.

A record of options is a frozen dataclass with fields ``name: T = option(default, help, Ge(1), ...)``. The same can be
written as ``Annotated[T, Ge(1), Option(help, ...)]``, as parameters of commands and types of shared fields are. T is
bool, int, float, str, the return type of `Option.parse`, one of these or None, or a tuple of these. Bounds (`Ge`, `Gt`
and `Lt` of `annotated_types`) apply to each value. Users cannot set other fields.
"""

import dataclasses
import functools
import inspect
import math
import re
import types
import typing
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Annotated, Any, TypeVar

from annotated_types import Ge, Gt, Lt

from lpconv.errors import UsageError
from lpconv.lookup import find, known_name

T = TypeVar("T")
Bound = Ge | Gt | Lt


@dataclass(frozen=True, eq=False)
class Option:
    """How users set a field of options, next to its type and default.

    `help` is a phrase without a full stop: a noun for a value, an imperative for a flag. `default` describes the effect
    of None or of an empty tuple. `panel` is the section of ``--help``. `name` is the key in a manifest (default: the
    field's name); `flag` is the spelling on the command line, with dashes (default: `name`); `short` are other
    spellings. `choices` are the allowed names, in any case; `spellings` are other names for them, in lower case; and
    `what` is the word for one in errors. `parse` converts text to a
    value; a manifest may also hold values of type `given`. `expects` describes valid values, and `example` is one. If
    an option takes several values, the command line takes them as one text with commas if `comma`, else by repeating
    the option. `is_path`: in a manifest the value is relative to the manifest's folder. `only` is "command" or
    "manifest" for an option that exists only there, "caller" for one that exists in neither.

    What an option affects is declared here only. `shapes_output`: the bytes that a conversion writes; these options are
    recorded with the output, and a resumed run must have the same. `of_run`: how the run proceeds but not its result;
    these are left out of records, locks and the command that repeats a run. `judges`: what a result must meet.
    """

    help: str
    _: KW_ONLY
    default: str | None = None
    panel: str | None = None
    name: str | None = None
    flag: str | None = None
    short: tuple[str, ...] = ()
    metavar: str | None = None
    what: str | None = None
    choices: Collection[str] | None = None
    spellings: Mapping[str, str] | None = None
    parse: Callable[[str], Any] | None = None
    given: Any = str
    expects: str | None = None
    example: str | None = None
    comma: bool = False
    is_path: bool = False
    only: str | None = None
    shapes_output: bool = False
    of_run: bool = False
    judges: bool = False

    def __repr__(self) -> str:
        return f"Option({self.help!r})"


@dataclass(frozen=True)
class Group:
    """A field whose value has options of its own: `make` turns an instance of `record` into the field's value."""

    record: type[Any]
    make: Callable[[Any], Any] = lambda asked: asked


def option(value: Any, how: str | Option | Group, /, *bounds: Bound, **facts: Any) -> Any:
    """A field of a record of options, with the default `value`.

    `how` users set it is the help text, with `facts` as the other fields of `Option`; an `Option`; or, for a field that
    stands for all options of another record, a `Group`.
    """
    note = Option(how, **facts) if isinstance(how, str) else how
    return dataclasses.field(default=value, metadata={"notes": (*bounds, note)})


@dataclass(frozen=True, kw_only=True, eq=False)
class Declared:
    """An option of a record, resolved.

    `type` and `bounds` are for a single value, without None; `is_many` marks a tuple.
    """

    field: str
    option: Option
    type: Any
    nullable: bool
    is_many: bool
    bounds: tuple[Bound, ...]
    default: Any

    @property
    def name(self) -> str:
        """The key in manifests."""
        return self.option.name or self.field

    @property
    def annotation(self) -> Any:
        """The type of the field."""
        one: Any = types.GenericAlias(tuple, (self.type, ...)) if self.is_many else self.type
        return one | None if self.nullable else one

    @property
    def flag(self) -> str:
        """The long spelling on the command line."""
        return "--" + (self.option.flag or self.name).replace("_", "-")

    @property
    def help(self) -> str:
        """The help text: the phrase with the default and the choices."""
        o = self.option
        default = f" (default: {o.default})" if o.default else ""
        choices = f" {'Any' if self.is_many else 'One'} of {', '.join(o.choices)}." if o.choices else ""
        return f"{o.help}{default}.{choices}"

    @property
    def expected(self) -> str:
        """Description of the values that the option accepts."""
        o = self.option
        if o.expects:
            return o.expects
        words = " and".join(f" {_bound_words(bound)}" for bound in self.bounds)
        return {bool: "true or false", int: "a whole number", float: "a number"}.get(self.type, "text") + words

    def known(self, value: Any) -> Any:
        """The choice that a value stands for, or the value itself; for many values, a tuple."""
        if self.option.choices is None or value is None:
            return value
        if isinstance(value, tuple):
            return tuple(map(self.known, value))
        return known_name(str(value).removeprefix("torch."), self.option.choices, self.option.spellings) or value

    def read(self, text: str) -> Any:
        """Parse one value from text. Raises UsageError for text that is not valid."""
        try:
            return (self.option.parse or self.type)(text)
        except ValueError as e:
            raise UsageError(f"{self.flag} {text}: expected {self.expected}", hint=self.hint) from e

    @property
    def hint(self) -> str:
        """Hint for an invalid value."""
        if self.type is bool:
            return "write true or false"
        example = self.option.example or {int: "2", float: "0.1"}.get(self.type)
        return f"for example {example}" if example else "put the text in quotes"


def _bound_words(bound: Bound) -> str:
    if isinstance(bound, Ge):
        return f"of at least {_number_text(bound.ge)}"
    return f"above {_number_text(bound.gt)}" if isinstance(bound, Gt) else f"below {_number_text(bound.lt)}"


def _number_text(number: Any) -> str:
    return f"{number:g}" if number else "zero"


def options_of(record: type[Any]) -> dict[str, Declared]:
    """The options of a record and of its groups, by name, in order of declaration."""
    return {d.name: d for d in _declared_options(record)}


def _declared_options(record: type[Any]) -> Iterator[Declared]:
    for _, one in _fields(record):
        yield from _declared_options(one.record) if isinstance(one, Group) else (one,)


def _fields(record: type[Any]) -> Iterator[tuple[str, Declared | Group]]:
    """The fields of a record that users set, each with its option, or with the group of options behind it."""
    for field in dataclasses.fields(record):
        one = declared_by(field.name, field.type, field.default, field.metadata.get("notes", ()))
        if one is not None:
            yield field.name, one


def declared_by(name: str, annotation: Any, default: Any, notes: Iterable[Any] = ()) -> Declared | Group | None:
    """The option that a field or parameter declares by `notes` or its annotation, or the group; None without either."""
    is_annotated = typing.get_origin(annotation) is Annotated
    kind, *notes = (*typing.get_args(annotation), *notes) if is_annotated else (annotation, *notes)
    note = next((note for note in notes if isinstance(note, (Group, Option))), None)
    if not isinstance(note, Option):
        return note
    parts = typing.get_args(kind) if isinstance(kind, types.UnionType) else (kind,)
    one = next(p for p in parts if p is not types.NoneType)
    many = typing.get_origin(one) is tuple
    return Declared(
        field=name,
        option=note,
        type=typing.get_args(one)[0] if many else one,
        nullable=len(parts) > 1,
        is_many=many,
        bounds=tuple(n for n in notes if isinstance(n, Bound)),
        default=default,
    )


def fields_of_run(record: type[Any]) -> frozenset[str]:
    """The fields that affect how a run proceeds but not its result."""
    return frozenset(d.field for d in _declared_options(record) if d.option.of_run)


def fields_that_may_change(record: type[Any]) -> frozenset[str]:
    """The fields that may differ when a run is resumed: those of the run itself, and gates."""
    return fields_of_run(record) | {d.field for d in _declared_options(record) if d.option.judges}


def command_words(record: type[Any], values: Mapping[str, Any]) -> Iterator[str]:
    """Command-line arguments for `values`, which maps option names to values; None leaves an option out."""
    for name, declared in options_of(record).items():
        value = values.get(name)
        if declared.type is bool:
            if value not in (None, declared.default):
                yield declared.flag if value else f"--no-{declared.flag[2:]}"
        elif declared.option.comma:
            yield from (declared.flag, ",".join(map(str, value))) if value else ()
        else:
            for one in value or () if declared.is_many else (value,):
                yield from (declared.flag, str(one)) if one is not None else ()


def make(record: type[T], values: Mapping[str, Any]) -> T:
    """Make a record from `values` by option name; all other fields keep their defaults."""
    fields: dict[str, Any] = {}
    for name, one in _fields(record):
        if isinstance(one, Group):
            fields[name] = one.make(make(one.record, values))
        elif one.name in values:
            fields[name] = one.known(values[one.name])
    return record(**fields)


def with_keywords(record: type[Any]) -> Callable[[Callable[..., T]], Callable[..., T]]:
    """Decorator for a function of `options`: it also takes the options of `record` as keywords, and its signature lists
    them."""

    def decorate(call: Callable[..., T]) -> Callable[..., T]:
        own, declared = inspect.signature(call), options_of(record)
        noted = {name for name, _ in _fields(record)}
        plain = {f.name: f for f in dataclasses.fields(record) if f.name not in noted | own.parameters.keys()}

        @functools.wraps(call)
        def function(*args: Any, **keywords: Any) -> T:
            for name in keywords:
                find(f"option of {call.__name__}", name, {**own.parameters, **declared, **plain})
            chosen = {n: _given(declared[n], keywords.pop(n)) for n in declared if n in keywords}
            fields = {n: keywords.pop(n) for n in plain if n in keywords}
            bound = own.bind_partial(*args, **keywords)
            if bound.arguments.get("options") is None:
                bound.arguments["options"] = dataclasses.replace(make(record, chosen), **fields)
            elif chosen or fields:
                raise UsageError(
                    f"{call.__name__}: {next(iter(chosen | fields))} and `options` cannot be combined",
                    hint=f"set it in {record.__name__}, or pass keywords only",
                )
            for name, p in own.parameters.items():
                if p.default is p.empty and bound.arguments.get(name) is None:
                    raise UsageError(f"{call.__name__} needs `{name}`", hint=f"see help(lpconv.{call.__name__})")
            return call(*bound.args, **bound.kwargs)

        words = (f"    {n}: {d.help}" for n, d in declared.items() if n not in own.parameters)
        function.__doc__ = "\n".join((inspect.getdoc(call) or "", "", "Options, as keywords:", "", *words))
        wide = record | types.NoneType
        ours = [p.replace(default=None, annotation=wide) if p.name == "options" else p for p in own.parameters.values()]
        listed = {n: (d.default, d.annotation) for n, d in declared.items()}
        listed |= {n: (f.default, f.type) for n, f in plain.items()}
        ours += [
            inspect.Parameter(n, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind)
            for n, (default, kind) in listed.items()
        ]
        function.__signature__ = own.replace(parameters=ours)  # type: ignore[attr-defined]  # `inspect` reads it
        return function

    return decorate


def _given(declared: Declared, value: Any) -> Any:
    """The value of an option given in Python: text is parsed, and one value stands for a tuple of it."""
    if declared.is_many:
        values = (value,) if isinstance(value, str) else tuple(value)
        return tuple(_given(dataclasses.replace(declared, is_many=False), x) for x in values)
    return declared.read(value) if declared.option.parse and isinstance(value, str) else value


def check(options: Any) -> None:
    """Validate a record of options, however it was made.

    Raises UsageError for an unknown choice, a number out of bounds, or options that exclude each other.
    """
    if getattr(options, "resume", False) and getattr(options, "force", False):
        raise UsageError(
            "--resume and --force cannot be combined", hint="--resume continues a run, --force starts over"
        )
    for name, one in _fields(type(options)):
        value = getattr(options, name)
        if isinstance(one, Declared) and value is not None:
            for single in value if one.is_many else (value,):
                check_value(one, single)
        elif isinstance(one, Group) and isinstance(value, one.record):
            check(value)


def check_value(declared: Declared, value: Any) -> Any:
    """Validate one value of an option and return it, with its usual spelling; raises as `check` does."""
    o, value = declared.option, declared.known(value)
    if o.choices is not None:
        find(o.what or declared.name.replace("_", " "), value, dict.fromkeys(o.choices))
    if not all(_is_within(bound, value) for bound in declared.bounds):
        raise UsageError(f"{declared.flag} {value} is out of range: {declared.expected}", hint=declared.hint)
    return value


def _is_within(bound: Bound, value: Any) -> bool:
    # Comparisons with NaN are False, so NaN is never within bounds.
    if isinstance(bound, Ge):
        return bool(value >= bound.ge)
    return bool(bound.gt < value < math.inf if isinstance(bound, Gt) else value < bound.lt)


_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}


_LEAST_BYTES = 1000  # smaller numbers without a unit are not meant as bytes


def parse_size(text: str) -> int:
    """Parse ``4GB``, ``512MiB`` or plain bytes into a number of bytes."""
    match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*([KMGT]?I?)B?\s*", text.upper())
    if not match or match[2] not in _UNITS:
        raise UsageError(f"size `{text}` is not a number of bytes", hint="for example 4GB, 512MiB or 1000000")
    if text.strip().isdigit() and int(text) < _LEAST_BYTES:
        raise UsageError(
            f"size `{text}` has no unit", hint=f"for example {text.strip()}GB, or {text.strip()}B for bytes"
        )
    size = float(match[1]) * _UNITS[match[2]]
    if not 1 <= size < math.inf:
        raise UsageError(f"size `{text}` is not a positive number of bytes", hint="for example 4GB")
    return int(size)


# An option for a number of bytes, with or without a unit.
size_option = functools.partial(
    Option, metavar="SIZE", parse=parse_size, given=int | str, expects="a size", example="4GB, 512MiB or 1000000"
)


def gate_option(help: str, *, kind: str, panel: str | None = None) -> Option:
    """Option for conditions on the result of a conversion, fine-tuning or bench: `kind` is a key of `gates.GATES`."""

    def parse(text: str) -> str:
        from lpconv.gates import GATES  # with the records of all results, which `--help` does without

        return GATES[kind].parse(text).expression

    return Option(help, flag="gate", metavar="CONDITION", parse=parse, judges=True, panel=panel)


# How several processes train one model: each has a full copy (DistributedDataParallel) or a part (fully_shard).
PARALLEL = ("ddp", "fsdp2")

_ADVANCED = "Advanced"  # the panel for options that few people need

# Options shared by several commands.
Revision = Annotated[str | None, Option("Branch, tag or commit of a hub model", panel=_ADVANCED)]
Force = Annotated[bool, Option("Replace an existing output of lpconv", of_run=True)]
Resume = Annotated[bool, Option("Resume an interrupted run of the same command", only="command", of_run=True)]
ResumedByBatch = Annotated[bool, Option("Continue what an interrupted batch left", only="caller", of_run=True)]
AllowMissing = Annotated[
    bool, Option("Accept a checkpoint that lacks weights of the model in config.json", panel=_ADVANCED)
]
TrustRemoteCode = Annotated[bool, Option("Run the checkpoint's own Python code during verification", panel=_ADVANCED)]
