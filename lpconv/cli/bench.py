"""`lpconv bench`."""

import dataclasses
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lpconv.bench.cases import (
    BASELINES,
    BENCH_METHODS,
    BENCH_OPTIMIZERS,
    COMPILE_MODES,
    FORMATS,
    MODES,
    PARALLEL,
    parse_sweep,
)
from lpconv.cli.options import Json, Quiet
from lpconv.errors import UsageError
from lpconv.lookup import find

if TYPE_CHECKING:
    from lpconv.results import BenchResult

__all__ = ["bench"]

_OUTPUT_FORMATS = ("table", "json", "jsonl", "csv", "md")
_WHAT, _HOW, _CHECK = "What to measure", "How to measure", "Results"


def bench(
    model: Annotated[
        str | None,
        typer.Argument(help="A preset such as bert-large or llama-8b (random weights), a checkpoint, or demo."),
    ] = None,
    format: Annotated[
        str, typer.Option("--format", "-f", help="Any of " + ", ".join(FORMATS), rich_help_panel=_WHAT)
    ] = "fp8",
    method: Annotated[
        str,
        typer.Option("--method", "-m", help="For fp8, any of " + ", ".join(FORMATS["fp8"]), rich_help_panel=_WHAT),
    ] = "static",
    mode: Annotated[
        str, typer.Option("--mode", help=" or ".join(MODES) + ", or both", rich_help_panel=_WHAT)
    ] = "infer",
    optimizer: Annotated[
        str, typer.Option("--optimizer", help="Any of " + ", ".join(BENCH_OPTIMIZERS), rich_help_panel=_WHAT)
    ] = "adamw",
    rivals: Annotated[
        bool, typer.Option("--rivals", help="Add torchao and TransformerEngine.", rich_help_panel=_WHAT)
    ] = False,
    layers: Annotated[
        int | None, typer.Option("--layers", help="Only so many of the model's layers.", min=1, rich_help_panel=_WHAT)
    ] = None,
    batch: Annotated[
        int | None, typer.Option("--batch", help="Sequences in a step of a process.", min=1, rich_help_panel=_WHAT)
    ] = None,
    seq: Annotated[
        int | None, typer.Option("--seq", help="Tokens in a sequence.", min=1, rich_help_panel=_WHAT)
    ] = None,
    sweep: Annotated[
        list[str] | None,
        typer.Option("--sweep", help="Such as 'batch=1,8,32 seq=128,512'.", metavar="SIZES", rich_help_panel=_WHAT),
    ] = None,
    baseline: Annotated[
        str, typer.Option("--baseline", help="One of " + ", ".join(BASELINES), rich_help_panel=_HOW)
    ] = "bf16+compile",
    compile: Annotated[
        str,
        typer.Option("--compile", help="What torch.compile gets: " + ", ".join(COMPILE_MODES), rich_help_panel=_HOW),
    ] = "blocks",
    device: Annotated[
        str | None,
        typer.Option("--device", help="cpu, cuda or cuda:N (default: a GPU if there is one)", rich_help_panel=_HOW),
    ] = None,
    processes: Annotated[
        int | None,
        typer.Option("--processes", help="That work together (torchrun's, or 1).", min=1, rich_help_panel=_HOW),
    ] = None,
    parallel: Annotated[
        str | None,
        typer.Option("--parallel", help="How they do: " + " or ".join(PARALLEL) + " (ddp).", rich_help_panel=_HOW),
    ] = None,
    threads: Annotated[
        int | None, typer.Option("--threads", help="CPU threads of each process.", min=1, rich_help_panel=_HOW)
    ] = None,
    min_iters: Annotated[
        int, typer.Option("--min-iters", help="At least so many timed steps of each.", rich_help_panel=_HOW)
    ] = 30,
    min_time: Annotated[
        float, typer.Option("--min-time", help="At least so many seconds of each.", min=0, rich_help_panel=_HOW)
    ] = 2.0,
    rounds: Annotated[
        int, typer.Option("--rounds", help="Turns that baseline and variant take.", rich_help_panel=_HOW)
    ] = 12,
    launches: Annotated[
        int,
        typer.Option("--launches", help="New processes for each, over which these are spread.", rich_help_panel=_HOW),
    ] = 3,
    seed: Annotated[int, typer.Option("--seed", help="For weights and token ids.", rich_help_panel=_HOW)] = 0,
    output_format: Annotated[
        str, typer.Option("--output-format", help=", ".join(_OUTPUT_FORMATS), rich_help_panel=_CHECK)
    ] = "table",
    save: Annotated[
        str | None,
        typer.Option("--save", help="Write the JSON here, after every row.", metavar="FILE", rich_help_panel=_CHECK),
    ] = None,
    gate: Annotated[
        list[str] | None,
        typer.Option(
            "--gate",
            help="A condition such as 'speedup>=1.2'. Repeatable.",
            metavar="CONDITION",
            rich_help_panel=_CHECK,
        ),
    ] = None,
    compare: Annotated[
        str | None,
        typer.Option("--compare", help="An older JSON: fail on regressions.", metavar="FILE", rich_help_panel=_CHECK),
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
    from lpconv.bench.interleave import Effort
    from lpconv.bench.options import BenchOptions
    from lpconv.bench.outcome import compare as compare_with
    from lpconv.bench.outcome import problem
    from lpconv.bench.run import bench as measure
    from lpconv.bench.saved import kept, read_bench
    from lpconv.bench.torchrun import processes_of
    from lpconv.cli.progress import progress_for
    from lpconv.gates import BENCH_GATES, check_rows

    together = processes_of(processes)
    if together is None:
        return
    shown = "json" if json else output_format
    find("output format", shown, dict.fromkeys(_OUTPUT_FORMATS))
    find("compile mode", compile, dict.fromkeys(COMPILE_MODES))
    gates = tuple(map(BENCH_GATES.parse, gate or ()))
    old = read_bench(Path(compare)) if compare else None
    batches, seqs = _sizes(batch, seq, sweep or [])
    peers = [m for m in FORMATS["fp8"] if BENCH_METHODS[m] is not None] if rivals else []
    options = BenchOptions(
        model=model,
        formats=_names(format),
        methods=(*_names(method), *peers),
        modes=_names(mode),
        optimizers=_names(optimizer),
        batches=batches,
        seqs=seqs,
        layers=layers,
        compiled=compile,
        baseline=baseline,
        device=device,
        threads=threads,
        processes=together,
        parallel=parallel,
        seed=seed,
        effort=Effort(min_iterations=min_iters, min_seconds=min_time, rounds=rounds, launches=launches),
        command=shlex.join(["lpconv", *sys.argv[1:]]),
    )

    def judged(result: "BenchResult") -> "BenchResult":
        changes = compare_with(result.rows, old) if old else ()
        return dataclasses.replace(result, gates=check_rows(gates, result.rows), changes=changes)

    with kept(Path(save) if save else None, judged, lambda partial: None if json else _print(partial, shown)) as keep:
        with progress_for(quiet=quiet) as progress:
            result = measure(options, progress=progress, on_result=keep)
        result = keep(result)
    error = problem(result)
    if error is None or not json:  # under --json the error's details hold the result
        _print(result, shown)
    if error is not None:
        raise error


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def _sizes(batch: int | None, seq: int | None, sweep: list[str]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Batches and sequence lengths, none where the bench is to choose."""
    swept = parse_sweep(sweep)
    for name, one in (("batch", batch), ("seq", seq)):
        if one is not None and name in swept:
            raise UsageError(f"--{name} and --sweep both set the {name}", hint="pass one of them")
    return tuple(swept.get("batch", [batch] if batch else [])), tuple(swept.get("seq", [seq] if seq else []))


def _print(result: "BenchResult", shown: str) -> None:
    from lpconv.report.bench.terminal import render_bench
    from lpconv.report.bench.text import bench_csv, bench_jsonl, bench_markdown
    from lpconv.report.terminal import show
    from lpconv.results import json_text

    writers = {"json": json_text, "jsonl": bench_jsonl, "csv": bench_csv, "md": bench_markdown}
    if shown in writers:
        print(writers[shown](result), end="")
        return
    show(render_bench(result))
