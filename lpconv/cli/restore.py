"""`lpconv restore`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lpconv.cli.command import Json, Target
from lpconv.cli.progress import progress_for
from lpconv.options import Force, Option

if TYPE_CHECKING:
    from lpconv.results import RestoreResult


def restore(
    path: Annotated[
        str, typer.Argument(help="An output of `lpconv convert`, or a quantised checkpoint.", metavar="PATH")
    ],
    output: Target,
    dtype: Annotated[
        str | None,
        Option("Dtype of weights that another tool quantised: fp32, bf16 or fp16", default="from config.json"),
    ] = None,
    force: Force = False,
    json: Json = False,
) -> None:
    """Write a plain Hugging Face checkpoint again. Bit-exact for unit in fp32 and for Collage with exact16.

    For a checkpoint that another tool quantised, write what its codes stand for.

    [bold]Examples[/bold]
      lpconv restore ./bert-large-unit-fp32 -o ./bert-large-again
      lpconv restore ./llama-nvfp4 --dtype fp32 -o ./llama-decoded
    """
    from lpconv.convert.restore import restore as restore_checkpoint
    from lpconv.results import json_text
    from lpconv.storage.resolve import directory_of

    with progress_for() as progress:
        result = restore_checkpoint(directory_of(path), Path(output), dtype=dtype, force=force, progress=progress)
    if json:
        print(json_text(result), end="")
        return
    print(f"{result.num_tensors} tensors restored to {result.output}:\n{_exactness(result)}")


def _exactness(result: "RestoreResult") -> str:
    if result.dtype is not None:
        held = "which is exact" if result.exact else "which rounds them; --dtype fp32 is exact"
        return f"the values of {result.method} in {result.dtype}, {held}"
    if result.exact:
        return "bit-identical to the source, as hashes and the conversion record show"
    return "the decoded values, which are those of the source up to rounding"
