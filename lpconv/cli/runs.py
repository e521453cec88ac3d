"""The runs that `lpconv report` shows: how each kind is found, read, shown and compared, and the index of a folder.

Import this module lazily: it loads everything that renders pages. Reading a probe imports torch.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from lpconv.advise.options import ADVICE_FILE
from lpconv.advise.record import PAGE, read_advice
from lpconv.bench.outcome import read_bench
from lpconv.cli.command import print_result, write_page
from lpconv.errors import InputError, UsageError
from lpconv.lookup import missing_directory
from lpconv.probe.options import PROBE_FILE
from lpconv.report.advise import advice_document
from lpconv.report.bench import bench_document, compare_benches
from lpconv.report.compare import RunEntry, index_document, run_names
from lpconv.report.convert import compare_conversions, convert_document
from lpconv.report.document import Document, Table
from lpconv.report.finetune import compare_finetunes, finetune_document
from lpconv.report.probe import probe_document
from lpconv.report.verify import verify_document
from lpconv.results import ConvertResult, FinetuneResult, ProbeReport, Verification, from_json
from lpconv.storage.contents import read_json
from lpconv.train.folder import REPORT

CONVERSIONS, PROBES = "Conversions", "Probes"
ANY_RUN = "pass an output of `convert`, `finetune`, `bench`, `probe` or `advise`"  # hint if a path holds no run

_DEPTH = 3  # nesting of folders that are searched for runs


@dataclass(frozen=True, kw_only=True)
class RunKind:
    """One kind of run.

    Files of the kind have `kind` as their JSON key of that name (None: any). They are called `file` within a folder, or
    with None have any name. `document` renders one result, and `compare`, if set, several results under their names;
    `page_file` is the page that the command wrote.
    """

    name: str
    kind: str | None
    file: str | None
    read: Callable[[Path], Any]
    document: Callable[[Any], Document]
    compare: Callable[[Sequence[Any], Sequence[str]], Document] | None = None
    page_file: str = "report.html"


def find_run(run: str | Path) -> tuple[RunKind, Path] | None:
    """The kind of the run in a folder or file, and the file with its result; None if it holds no run."""
    for kind in _KINDS:
        path = Path(run) / kind.file if kind.file and Path(run).is_dir() else Path(run)
        if _is_json(path) and (kind.kind is None or _document(path).get("kind") == kind.kind):
            return kind, path
    return None


def one_kind(runs: Sequence[str]) -> tuple[RunKind, list[Path]]:
    """The kind and the files of some runs. Raises InputError for a path without a run, UsageError for mixed kinds."""
    kinds: dict[str, RunKind] = {}
    paths = []
    for run in runs:
        found = find_run(run)
        if found is None and not os.path.exists(run):
            raise missing_directory(Path(run), hint=ANY_RUN)
        if found is None:
            raise InputError(f"`{Path(run)}` has no report.json", hint=ANY_RUN)
        kinds[found[0].name] = found[0]
        paths.append(found[1])
    if len(kinds) > 1:
        raise UsageError(f"{' and '.join(kinds)} cannot be compared".lower(), hint="pass runs of the same kind")
    return next(iter(kinds.values())), paths


def name_of(path: Path) -> str:
    """Display name of a run: its folder, or its file if a folder may hold many."""
    return path.resolve().parent.name if path.name in (REPORT, PROBE_FILE, ADVICE_FILE) else path.stem


def runs_in(folder: Path, depth: int = _DEPTH) -> Iterator[tuple[RunKind, Path, Any]]:
    """The runs below a folder, sorted by name: (kind, file, result, or the error raised by reading it).

    Folders inside a run are not searched.
    """
    for path in sorted(folder.iterdir()):
        if path.is_dir() and not path.is_symlink() and not path.name.startswith("."):
            runs = list(_read_run(path))
            yield from runs if runs or depth == 1 else runs_in(path, depth=depth - 1)
        elif path.suffix == ".json":
            yield from (run for run in _read_run(path) if run[0].file is None)


def _read_run(path: Path) -> Iterator[tuple[RunKind, Path, Any]]:
    """Yield the run at a path, if there is one."""
    kind: RunKind = _KINDS[-1]
    try:
        run = find_run(path)
        if run is not None:
            kind, file = run
            yield kind, file, kind.read(file)
    except InputError as e:
        yield kind, path / REPORT, e


def ask_probe(path: Path, format: str | None = None) -> ProbeReport:
    """Read a probe and assess one format, or the usual ones."""
    from lpconv.probe.advice import DEFAULT_FORMATS, answer  # imports torch
    from lpconv.probe.record import read_probe

    return answer(read_probe(path), [format] if format else DEFAULT_FORMATS)


def _is_json(path: Path) -> bool:
    """Whether a file should be JSON: by its suffix, or else by its first byte."""
    if path.suffix == ".json" or not path.is_file():
        return path.is_file()
    try:
        with path.open("rb") as f:
            return f.read(1) == b"{"
    except OSError:
        return True  # reading the file will raise the error


def _document(path: Path) -> dict[str, Any]:
    """The JSON document in a file. For a failed verification, the result is in the details of the error."""
    document = read_json(path)
    error = document.get("error")
    details = error.get("details") if isinstance(error, dict) else None
    return details if isinstance(details, dict) else document


def _read_conversion(path: Path) -> ConvertResult:
    """Read the conversion in a file. Raises InputError that describes any other lpconv document."""
    document = read_json(path)
    error = document.get("error")
    if isinstance(error, dict):
        raise InputError(f"`{path}` records the error of a command: {error.get('message')}", hint=ANY_RUN)
    if document.get("kind") not in (None, "convert") or not {"source", "tensors"} <= document.keys():
        kind = f", but of kind `{document['kind']}`" if "kind" in document else ""
        raise InputError(f"`{path}` is not the record of a run{kind}", hint=ANY_RUN)
    return from_json(ConvertResult, document)


# Conversions last: any other report.json is read as one, and rejected then if it is none.
_KINDS = (
    RunKind(name="Advice", kind="advice", file=ADVICE_FILE, read=read_advice, document=advice_document, page_file=PAGE),
    RunKind(name="Benches", kind="bench", file=None, read=read_bench, document=bench_document, compare=compare_benches),
    RunKind(name=PROBES, kind="probe", file=PROBE_FILE, read=ask_probe, document=probe_document),
    RunKind(
        name="Fine-tunings", kind="finetune", file=REPORT, read=lambda path: from_json(FinetuneResult, read_json(path)),
        document=finetune_document, compare=compare_finetunes,
    ),
    RunKind(
        name="Verifications", kind="verify", file=None, read=lambda path: from_json(Verification, _document(path)),
        document=verify_document,
    ),
    RunKind(
        name=CONVERSIONS, kind=None, file=REPORT, read=_read_conversion, document=convert_document,
        compare=compare_conversions,
    ),
)  # fmt: skip


def show_folder(folder: Path, html: str | None, *, json: bool) -> None:
    """Print the runs in a folder; with `html`, write an index and a comparison page for each kind that has one."""
    runs = list(runs_in(folder))
    if not runs:
        raise InputError(f"neither `{folder}` nor its subfolders contain a run", hint=ANY_RUN)
    home = Path(html).parent if html is not None else folder
    entries = [_entry(kind, path, result, folder, home) for kind, path, result in runs]
    if html is not None:
        compared = _write_comparisons(runs, home / Path(html).stem)
        write_page(html, index_document(folder.resolve().name, entries, compared))
    rows = tuple((e.name, e.kind, e.what, e.found) for e in entries)
    print_result(entries, lambda _: Table(columns=("Run", "<Kind", "<What", "<Result"), rows=rows), json=json)


def _entry(kind: RunKind, path: Path, result: Any, folder: Path, home: Path) -> RunEntry:
    if isinstance(result, InputError):
        what, found = "", f"cannot be shown: {result.message}"
    else:
        document = kind.document(result)
        what, found = document.subtitle, document.verdict.text if document.verdict else ""
    page = path.parent / kind.page_file
    has_folder = kind.file is not None
    return RunEntry(
        name=os.path.relpath(path.parent if has_folder else path, folder),
        kind=kind.name,
        what=what,
        found=found,
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
