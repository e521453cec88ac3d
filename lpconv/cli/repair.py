"""`lpconv repair`."""

from pathlib import Path
from typing import Annotated

import typer

from lpconv.cli.command import Force, Json, Quiet, print_result
from lpconv.cli.progress import progress_for

__all__ = ["repair"]


def repair(
    path: Annotated[str, typer.Argument(help="A checkpoint that others quantised.", metavar="PATH")],
    output: Annotated[str, typer.Option("--output", "-o", help="The directory to write.", metavar="DIR")],
    against: Annotated[
        str | None,
        typer.Option(
            "--against", help="Model that was quantised: tells inverted scales from lost ones.", metavar="DIR"
        ),
    ] = None,
    force: Force = False,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Write a checkpoint again with sound scales, and say what that changed.

    Weights that readers fuse get one scale, exactly where their scales differ by powers of two; inverted scales are
    turned round. What is lost is refused: scales that are zero, no number, or missing.

    [bold]Examples[/bold]

      lpconv repair ./llama-nvfp4 -o ./llama-nvfp4-repaired

      lpconv repair ./llama-nvfp4 --against ./llama -o ./llama-nvfp4-repaired
    """
    from lpconv.checkpoint.resolve import directory_of
    from lpconv.cli.early import before_repairing

    source, target = directory_of(path), Path(output)
    reference = None if against is None else directory_of(against)
    before_repairing(source, target, reference, force=force)
    from lpconv.convert.repair import repair as repair_checkpoint  # torch takes seconds to import
    from lpconv.report.convert.repair import render_repair

    with progress_for(quiet=quiet) as progress:
        result = repair_checkpoint(source, target, against=reference, force=force, progress=progress)
    print_result(result, render_repair, json=json)
