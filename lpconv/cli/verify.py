"""`lpconv verify`."""

from pathlib import Path
from typing import Annotated

import typer

from lpconv.cli.options import Json, Quiet, TrustRemoteCode
from lpconv.cli.progress import progress_for
from lpconv.errors import VerificationError

__all__ = ["verify"]


def verify(
    path: Annotated[str, typer.Argument(help="An output of `lpconv convert`.", metavar="PATH")],
    against: Annotated[
        str | None,
        typer.Option("--against", help="The source it was made from (default: the one it names)", metavar="MODEL"),
    ] = None,
    level: Annotated[
        str, typer.Option("--level", help="hash, weights (every element), or logits (both models run).")
    ] = "hash",
    gate: Annotated[
        list[str] | None,
        typer.Option("--gate", help="A condition to pass, such as 'top1>=0.99'. Repeatable.", metavar="CONDITION"),
    ] = None,
    trust_remote_code: TrustRemoteCode = False,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Check an output against its own hashes, and against the source's weights and outputs.

    [bold]Examples[/bold]

      lpconv verify ./bert-large-unit-fp16

      lpconv verify ./bert-large-unit-fp16 --against bert-large --level logits
    """
    from lpconv.convert.verify_output import verify_output
    from lpconv.report.convert.terminal import render_verify
    from lpconv.report.terminal import show
    from lpconv.results import json_text, to_json

    with progress_for(quiet=quiet) as progress:
        result = verify_output(
            Path(path),
            against=against,
            level=level,
            gates=tuple(gate or ()),
            trust_remote_code=trust_remote_code,
            progress=progress,
        )
    if not result.passed:
        if not json:
            show(render_verify(result))
        raise VerificationError("; ".join(result.failures), hint="do not use this output", details=to_json(result))
    print(json_text(result), end="") if json else show(render_verify(result))
