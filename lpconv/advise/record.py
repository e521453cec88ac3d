"""The folder of an advice: the record, a page about it, and the manifest that carries it out."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from lpconv.advise.manifest import MANIFEST, manifest_text
from lpconv.advise.options import ADVICE_FILE, AdviseOptions
from lpconv.checkpoint.contents import read_json
from lpconv.checkpoint.partfile import write_small
from lpconv.checkpoint.staging import Staging
from lpconv.errors import InputError
from lpconv.report.advise.html import html_advice
from lpconv.results import AdviceResult, from_json, json_text

PAGE = "advice.html"


def _write_advice(directory: Path, result: AdviceResult, options: AdviseOptions) -> None:
    """What is known so far, each file in one go. A manifest is there once anything is recommended."""
    write_small(directory / ADVICE_FILE, json_text(result))
    write_small(directory / PAGE, html_advice(result))
    advised = {(r.purpose, r.row) for r in result.recommendations}
    rows = [r for r in result.rows if (r.purpose, r.name) in advised]
    if rows:
        write_small(directory / MANIFEST, manifest_text(result.name, rows, options))


@contextmanager
def kept(
    directory: Path, options: AdviseOptions, show_partial: Callable[[AdviceResult], None]
) -> Iterator[Callable[[AdviceResult], None]]:
    """Yield what writes each result so far; the folder is published at the end.

    If the body is interrupted, the last result is published too, and goes to `show_partial`.
    """
    latest: list[AdviceResult] = []
    with Staging(directory, {"advise": directory.name}, force=options.force, marker=ADVICE_FILE) as staging:

        def keep(result: AdviceResult) -> None:
            latest[:] = [result]
            _write_advice(staging.directory, result, options)

        with staging.discarded_on_failure():
            try:
                yield keep
            except Exception:
                raise
            except BaseException:  # an interrupt
                for partial in latest:
                    staging.publish()
                    show_partial(partial)
                raise
            staging.publish()


def read_advice(path: Path) -> AdviceResult:
    """The record in a file; InputError where it is none."""
    document = read_json(path)
    if document.get("kind") != "advice":
        raise InputError(f"`{path}` is no advice", hint="pass an output of `lpconv advise`")
    return from_json(AdviceResult, document)
