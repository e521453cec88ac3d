"""`lpconv export`."""

from difflib import get_close_matches
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperGroup

from lpconv.cli.command import Json, Model, Target, print_result
from lpconv.cli.handling import handle_failures
from lpconv.cli.parsing import Command, HelpPage, help_text
from lpconv.cli.progress import progress_for
from lpconv.export.options import ExportOptions

_CONVERTED = {"gguf": "--scheme GGUF_Q8_0", "mlx": "--scheme MLX_INT4", "vllm": "--scheme FP8_DYNAMIC"}


class _Runtimes(HelpPage, TyperGroup):
    def resolve_command(self, context: Any, args: list[str]) -> Any:
        """Find the command as typer does; for other formats, or a model in place of one, suggest the right command."""
        name, model = args[0], next((x for x in args[1:2] if x[:1] != "-" and x not in self.commands), None)
        if name.lower() in _CONVERTED:
            context.fail(f"`lpconv convert {model or 'MODEL'} {_CONVERTED[name.lower()]}` writes {name}")
        if name not in self.commands and not get_close_matches(name, self.commands):
            context.fail(f"`{name}` is not a runtime; try `lpconv export onnx {model or name}`")
        return super().resolve_command(context, args)


export = typer.Typer(
    name="export",
    cls=_Runtimes,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    help="Export a checkpoint for another runtime.",
)


@export.callback()
def _export() -> None:
    """Export a checkpoint for another runtime."""


def onnx(model: Model, output: Target, options: ExportOptions, json: Json = False) -> None:
    """Write an ONNX model with weights in their stored format, and check it with ONNX Runtime.

    [bold]Examples[/bold]
      lpconv export onnx ./bert-large-unit-e4m3fn -o bert-onnx
      lpconv export onnx gpt2 -o gpt2-onnx --external-data
    """
    from lpconv.export.run import export_onnx
    from lpconv.report.export import export_document

    with progress_for() as progress:
        result = export_onnx(model, Path(output), options, progress=progress)
    print_result(result, export_document, json=json)


export.command(cls=Command, help=help_text(onnx))(handle_failures(onnx))
