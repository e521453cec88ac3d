"""Options that several commands share, and the small parsers behind them."""

from typing import Annotated

import typer

__all__ = ["Force", "Json", "Model", "Output", "Quiet", "Resume", "Revision", "TrustRemoteCode"]

Model = Annotated[
    str, typer.Argument(help="A checkpoint directory, a hub id, an alias such as bert-large, or demo.", metavar="MODEL")
]
Revision = Annotated[str | None, typer.Option("--revision", help="Branch, tag or commit on the hub.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout instead of a table.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress and no messages on stderr, errors excepted.")]
Force = Annotated[bool, typer.Option("--force", help="Replace an existing output of lpconv.")]
Resume = Annotated[bool, typer.Option("--resume", help="Go on with an interrupted run of the same command.")]
TrustRemoteCode = Annotated[
    bool, typer.Option("--trust-remote-code", help="Let the checkpoint's own Python files run for verification.")
]
Output = Annotated[str | None, typer.Option("--output", "-o", help="The directory to write.", metavar="DIR")]
