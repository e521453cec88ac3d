"""`lpconv push`."""

from typing import Annotated

import typer

from lpconv.cli.command import Json, Quiet, print_result
from lpconv.cli.progress import progress_for

__all__ = ["push"]


def push(
    path: Annotated[str, typer.Argument(help="An output of `lpconv convert`.", metavar="DIR")],
    repo: Annotated[str, typer.Argument(help="Repository on the hub, made if it is not there.", metavar="OWNER/NAME")],
    private: Annotated[bool, typer.Option("--private", help="Make a new repository private.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show what would be sent, without asking the network.")
    ] = False,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Send a verified output to the Hugging Face hub in one commit, with a card that says how it was verified.

    All files are hashed first; reports are not sent. The token is that of `hf auth login` or HF_TOKEN.

    [bold]Examples[/bold]

      lpconv push ./bert-large-unit-fp16 me/bert-large-unit-fp16 --dry-run

      lpconv push ./bert-large-unit-fp16 me/bert-large-unit-fp16 --private
    """
    from lpconv.checkpoint.resolve import directory_of
    from lpconv.convert.push import push as send
    from lpconv.report.convert.push import render_push

    with progress_for(quiet=quiet) as progress:
        result = send(directory_of(path), repo, private=private, dry_run=dry_run, progress=progress)
    print_result(result, render_push, json=json)
