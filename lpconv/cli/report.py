"""`lpconv report`."""

from pathlib import Path
from typing import Annotated

import typer

from lpconv.cli.options import Json
from lpconv.errors import InputError, OutputExistsError, UsageError

__all__ = ["report"]


def report(
    runs: Annotated[
        list[str],
        typer.Argument(
            help="Outputs of `lpconv convert` (or report.json), or one of `lpconv probe`, `finetune` or `bench`.",
            metavar="RUN…",
        ),
    ],
    what_if: Annotated[
        str | None,
        typer.Option("--what-if", help="Of a probe: what this format would do to every tensor.", metavar="FORMAT"),
    ] = None,
    html: Annotated[
        str | None, typer.Option("--html", help="Also write one HTML page with plots.", metavar="FILE")
    ] = None,
    json: Json = False,
) -> None:
    """Show one run again, or compare several; ask a probe about another format; show a saved bench.

    [bold]Examples[/bold]

      lpconv report ./bert-large-unit-fp16

      lpconv report ./bert-large-unit-fp16 ./bert-large-unit-e4m3fn --html compare.html

      lpconv report ./bert-large-probe --what-if e5m2
    """
    from lpconv.bench.outcome import is_bench
    from lpconv.probe.output import find_probe
    from lpconv.train.folder import find_finetune

    benches = [Path(run) for run in runs if is_bench(Path(run))]
    if benches:
        if len(runs) > 1:
            raise UsageError("a bench is shown alone", hint="compare two with `lpconv bench --compare OLD.json`")
        _report_bench(benches[0], html, json=json)
        return
    probes = [path for run in runs if (path := find_probe(run)) is not None]
    if probes:
        if len(runs) > 1:
            raise UsageError("a probe is shown alone", hint="pass one output of `lpconv probe`, or only conversions")
        _report_probe(probes[0], what_if, html, json=json)
        return
    trained = [path for run in runs if (path := find_finetune(run)) is not None]
    if trained:
        if len(runs) > 1:
            raise UsageError("a fine-tuning is shown alone", hint="pass one output of `lpconv finetune`")
        _report_finetune(trained[0], html, json=json)
        return
    if what_if is not None:
        raise UsageError("--what-if asks a probe", hint="run `lpconv probe MODEL` and pass its output")
    _report_conversions(runs, html, json=json)


def _report_probe(path: Path, what_if: str | None, html: str | None, *, json: bool) -> None:
    from lpconv.convert.tensor_records import format_ranges
    from lpconv.probe.answers import DEFAULT_FORMATS, answer
    from lpconv.probe.output import read_probe
    from lpconv.report.probe.html import html_probe
    from lpconv.report.probe.terminal import render_probe, render_what_if
    from lpconv.report.terminal import show
    from lpconv.results import json_text

    answers = answer(read_probe(path), [what_if] if what_if else DEFAULT_FORMATS)
    if html is not None:
        _write_page(html, html_probe(answers, format_ranges()))
    if json:
        print(json_text(answers), end="")
        return
    show(render_what_if(answers) if what_if else render_probe(answers))


def _report_bench(path: Path, html: str | None, *, json: bool) -> None:
    from lpconv.bench.outcome import read_bench
    from lpconv.report.bench.html import html_bench
    from lpconv.report.bench.terminal import render_bench
    from lpconv.report.terminal import show
    from lpconv.results import json_text

    result = read_bench(path)
    if html is not None:
        _write_page(html, html_bench(result))
    if json:
        print(json_text(result), end="")
        return
    show(render_bench(result))


def _report_finetune(path: Path, html: str | None, *, json: bool) -> None:
    from lpconv.checkpoint.contents import read_json
    from lpconv.report.finetune.html import html_finetune
    from lpconv.report.finetune.terminal import render_finetune
    from lpconv.report.terminal import show
    from lpconv.results import FinetuneResult, from_json, json_text

    result = from_json(FinetuneResult, read_json(path))
    if html is not None:
        _write_page(html, html_finetune(result))
    print(json_text(result), end="") if json else show(render_finetune(result))


def _report_conversions(runs: list[str], html: str | None, *, json: bool) -> None:
    from lpconv.checkpoint.contents import read_json
    from lpconv.convert.tensor_records import format_ranges
    from lpconv.report.convert.html import html_compare, html_report
    from lpconv.report.convert.terminal import render_compare, render_convert
    from lpconv.report.terminal import show
    from lpconv.results import ConvertResult, from_json, json_text

    results = []
    for run in runs:
        path = Path(run) / "report.json" if Path(run).is_dir() else Path(run)
        if not path.exists():
            raise InputError(f"`{run}` has no report.json", hint="pass an output of `lpconv convert` or `lpconv probe`")
        results.append(from_json(ConvertResult, read_json(path)))
    if html is not None:
        ranges = format_ranges()
        text = html_report(results[0], ranges) if len(results) == 1 else html_compare(results, ranges)
        _write_page(html, text)
    if json:
        print(json_text(results), end="")
        return
    show(render_convert(results[0]) if len(results) == 1 else render_compare(results))


def _write_page(html: str, text: str) -> None:
    if Path(html).is_dir():
        raise OutputExistsError(f"`{html}` is a directory", hint="name a file, such as report.html")
    Path(html).write_text(text, encoding="utf-8")
