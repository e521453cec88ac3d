"""`lpconv bench`."""

import dataclasses
from pathlib import Path
from typing import Annotated

import typer

from lpconv.bench.options import BENCH_FORMATS, BenchOptions
from lpconv.cli.command import Json, print_result, typed_command, write_page
from lpconv.options import Option, check


def bench(
    options: BenchOptions,
    model: Annotated[
        str | None,
        typer.Argument(
            help="A preset such as bert-large or llama-8b (random weights), a checkpoint, or demo.", metavar="MODEL"
        ),
    ] = None,
    rivals: Annotated[bool, Option("Also measure torchao and TransformerEngine", panel="What to measure")] = False,
    save: Annotated[
        str | None,
        Option("JSON file to write, updated after every row", short=("-o",), metavar="FILE", panel="Results"),
    ] = None,
    html: Annotated[str | None, Option("HTML file to write", metavar="FILE", panel="Results")] = None,
    json: Json = False,
) -> None:
    """Measure time, memory and error of low precision against a compiled baseline.

    [bold]Examples[/bold]
      lpconv bench --format fp8
      lpconv bench llama-8b --layers 4 --format fp8 --method static,tensor --rivals --mode infer,train
      lpconv bench bert-base --batch-size 1,8 --seq-len 128,512 --gate 'speedup>=1.2' --html bench.html
      torchrun --nproc-per-node 8 -m lpconv bench llama-8b --mode train --parallel fsdp2
    """
    from lpconv.bench.outcome import final_error, judge_of, keep_results
    from lpconv.bench.run import bench as measure
    from lpconv.bench.team import processes_of
    from lpconv.cli.progress import progress_for
    from lpconv.storage.partfile import check_file

    check(options)
    together = processes_of(options.processes)
    if together is None:
        return
    peers = [m for m, peer in BENCH_FORMATS["fp8"].items() if peer is not None] if rivals else []
    usual = list(BENCH_FORMATS["fp8"])[:1] if rivals else []
    options = dataclasses.replace(
        options,
        model=model,
        methods=(*(options.methods or usual), *peers),
        processes=together,
        command=typed_command(),
    )
    judge = judge_of(options)
    for file in filter(None, (save, html)):
        check_file(Path(file))
    from lpconv.report.bench import bench_document

    with keep_results(
        Path(save) if save else None,
        judge,
        lambda partial: None if json else print_result(partial, bench_document, json=False),
    ) as keep:
        with progress_for() as progress:
            result = measure(options, progress=progress, on_result=keep)
        result = keep(result)
    if html is not None:
        write_page(html, bench_document(result))
    error = final_error(result)
    if error is None or not json:  # with --json the error's details hold the result
        print_result(result, bench_document, json=json)
    if error is not None:
        raise error
