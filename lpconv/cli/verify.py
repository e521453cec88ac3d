"""`lpconv verify`."""

from typing import Annotated

import typer

from lpconv.cli.command import Json, Quiet, print_result, with_options
from lpconv.cli.progress import progress_for
from lpconv.convert.options import VerifyOptions
from lpconv.errors import VerificationError

__all__ = ["verify"]


@with_options
def verify(
    path: Annotated[str, typer.Argument(help="An output of `lpconv convert`, or any checkpoint.", metavar="PATH")],
    options: VerifyOptions,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Check an output against its own hashes, and against the source's weights and outputs.

    Of any other checkpoint, compare the weights that it stands for with those of another one, tensor by tensor.

    [bold]Examples[/bold]

      lpconv verify ./bert-large-unit-fp16

      lpconv verify ./bert-large-unit-fp16 --against bert-large --level logits

      lpconv verify ./llama-nvfp4 --against ./llama --gate 'sqnr>=15'

      lpconv verify ./llama-nvfp4 --against ./llama --data text.txt --gate 'kl<=0.05'
    """
    from lpconv.checkpoint.resolve import directory_of
    from lpconv.cli.early import before_verifying

    directory = directory_of(path)
    before_verifying(directory, options)
    from lpconv.convert.verify_output import verify_output  # torch takes seconds to import
    from lpconv.report.convert.terminal import render_verify
    from lpconv.results import to_json

    with progress_for(quiet=quiet) as progress:
        result = verify_output(
            directory,
            against=options.against,
            level=options.level,
            gates=options.gates,
            trust_remote_code=options.trust_remote_code,
            progress=progress,
            data=options.data,
            seq_len=options.seq_len,
            max_tokens=options.max_tokens,
        )
    if result.passed or not json:  # else the error's details hold the result
        print_result(result, render_verify, json=json)
    if not result.passed:
        raise VerificationError("; ".join(result.failures), hint="do not use this output", details=to_json(result))
