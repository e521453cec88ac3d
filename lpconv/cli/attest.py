"""`lpconv attest`."""

import os
from pathlib import Path
from typing import Annotated

import typer

from lpconv.cli.command import Json, print_next
from lpconv.cli.progress import progress_for
from lpconv.errors import UsageError
from lpconv.options import Option


def attest(
    path: Annotated[str, typer.Argument(help="An output of `lpconv convert`.", metavar="PATH")],
    output: Annotated[
        str | None, Option("File to write, or - for stdout", default="PATH.intoto.json", short=("-o",), metavar="FILE")
    ] = None,
    against: Annotated[str | None, Option("Source to compare with and to attest by hashes", metavar="MODEL")] = None,
    json: Json = False,
) -> None:
    """Write an in-toto statement about an output: the hashes of files, source, options, versions and verification.

    [bold]Examples[/bold]
      lpconv attest ./bert-large-unit-fp16 --against bert-large
    """
    from lpconv.results import json_text
    from lpconv.storage.partfile import check_file, write_small
    from lpconv.storage.resolve import directory_of
    from lpconv.storage.staging import folder_next_to
    from lpconv.verify.attest import attest as attest_output

    directory = directory_of(path)
    is_printed = json or output == "-"
    file = Path(os.devnull if is_printed else output or folder_next_to(directory, ".intoto.json"))
    if file.resolve().is_relative_to(directory.resolve()):
        raise UsageError(f"`{file}` would be a new file of the output", hint="write it next to the output")
    check_file(file)
    with progress_for() as progress:
        text = json_text(attest_output(directory, against=against, progress=progress))
    write_small(file, text)
    if is_printed:
        print(text, end="")
    else:
        print_next(f"{directory} is attested in {file}")
