"""`lpconv doctor`."""

from typing import Annotated

from lpconv.cli.command import Json, print_result, without_blanks
from lpconv.options import Option


def doctor(
    require: Annotated[
        str | None, Option("Fail with exit code 4 unless all of these are available", metavar="fp8,onnx,…")
    ] = None,
    aliases: Annotated[bool, Option("List short model names and their hub ids, and exit")] = False,
    json: Json = False,
) -> None:
    """Show what this machine supports: native and emulated formats, products on a GPU, packages and extras.

    [bold]Examples[/bold]
      lpconv doctor
      lpconv doctor --require fp8,onnx
    """
    if aliases:
        from lpconv.report.doctor import alias_table
        from lpconv.storage.aliases import ALIASES

        names = [(a.family, a.name, a.repo_id) for a in ALIASES.values()]
        print_result({"aliases": ALIASES}, lambda _: alias_table(names), json=json)
        return
    required = without_blanks("--require", require.split(",")) if require is not None else []
    from lpconv.doctor import examine, require as check, requirements
    from lpconv.report.doctor import doctor_document

    requirements(required)  # raises its error before the tables are printed
    result = examine()
    if not json:
        print_result(result, doctor_document, json=False)
    if required:
        check(required, result)
    if json:  # otherwise the error's document is the only one
        print_result(result, doctor_document, json=True)
