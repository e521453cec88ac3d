"""`lpconv report FOLDER`: list the runs in a folder, and write an index page for them.

Import this module lazily: it loads everything that renders pages.
"""

import os
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from lpconv.cli.command import print_result
from lpconv.cli.runs import ANY_RUN, RunKind, name_of, runs_in
from lpconv.errors import InputError
from lpconv.report.compare import RunEntry, index_document, run_names
from lpconv.report.document import Document, Table
from lpconv.report.html import html as html_page
from lpconv.storage.partfile import check_file, write_small


def write_page(html: str, document: Document) -> None:
    """Write the page of a document. Raises OutputExistsError for a directory, ResourceError if it cannot write."""
    check_file(Path(html))
    write_small(Path(html), html_page(document))


def show_folder(folder: Path, html: str | None, *, json: bool) -> None:
    """Print the runs in a folder; with `html`, write an index and a comparison page for each kind that has one."""
    runs = list(runs_in(folder))
    if not runs:
        raise InputError(f"neither `{folder}` nor its subfolders contain a run", hint=ANY_RUN)
    home = Path(html).parent if html is not None else folder
    entries = [_entry(kind, path, _line(kind, result), folder, home) for kind, path, result in runs]
    if html is not None:
        compared = _write_comparisons(runs, home / Path(html).stem)
        write_page(html, index_document(folder.resolve().name, entries, compared))
    rows = tuple((e.name, e.kind, e.what, e.found) for e in entries)
    print_result(entries, lambda _: Table(columns=("Run", "<Kind", "<What", "<Result"), rows=rows), json=json)


def _line(kind: RunKind, result: Any) -> tuple[str, str]:
    if isinstance(result, InputError):
        return "", f"cannot be shown: {result.message}"
    document = kind.document(result)
    return document.subtitle, document.verdict.text if document.verdict else ""


def _entry(kind: RunKind, path: Path, line: tuple[str, str], folder: Path, home: Path) -> RunEntry:
    page = path.parent / kind.page_file
    has_folder = kind.file is not None
    return RunEntry(
        name=os.path.relpath(path.parent if has_folder else path, folder),
        kind=kind.name,
        what=line[0],
        found=line[1],
        written=datetime.fromtimestamp(path.stat().st_mtime).astimezone().strftime("%Y-%m-%d %H:%M"),
        link=os.path.relpath(page, home) if has_folder and page.is_file() else None,
    )


def _write_comparisons(runs: Sequence[tuple[RunKind, Path, Any]], stem: Path) -> dict[str, str]:
    """Write a page `STEM-KIND.html` for each kind with several runs; returns file names by kind."""
    written = {}
    for kind in {k.name: k for k, _, _ in runs}.values():
        members = [(path, r) for k, path, r in runs if k is kind and not isinstance(r, InputError)]
        if len(members) > 1 and kind.compare is not None:
            names = run_names([name_of(path) for path, _ in members])
            written[kind.name] = f"{stem.name}-{kind.name.lower()}.html"
            write_page(str(stem.with_name(written[kind.name])), kind.compare([result for _, result in members], names))
    return written
