"""`lpconv inspect`."""

from typing import Annotated

import typer

from lpconv.cli.command import Json, Model, Quiet, Revision, print_result
from lpconv.cli.progress import progress_for
from lpconv.errors import VerificationError

__all__ = ["inspect"]


def inspect(
    model: Model,
    stats: Annotated[bool, typer.Option("--stats", help="Read the data: RMS, largest value, NaN and Inf.")] = False,
    strict: Annotated[bool, typer.Option("--strict", help="End with exit code 5 for warnings too.")] = False,
    revision: Revision = None,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Show what a checkpoint holds, from its headers: dtypes, sizes, scales, ties, and what is wrong with it.

    For a checkpoint that another tool quantised, the scales are read too: those that are inverted, missing, or unequal
    in weights that readers fuse are named.

    [bold]Examples[/bold]

      lpconv inspect bert-large

      lpconv inspect ./bert-large-unit-fp16 --stats --json

      lpconv inspect ./llama-nvfp4 --strict
    """
    from lpconv.checkpoint.resolve import resolve
    from lpconv.forms.foreign import READ
    from lpconv.report.convert.terminal import render_inspect
    from lpconv.results import to_json

    directory = resolve(model, revision=revision, headers_only=True).directory
    if stats:
        from lpconv.convert.statistics import inspect_with_statistics

        with progress_for(quiet=quiet) as progress:
            found = inspect_with_statistics(directory, progress, name=model)
    else:
        from lpconv.convert.inspect import inspect as inspect_headers

        found = inspect_headers(directory, name=model)
    if found.layout in READ and not found.problems:  # else the scales may not even be there
        from lpconv.convert.scales import judged  # torch takes seconds to import

        found = judged(found, directory)
    wrong = (*found.problems, *(found.warnings if strict else ()))
    if not (wrong and json):  # else the error's details hold the result
        print_result(found, render_inspect, json=json)
    if wrong:
        hint = "fetch the checkpoint again, or tell who made it" if found.layout else "fetch the checkpoint again"
        raise VerificationError("; ".join(wrong), hint=hint, details=to_json(found))
