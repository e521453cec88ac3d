"""Shared parts of all commands: parameters from a record of options, common parameters, printing results."""

import functools
import inspect
import shlex
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from lpconv.cli.progress import QUIET
from lpconv.errors import UsageError
from lpconv.options import Declared, declared_by, make, options_of


def with_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give typer the command's options: those declared by its parameters, and all of the record `options`.

    The record is made, and texts are parsed, when the command is called. Raises UsageError for text that does not
    parse.
    """
    signature = inspect.signature(command)
    declared = {name: _declared_options(p) for name, p in signature.parameters.items()}

    @functools.wraps(command)
    def spread(**given: Any) -> None:
        for parameter, options in declared.items():
            texts = {name: given.pop(name) for name in options}
            values = {name: _parse_value(options[name], value) for name, value in texts.items() if value is not None}
            if parameter == "options":
                given[parameter] = make(signature.parameters[parameter].annotation, values)
            elif options:
                given[parameter] = values.get(parameter)
        command(**given)

    parameters: list[inspect.Parameter] = []
    for name, p in signature.parameters.items():
        parameters += map(_parameter, declared[name].values()) if declared[name] else [p.replace(kind=p.KEYWORD_ONLY)]
    spread.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]  # `inspect` reads it
    spread.__annotations__ = {p.name: p.annotation for p in parameters}
    return spread


def _declared_options(parameter: inspect.Parameter) -> dict[str, Declared]:
    """The options that a parameter of a command stands for, by name; none if it is an argument, or typer's option."""
    if parameter.name == "options":
        options = options_of(parameter.annotation)
        return {name: d for name, d in options.items() if d.option.only in (None, "command")}
    one = declared_by(parameter.name, parameter.annotation, parameter.default)
    return {one.name: one} if isinstance(one, Declared) else {}


def _parameter(declared: Declared) -> inspect.Parameter:
    o = declared.option
    flags = [declared.flag, *o.short]
    if declared.default is True:
        flags = [f"{declared.flag}/--no-{declared.flag[2:]}"]
    info = typer.Option(
        *flags,
        help=declared.help + (" Repeatable." if declared.is_many and not o.comma else ""),
        rich_help_panel=o.panel,
        metavar=o.metavar or ("A,B,…" if o.comma else None),
        callback=reject_flag if o.metavar == "FILE" and not declared.is_many else None,
        autocompletion=(lambda: list(o.choices or ())) if o.choices else None,
    )
    typed, default = _typer_type(declared)
    return inspect.Parameter(
        declared.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[typed, info]
    )


def _typer_type(declared: Declared) -> tuple[Any, Any]:
    """Type and default of an option's parameter for typer."""
    if declared.is_many and declared.option.comma:
        return (str, ",".join(map(str, declared.default))) if declared.default else (str | None, None)
    if declared.is_many:
        return list[str] | None, None
    if declared.option.parse is not None:
        return str | None, None
    return (declared.type | None if declared.nullable else declared.type), declared.default


def _parse_value(declared: Declared, given: Any) -> Any:
    """Convert typer's value to the type of the option's field."""
    if declared.is_many:
        texts = given.split(",") if declared.option.comma else given
        return tuple(map(declared.read, without_blanks(declared.flag, texts)))
    return declared.read(given) if isinstance(given, str) else given


def without_blanks(flag: str, texts: Sequence[str]) -> list[str]:
    """Strip the values of an option. Raises UsageError for an empty value, which would turn a check off."""
    stripped = [text.strip() for text in texts]
    if not all(stripped):
        raise UsageError(
            f"{flag} has an empty value",
            hint="leave the option out, or set the shell variable that its value comes from",
        )
    return stripped


def output_of(output: str | None, model: str, *words: str) -> Path:
    """The output directory: `output`, or in the current directory the model's name and `words` joined by dashes."""
    name = Path(model).name if model not in (".", "..") else Path(model).resolve().name
    return Path(output or "-".join((name, *(word.replace(" ", "-") for word in words))))


def typed_command() -> str:
    """The command as the user typed it."""
    return shlex.join(["lpconv", *sys.argv[1:]])


def print_result(result: Any, render: Callable[[Any], Any], *, json: bool) -> None:
    """Print the result: as a JSON object with a schema version, or as rendered by `render` for a terminal.

    In JSON, several results are listed under `runs`.
    """
    if json:
        from lpconv.results import SCHEMA_VERSION, json_text, to_json

        document = {"runs": to_json(result)} if isinstance(result, (list, tuple)) else to_json(result)
        print(json_text({"schema_version": SCHEMA_VERSION, **document}), end="")
    else:
        from lpconv.report.terminal import show  # imports rich, which takes a moment

        show(render(result), brief=QUIET.get())


def write_page(file: str, document: Any) -> None:
    """Write the page of a document. Raises OutputExistsError for a directory, ResourceError if it cannot write."""
    from lpconv.report.html import html
    from lpconv.storage.partfile import check_file, write_small

    check_file(Path(file))
    write_small(Path(file), html(document))


def print_next(text: str) -> None:
    """Print where a result is, or what to do with it, unless the command is quiet."""
    if not QUIET.get():
        print(text)


def listing(flag: str, help: str, columns: tuple[str, ...], rows: Callable[[], Iterable[tuple[str, ...]]]) -> Any:
    """Annotation of a flag that prints a table, or its rows as JSON, and exits."""

    def show(context: typer.Context, wanted: bool) -> None:
        if not wanted:
            return
        from lpconv.report.document import Table

        table = Table(columns=columns, rows=tuple(rows()))
        names = [c.removeprefix("<").lower().replace(" ", "_") for c in columns]
        document = {"rows": [dict(zip(names, row, strict=True)) for row in table.rows]}
        print_result(document, lambda _: table, json=bool(context.params.get("json")))
        raise typer.Exit

    return Annotated[bool, typer.Option(flag, callback=show, help=help)]


Model = Annotated[
    str,
    typer.Argument(
        help="A checkpoint directory, a .gguf file, a URL (s3, gs, az, hf, https), a hub id, an alias such as "
        "bert-large, or demo.",
        metavar="MODEL",
    ),
]
# Eager, so that options that list something know it wherever they stand.
_PRINTING: dict[str, Any] = {"rich_help_panel": "Printing"}
Json = Annotated[
    bool, typer.Option("--json", is_eager=True, help="Print the result as JSON instead of a table.", **_PRINTING)
]
Quiet = Annotated[
    bool, typer.Option("--quiet", "-q", help="Print only the headline of the result, and errors.", **_PRINTING)
]
Verbose = Annotated[
    bool,
    typer.Option("--verbose", "-v", help="Log each phase on stderr, and show tracebacks of errors.", **_PRINTING),
]


def reject_flag(value: str | None) -> str | None:
    """The file or directory to write. Raises an error for an empty name, and for the next option in its place."""
    if value is not None and not value.strip():
        raise typer.BadParameter("the value is empty; leave the option out for the usual name")
    if value is not None and value.startswith("--"):
        raise typer.BadParameter(f"{value} looks like an option; for a file of that name write ./{value}")
    return value


_OUTPUT: Any = typer.Option("--output", "-o", help="Output directory.", metavar="DIR", callback=reject_flag)
Output = Annotated[str | None, _OUTPUT]  # default: derived from the model's name
Target = Annotated[str, _OUTPUT]
