"""`lpconv report`."""

from pathlib import Path
from typing import Annotated

import typer

from lpconv.cli.options import Json
from lpconv.errors import InputError, OutputExistsError

__all__ = ["report"]


def report(
    runs: Annotated[
        list[str], typer.Argument(help="Outputs of `lpconv convert`, or their report.json.", metavar="RUN…")
    ],
    html: Annotated[
        str | None, typer.Option("--html", help="Also write one HTML page with plots.", metavar="FILE")
    ] = None,
    json: Json = False,
) -> None:
    """Show one run again, or compare several.

    [bold]Examples[/bold]

      lpconv report ./bert-large-unit-fp16

      lpconv report ./bert-large-unit-fp16 ./bert-large-unit-e4m3fn --html compare.html
    """
    from lpconv.checkpoint.contents import read_json
    from lpconv.convert.ranges import format_ranges
    from lpconv.report.document import json_text
    from lpconv.report.html import html_compare, html_report
    from lpconv.report.terminal import render_compare, render_convert, show
    from lpconv.results import ConvertResult, from_json

    results = []
    for run in runs:
        path = Path(run) / "report.json" if Path(run).is_dir() else Path(run)
        if not path.exists():
            raise InputError(f"`{run}` has no report.json", hint="pass an output of `lpconv convert`")
        results.append(from_json(ConvertResult, read_json(path)))
    if html is not None:
        ranges = format_ranges()
        text = html_report(results[0], ranges) if len(results) == 1 else html_compare(results, ranges)
        if Path(html).is_dir():
            raise OutputExistsError(f"`{html}` is a directory", hint="name a file, such as report.html")
        Path(html).write_text(text, encoding="utf-8")
    if json:
        print(json_text(results), end="")
        return
    show(render_convert(results[0]) if len(results) == 1 else render_compare(results))
