"""Parameters that several commands have beside, or without, a record of options."""

from typing import Annotated, Any

import typer

from lpconv.cli.command import parameter_of
from lpconv.convert.options import ConvertOptions

__all__ = ["Force", "Json", "Model", "Output", "Quiet", "Revision"]

Model = Annotated[
    str, typer.Argument(help="A checkpoint directory, a hub id, an alias such as bert-large, or demo.", metavar="MODEL")
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout instead of a table.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress and no messages on stderr, errors excepted.")]
Output = Annotated[str | None, typer.Option("--output", "-o", help="The directory to write.", metavar="DIR")]
Revision: Any = parameter_of(ConvertOptions, "revision")
Force: Any = parameter_of(ConvertOptions, "force")
