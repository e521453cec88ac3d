"""`lpconv export`."""

from pathlib import Path
from typing import Annotated

import typer

from lpconv.cli.handling import handled
from lpconv.cli.options import Force, Json, Model, Quiet, Revision
from lpconv.cli.progress import progress_for

__all__ = ["export", "onnx"]

export = typer.Typer(
    name="export", no_args_is_help=True, rich_markup_mode="rich", help="Write a checkpoint for another runtime."
)


@export.callback()
def _export() -> None:
    """Write a checkpoint for another runtime."""


def onnx(
    model: Model,
    output: Annotated[str, typer.Option("--output", "-o", help="The directory to write.", metavar="DIR")],
    opset: Annotated[
        int | None, typer.Option("--opset", help="ONNX operator set (default: the oldest that holds the formats)")
    ] = None,
    validate: Annotated[bool, typer.Option(help="Run the file in ONNX Runtime and compare it with the model.")] = True,
    tolerance: Annotated[
        float, typer.Option("--tolerance", help="The largest difference, as a share of the largest output.", min=0)
    ] = 1e-5,
    external_data: Annotated[
        bool, typer.Option("--external-data", help="Weights in model.onnx.data even where they fit into the graph.")
    ] = False,
    revision: Revision = None,
    force: Force = False,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Write an ONNX model whose weights stay in the format they are stored in, and run it in ONNX Runtime.

    [bold]Examples[/bold]

      lpconv export onnx ./bert-large-unit-e4m3fn -o bert-onnx

      lpconv export onnx gpt2 -o gpt2-onnx --external-data
    """
    from lpconv.export.extra import need

    need("onnxscript", *(["onnxruntime"] if validate else []))
    from lpconv.export.options import ExportOptions
    from lpconv.export.run import export_onnx
    from lpconv.report.export import render_export
    from lpconv.report.terminal import show
    from lpconv.results import json_text

    options = ExportOptions(
        opset=opset,
        validate=validate,
        tolerance=tolerance,
        external_data=external_data,
        revision=revision,
        force=force,
    )
    with progress_for(quiet=quiet) as progress:
        result = export_onnx(model, Path(output), options, progress=progress)
    print(json_text(result), end="") if json else show(render_export(result))


export.command()(handled(onnx))
