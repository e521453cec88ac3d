"""`lpconv bench`."""

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lpconv.bench.cases import BENCH_FORMATS, parse_sweep
from lpconv.bench.options import BenchOptions
from lpconv.cli.command import Json, Quiet, print_result, typed_command, with_options
from lpconv.errors import UsageError
from lpconv.lookup import find

if TYPE_CHECKING:
    from lpconv.results import BenchResult

__all__ = ["bench"]

_OUTPUT_FORMATS = ("table", "json", "jsonl", "csv", "md")
_WHAT, _RESULTS = "What to measure", "Results"


@with_options
def bench(
    options: BenchOptions,
    model: Annotated[
        str | None,
        typer.Argument(
            help="A preset such as bert-large or llama-8b (random weights), a checkpoint, or demo.", metavar="MODEL"
        ),
    ] = None,
    rivals: Annotated[
        bool, typer.Option("--rivals", help="Add torchao and TransformerEngine.", rich_help_panel=_WHAT)
    ] = False,
    sweep: Annotated[
        list[str] | None,
        typer.Option(
            "--sweep", help="Sizes, such as 'batch=1,8,32 seq=128,512'.", metavar="SIZES", rich_help_panel=_WHAT
        ),
    ] = None,
    output_format: Annotated[
        str,
        typer.Option(
            "--output-format",
            help="Form of the result. One of " + ", ".join(_OUTPUT_FORMATS) + ".",
            rich_help_panel=_RESULTS,
        ),
    ] = "table",
    save: Annotated[
        str | None,
        typer.Option(
            "--save", "-o", help="Write the JSON here, after every row.", metavar="FILE", rich_help_panel=_RESULTS
        ),
    ] = None,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Measure time, memory and error of low-precision forms beside a compiled baseline, and say what they mean.

    [bold]Examples[/bold]

      lpconv bench --format fp8

      lpconv bench llama-8b --layers 4 --format fp8 --method static,tensorwise --rivals --mode infer,train

      lpconv bench bert-base --sweep 'batch=1,8 seq=128,512' --gate 'speedup>=1.2' --save bench.json

      torchrun --nproc-per-node 8 -m lpconv bench llama-8b --mode train --parallel fsdp2
    """
    from lpconv.bench.outcome import kept, problem
    from lpconv.bench.run import bench as measure
    from lpconv.bench.team import processes_of
    from lpconv.cli.early import before_bench
    from lpconv.cli.progress import progress_for

    together = processes_of(options.processes)
    if together is None:
        return
    shown = "json" if json else output_format
    find("output format", shown, dict.fromkeys(_OUTPUT_FORMATS))
    options = _completed(options, model, sweep or [], rivals=rivals, processes=together)
    judged = before_bench(options, Path(save) if save else None)
    with kept(Path(save) if save else None, judged, lambda partial: None if json else _print(partial, shown)) as keep:
        with progress_for(quiet=quiet) as progress:
            result = measure(options, progress=progress, on_result=keep)
        result = keep(result)
    error = problem(result)
    if error is None or not json:  # under --json the error's details hold the result
        _print(result, shown)
    if error is not None:
        raise error


def _completed(
    options: BenchOptions, model: str | None, sweep: list[str], *, rivals: bool, processes: int
) -> BenchOptions:
    """The options with what the command line says in ways of its own."""
    swept = parse_sweep(sweep)
    for name, given in (("batch", options.batches), ("seq", options.seqs)):
        if given and name in swept:
            raise UsageError(f"--{name} and --sweep both set the {name}", hint="pass one of them")
    peers = [m for m, peer in BENCH_FORMATS["fp8"].items() if peer is not None] if rivals else []
    return dataclasses.replace(
        options,
        model=model,
        methods=(*(options.methods or list(BENCH_FORMATS["fp8"])[:1]), *peers),
        batches=tuple(swept.get("batch", options.batches)),
        seqs=tuple(swept.get("seq", options.seqs)),
        processes=processes,
        command=typed_command(),
    )


def _print(result: "BenchResult", shown: str) -> None:
    from lpconv.report.bench.terminal import render_bench
    from lpconv.report.bench.text import bench_csv, bench_jsonl, bench_markdown

    writers = {"jsonl": bench_jsonl, "csv": bench_csv, "md": bench_markdown}
    if shown in writers:
        print(writers[shown](result), end="")
    else:
        print_result(result, render_bench, json=shown == "json")
