"""`lpconv export`."""

from pathlib import Path
from typing import Annotated

import typer

from lpconv.cli.command import Json, Model, Quiet, print_result, with_options
from lpconv.cli.handling import handled
from lpconv.cli.progress import progress_for
from lpconv.export.options import ExportOptions

__all__ = ["export", "onnx"]

export = typer.Typer(
    name="export",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    help="Write a checkpoint for another runtime.",
)


@export.callback()
def _export() -> None:
    """Write a checkpoint for another runtime."""


@with_options
def onnx(
    model: Model,
    output: Annotated[str, typer.Option("--output", "-o", help="The directory to write.", metavar="DIR")],
    options: ExportOptions,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Write an ONNX model whose weights stay in the format they are stored in, and run it in ONNX Runtime.

    [bold]Examples[/bold]

      lpconv export onnx ./bert-large-unit-e4m3fn -o bert-onnx

      lpconv export onnx gpt2 -o gpt2-onnx --external-data
    """
    from lpconv.cli.early import before_export

    target = Path(output)
    before_export(model, target, options)
    from lpconv.export.run import export_onnx  # torch and transformers take seconds to import
    from lpconv.report.export import render_export

    with progress_for(quiet=quiet) as progress:
        result = export_onnx(model, target, options, progress=progress)
    print_result(result, render_export, json=json)


export.command()(handled(onnx))
