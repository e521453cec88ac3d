"""`lpconv repair`."""

from pathlib import Path
from typing import Annotated

import typer

from lpconv.cli.command import Force, Json, Quiet, Target, print_result
from lpconv.cli.progress import progress_for

__all__ = ["repair"]


def repair(
    path: Annotated[str, typer.Argument(help="A checkpoint that another tool quantised.", metavar="PATH")],
    output: Target,
    against: Annotated[
        str | None,
        typer.Option(
            "--against", help="Model before it was quantised; tells inverted scales from lost ones.", metavar="DIR"
        ),
    ] = None,
    force: Force = False,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Write a checkpoint again with sound scales, and say what that changed.

    Weights that readers fuse get one scale, exactly so where their scales differ by powers of two; inverted scales are
    inverted again. Scales that are zero, NaN or missing cannot be repaired, and are refused.

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
