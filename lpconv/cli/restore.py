"""`lpconv restore`."""

from pathlib import Path
from typing import Annotated

import typer

from lpconv.cli.command import Force, Json, Quiet
from lpconv.cli.progress import progress_for

__all__ = ["restore"]


def restore(
    path: Annotated[str, typer.Argument(help="An output of `lpconv convert`.", metavar="PATH")],
    output: Annotated[str, typer.Option("--output", "-o", help="The directory to write.", metavar="DIR")],
    force: Force = False,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Write the plain Hugging Face checkpoint back: bit-exact for unit fp32 and for Collage with exact16.

    [bold]Example[/bold]

      lpconv restore ./bert-large-unit-fp32 -o ./bert-large-again
    """
    from lpconv.checkpoint.staging import check_apart, check_free
    from lpconv.cli.early import before_reading

    before_reading(Path(path))
    check_apart(Path(path), Path(output))
    check_free(Path(output), resume=False, force=force)
    from lpconv.convert.restore import restore as restore_checkpoint
    from lpconv.results import json_text

    with progress_for(quiet=quiet) as progress:
        result = restore_checkpoint(Path(path), Path(output), force=force, progress=progress)
    if json:
        print(json_text(result), end="")
        return
    exactness = (
        "bit for bit the source's, by the hashes and the record of the conversion"
        if result.exact
        else "the decoded values, not the source's bits"
    )
    print(f"{result.num_tensors} tensors restored to {result.output}: {exactness}")
