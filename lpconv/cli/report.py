"""`lpconv report`."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from lpconv.cli.command import Json, print_result, write_page
from lpconv.errors import UsageError
from lpconv.options import Option


def report(
    runs: Annotated[
        list[str],
        typer.Argument(
            help="Outputs of `convert`, `advise`, `finetune`, `probe` or `bench`: one, several, or a folder of them.",
            metavar="RUN…",
        ),
    ],
    what_if: Annotated[
        str | None, Option("For a probe: show what this format would do to every tensor", metavar="FORMAT")
    ] = None,
    html: Annotated[str | None, Option("HTML file to write, with plots", metavar="FILE")] = None,
    json: Json = False,
) -> None:
    """Show a run again, compare several runs, or list the runs in a folder.

    [bold]Examples[/bold]
      lpconv report ./bert-large-unit-fp16
      lpconv report ./bert-large-unit-fp16 ./bert-large-unit-e4m3fn --html compare.html
      lpconv report ./runs --html runs/index.html
      lpconv report ./bert-large-probe --what-if e5m2
    """
    from lpconv.cli.runs import CONVERSIONS, PROBES, ask_probe, find_run, name_of, one_kind, show_folder
    from lpconv.report.compare import run_names
    from lpconv.storage.contents import PACKED
    from lpconv.storage.remote import check_url, is_url

    is_here = not any(map(is_url, runs))
    if not is_here:
        from lpconv.storage.remote_view import copy_of

        runs = [str(copy_of(check_url(run), "report.json")) if is_url(run) else run for run in runs]
    if len(runs) == 1 and Path(runs[0]).is_dir() and find_run(runs[0]) is None:
        show_folder(Path(runs[0]), html, json=json)
        return
    kind, paths = one_kind(runs)
    if what_if is not None and kind.name != PROBES:
        raise UsageError("--what-if needs the output of a probe", hint="run `lpconv probe MODEL` and pass its output")
    results = [ask_probe(path, what_if) if what_if else kind.read(path) for path in paths]
    if len(results) == 1:
        shown = results[0]
        if kind.name == CONVERSIONS and is_here and Path(runs[0]).is_dir() and not Path(runs[0], PACKED).exists():
            shown = replace(shown, output=str(Path(runs[0])))  # the folder may have been moved, or be OUT.failed
        if html is not None:
            write_page(html, kind.document(shown))
        print_result(results if kind.name == CONVERSIONS else results[0], lambda _: kind.document(shown), json=json)
        return
    if kind.compare is None:
        raise UsageError(f"{kind.name.lower()} can only be shown one at a time", hint="pass only one of them")
    compared = kind.compare(results, run_names([name_of(path) for path in paths]))
    if html is not None:
        write_page(html, compared)
    print_result(results, lambda _: compared, json=json)
