"""`lpconv verify`."""

from pathlib import Path
from typing import Annotated

import typer

from lpconv.cli.command import Json, print_result, typed_command, write_page
from lpconv.cli.progress import progress_for
from lpconv.errors import VerificationError
from lpconv.options import Option
from lpconv.verify.options import VerifyOptions


def verify(
    path: Annotated[str, typer.Argument(help="An output of `lpconv convert`, or any checkpoint.", metavar="PATH")],
    options: VerifyOptions,
    html: Annotated[str | None, Option("HTML file to write, with every tensor", metavar="FILE")] = None,
    json: Json = False,
) -> None:
    """Check an output against its hashes and, with --against, against the weights and outputs of its source.

    For any other checkpoint, compare its decoded weights with those of another one, tensor by tensor.

    [bold]Examples[/bold]
      lpconv verify ./bert-large-unit-fp16
      lpconv verify ./bert-large-unit-fp16 --against bert-large --level logits
      lpconv verify ./llama-nvfp4 --against ./llama --gate 'sqnr>=15'
      lpconv verify ./llama-nvfp4 --against ./llama --data text.txt --gate 'kl<=0.05' --html verify.html
    """
    from lpconv.report.verify import failure_text, verify_document
    from lpconv.results import Verification, to_json
    from lpconv.storage.partfile import check_file
    from lpconv.storage.resolve import directory_of
    from lpconv.verify.run import verify_output, with_source
    from lpconv.version import __version__

    if html is not None:
        check_file(Path(html))
    with progress_for() as progress:
        compared = with_source(directory_of(path), options)
        if compared != options:
            progress.message(f"comparing with {compared.against}, the recorded source")
        checked = verify_output(directory_of(path), compared, progress=progress)
    result = Verification(
        **vars(checked), path=path, against=compared.against, command=typed_command(), version=__version__
    )
    if html is not None:
        write_page(html, verify_document(result))
    if result.passed or not json:  # otherwise the error's details hold the result
        print_result(result, verify_document, json=json)
    if not result.passed:
        may_differ = result.level != "values" and options.against is not None and result.problems
        other = f"; if `{options.against}` is not its source, compare with --level values" if may_differ else ""
        raise VerificationError(failure_text(result), hint=f"do not use this output{other}", details=to_json(result))
