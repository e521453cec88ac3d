"""`lpconv convert`."""

import shlex
import sys
from typing import Annotated

import typer

from lpconv.cli.command import Json, Model, Output, Quiet, with_options
from lpconv.convert.options import ConvertOptions

__all__ = ["convert"]


@with_options
def convert(
    model: Model,
    options: ConvertOptions,
    output: Output = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show the plan and write nothing.", rich_help_panel="How to run")
    ] = False,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Rewrite a checkpoint into a low-precision form, verify it, and report.

    [bold]Examples[/bold]

      lpconv convert bert-large --method unit

      lpconv convert ./llama --method unit --format e4m3fn --gate 'sqnr>=25' -o llama-fp8

      lpconv convert ./llama --method collage --residual exact16

      lpconv convert ./llama --method multipoint --element int4 --budget-bits 4.5

      lpconv convert gpt2 --dry-run
    """
    from lpconv.cli.early import before_conversion
    from lpconv.cli.progress import progress_for
    from lpconv.report.convert.terminal import render_convert, render_plan
    from lpconv.report.terminal import show
    from lpconv.results import json_text

    target = before_conversion(model, output, options, dry_run=dry_run)
    from lpconv.convert import run  # torch takes seconds to import

    if dry_run:
        planned = run.plan(model, target, options)
        print(json_text(planned), end="") if json else show(render_plan(planned))
        return
    command = shlex.join(["lpconv", *sys.argv[1:]])
    with progress_for(quiet=quiet) as progress:
        result = run.convert(model, target, options, progress=progress, command=command)
    print(json_text(result), end="") if json else show(render_convert(result))
