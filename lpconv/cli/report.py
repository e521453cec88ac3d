"""`lpconv report`."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from lpconv.cli.command import Json, print_result
from lpconv.errors import InputError, UsageError

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
    from lpconv.bench.outcome import find_bench
    from lpconv.probe.record import find_probe
    from lpconv.train.folder import find_finetune

    asked = _Asked(what_if=what_if, html=html, json=json)
    for what, find, show, hint in (
        ("bench", find_bench, _show_bench, "compare two with `lpconv bench --compare OLD.json`"),
        ("probe", find_probe, _show_probe, "pass one output of `lpconv probe`, or only conversions"),
        ("fine-tuning", find_finetune, _show_finetune, "pass one output of `lpconv finetune`"),
    ):
        found = [path for run in runs if (path := find(run)) is not None]
        if found and len(runs) > 1:
            raise UsageError(f"a {what} is shown alone", hint=hint)
        if found:
            show(found[0], asked)
            return
    if what_if is not None:
        raise UsageError("--what-if asks a probe", hint="run `lpconv probe MODEL` and pass its output")
    _show_conversions(runs, asked)


@dataclass(frozen=True, kw_only=True)
class _Asked:
    """What a probe is asked, and where a result is shown beside the terminal, or instead."""

    what_if: str | None
    html: str | None
    json: bool

    def show(self, result: Any, page: Callable[[], str], render: Callable[[Any], Any]) -> None:
        """The result; `page` is made where it is asked for."""
        if self.html is not None:
            from lpconv.checkpoint.partfile import check_file, write_small  # not for `--help`

            check_file(Path(self.html))
            write_small(Path(self.html), page())
        print_result(result, render, json=self.json)


def _show_probe(path: Path, asked: _Asked) -> None:
    from lpconv.convert.tensor_records import format_ranges
    from lpconv.probe.answers import DEFAULT_FORMATS, answer
    from lpconv.probe.record import read_probe
    from lpconv.report.probe.html import html_probe
    from lpconv.report.probe.terminal import render_probe, render_what_if

    answers = answer(read_probe(path), [asked.what_if] if asked.what_if else DEFAULT_FORMATS)
    asked.show(answers, lambda: html_probe(answers, format_ranges()), render_what_if if asked.what_if else render_probe)


def _show_bench(path: Path, asked: _Asked) -> None:
    from lpconv.bench.outcome import read_bench
    from lpconv.report.bench.html import html_bench
    from lpconv.report.bench.terminal import render_bench

    result = read_bench(path)
    asked.show(result, lambda: html_bench(result), render_bench)


def _show_finetune(path: Path, asked: _Asked) -> None:
    from lpconv.checkpoint.contents import read_json
    from lpconv.report.finetune.html import html_finetune
    from lpconv.report.finetune.terminal import render_finetune
    from lpconv.results import FinetuneResult, from_json

    result = from_json(FinetuneResult, read_json(path))
    asked.show(result, lambda: html_finetune(result), render_finetune)


def _show_conversions(runs: list[str], asked: _Asked) -> None:
    from lpconv.checkpoint.contents import read_json
    from lpconv.convert.tensor_records import format_ranges
    from lpconv.report.convert.html import html_compare, html_report
    from lpconv.report.convert.terminal import render_compare, render_convert
    from lpconv.results import ConvertResult, from_json

    results = []
    for run in runs:
        path = Path(run) / "report.json" if Path(run).is_dir() else Path(run)
        if not path.exists():
            raise InputError(f"`{run}` has no report.json", hint="pass an output of `lpconv convert` or `lpconv probe`")
        results.append(from_json(ConvertResult, read_json(path)))
    if len(results) > 1:
        asked.show(results, lambda: html_compare(results, format_ranges()), render_compare)
    else:
        asked.show(results, lambda: html_report(results[0], format_ranges()), lambda one: render_convert(one[0]))
