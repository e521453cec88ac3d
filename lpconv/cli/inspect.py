"""`lpconv inspect`."""

from typing import Annotated

from lpconv.cli.command import Json, Model, print_result
from lpconv.cli.progress import progress_for
from lpconv.errors import UnsupportedError, VerificationError
from lpconv.options import Option, Revision

_NAMED = 3  # problems in the error message; the output, and the details under --json, have all
_NOT_READ = "no error was found; inspect the unquantised checkpoint instead, or use the tool that wrote this one"


def inspect(
    model: Model,
    stats: Annotated[bool, Option("Also read the data: RMS, largest value, NaN and Inf of each tensor")] = False,
    every: Annotated[bool, Option("List all tensors, files and findings", flag="all")] = False,
    strict: Annotated[
        bool, Option("Also fail on warnings (exit code 5) and on weights that could not be checked (exit code 4)")
    ] = False,
    revision: Revision = None,
    json: Json = False,
) -> None:
    """Check the files of a checkpoint and list problems, warnings and contents.

    For a checkpoint that another tool quantised, the scales are read too: those that are inverted, missing, or unequal
    in weights that readers fuse are named.

    [bold]Examples[/bold]
      lpconv inspect bert-large
      lpconv inspect ./bert-large-unit-fp16 --stats --json
      lpconv inspect ./llama-nvfp4 --strict
    """
    from lpconv.inspect.headers import check_against_model, inspect as inspect_headers
    from lpconv.layouts import READ
    from lpconv.report.inspect import inspect_document
    from lpconv.results import to_json
    from lpconv.storage.checkpoint import Checkpoint
    from lpconv.storage.header import LFS_HINT, is_lfs_pointer

    checkpoint = Checkpoint.open(model, revision=revision)
    if stats:
        from lpconv.inspect.values import inspect_with_statistics

        with progress_for() as progress:
            record = inspect_with_statistics(checkpoint, progress)
    else:
        record = inspect_headers(checkpoint)
    record = check_against_model(record, checkpoint, thorough=stats or strict)
    if record.layout in READ and not stats:
        from lpconv.inspect.values import judge_scales  # imports torch (seconds)

        record = judge_scales(record, checkpoint)
    wrong = (*record.problems, *(record.warnings if strict else ()))
    is_unread = record.not_judged is not None and (strict or record.layout in READ)
    if not ((wrong or is_unread) and json):  # otherwise the error's details hold the result
        print_result(record, lambda result: inspect_document(result, every=every), json=json)
    if wrong:
        mend = "download the checkpoint again" + (", or report it to its author" if record.layout else "")
        if any(is_lfs_pointer(checkpoint.directory / name) for name in checkpoint.weight_files):
            mend = LFS_HINT
        hint = mend if record.problems else "only --strict refuses warnings; docs/layouts.md explains them"
        more = f"; and {len(wrong) - _NAMED} more" if len(wrong) > _NAMED else ""
        raise VerificationError("; ".join(wrong[:_NAMED]) + more, hint=hint, details=to_json(record))
    if is_unread:
        raise UnsupportedError(str(record.not_judged), hint=_NOT_READ, details=to_json(record))
