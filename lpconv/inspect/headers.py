"""Inspect a checkpoint from headers and config, without torch or data: its contents, and defects of quantised ones.

`layouts/defects.py` judges quantised checkpoints; `values.py` also reads the scales.
"""

import dataclasses
from collections.abc import Iterable, Sequence

from lpconv.errors import InputError, LpconvError, UnsupportedError, problem_text
from lpconv.forms import Headers
from lpconv.layouts.defects import Findings, from_headers
from lpconv.layouts.headers import check_unwrapped, recognise, why_unreadable
from lpconv.models.whole import compare_with_model, known_shapes
from lpconv.report.numbers import code_list
from lpconv.results import DtypeRecord, FileRecord, InspectResult, StoredTensor, TensorRecord, from_json
from lpconv.storage.checkpoint import Checkpoint, Openable
from lpconv.storage.contents import is_rival
from lpconv.storage.header import TensorInfo
from lpconv.storage.staging import read_marker

VALUES = "values of the weights (--stats)"  # listed as not checked until they are read

InFiles = Sequence[tuple[TensorInfo, str]]


def inspect(model: Openable) -> InspectResult:
    """Dtypes, shapes, sizes, scales, ties and defects of a checkpoint. Defects are recorded, not raised, if possible.

    Raises InputError if there is no checkpoint, and for `.bin` checkpoints, whose headers are pickles.
    """
    checkpoint = Checkpoint.open(model)
    if checkpoint.kind == "torch":
        raise InputError(
            f"`{checkpoint.directory}` contains pickles, which have no header to read",
            hint="`lpconv inspect --stats` opens them with weights_only=True",
        )
    stored, problems = _read_headers(checkpoint)
    of_index = _index_findings(checkpoint, stored)
    return describe(checkpoint, stored, found=Findings(problems=tuple(problems)) + of_index)


def describe(checkpoint: Checkpoint, stored: InFiles, *, found: Findings) -> InspectResult:
    """The record of a checkpoint, given its tensors and their files, and what was `found` in these.

    Codes and their scales count as one tensor.
    """
    provenance = read_marker(checkpoint.directory)
    records = from_json(tuple[TensorRecord, ...], provenance.get("tensors", []))
    entries = {info.name: (info, file) for info, file in stored}
    headers = Headers.of(checkpoint.config, {name: info for name, (info, _) in entries.items()})
    check_unwrapped(headers.root)
    forms = recognise(headers)
    not_judged = why_unreadable(headers)
    findings = found if not_judged else found + from_headers(headers, forms)
    ignored = checkpoint.ignored_files
    rivals, others = [n for n in ignored if is_rival(n)], [n for n in ignored if not is_rival(n)]
    not_read = (f"neither lpconv nor transformers reads {code_list(rivals)}",) if rivals else ()
    of_others = (f"files for other programs: {code_list(others)}",) if others else ()
    scales = {t.name: t.scale for t in records if t.scale is not None}
    coded = [form for form in forms.values() if form.format is not None and form.format.is_narrow]
    return InspectResult(
        path=checkpoint.origin.name,
        architecture=next(iter(checkpoint.config.get("architectures") or ()), None),
        method=provenance.get("method"),
        format=provenance.get("format"),
        layout=headers.quantised_by,
        bits_per_weight=8 * sum(f.num_bytes for f in coded) / sum(f.num_elements for f in coded) if coded else None,
        dtypes=_dtypes([info for info, _ in stored]),
        shards=tuple(
            FileRecord(name=f, size_bytes=(checkpoint.directory / f).stat().st_size) for f in checkpoint.weight_files
        ),
        ties={t.name: t.tied_to for t in records if t.tied_to},
        tensors=tuple(
            StoredTensor(
                name=name,
                dtype=entries[form.data[0].name][0].dtype,
                shape=form.shape,
                file=entries[form.data[0].name][1],
                size_bytes=form.num_bytes,
                stored_as=None if form.format is None else form.words,
                scale=scales.get(name),
            )
            for name, form in forms.items()
        ),
        problems=findings.problems,
        warnings=(*findings.warnings, *not_read),
        checked=("headers", *(["index"] if checkpoint.weight_map is not None else [])),
        not_checked=(*_unread_parts(headers.quantised_by), *of_others),
        not_judged=not_judged,
    )


def _unread_parts(layout: str | None) -> tuple[str, ...]:
    """Checks that headers do not allow. "scales" comes first and is removed once `judge_scales` has read them."""
    scales = {None: (), "lpconv": ("codes and scales (`lpconv verify`)",)}.get(layout, ("scales",))
    return (*scales, *([] if layout == "lpconv" else [VALUES]))


def check_against_model(record: InspectResult, checkpoint: Checkpoint, *, thorough: bool) -> InspectResult:
    """Add a comparison of names and shapes with the model described by config.json, if nothing else is wrong.

    Only shapes of known families are computed directly; other models are built only if `thorough`, since importing
    transformers takes seconds.
    """
    what = "names and shapes against config.json"
    why = " (--strict)" if not thorough and known_shapes(checkpoint.config) is None else ""
    try:
        is_wrong = record.problems or record.not_judged is not None
        fit = None if is_wrong or why else compare_with_model(checkpoint, {t.name: t.shape for t in record.tensors})
    except UnsupportedError as e:
        fit, why = None, f": {e.message}"
    if fit is None:
        return dataclasses.replace(record, not_checked=(*record.not_checked, what + why))
    warnings = (*record.warnings, *fit.warnings)
    return dataclasses.replace(record, problems=fit.problems, warnings=warnings, checked=(*record.checked, what))


def _read_headers(checkpoint: Checkpoint) -> tuple[list[tuple[TensorInfo, str]], list[str]]:
    stored: list[tuple[TensorInfo, str]] = []
    problems: list[str] = []
    file_of: dict[str, str] = {}
    for file in checkpoint.weight_files:
        try:
            header = checkpoint.read_header(file)
        except LpconvError as e:
            problems.append(problem_text(e))
            continue
        for info in header.tensors.values():
            if info.name in file_of:
                problems.append(f"tensor `{info.name}` is in `{file_of[info.name]}` and in `{file}`")
            file_of[info.name] = file
            stored.append((info, file))
    return stored, problems


def _index_findings(checkpoint: Checkpoint, stored: InFiles) -> Findings:
    """Contradictions between index and files. Tensors that the index does not name are read all the same."""
    if checkpoint.weight_map is None:
        return Findings()
    stored_in, named = {info.name: file for info, file in stored}, checkpoint.weight_map
    moved = [n for n, file in named.items() if n in stored_in and stored_in[n] != file]
    lost, more = [n for n in named if n not in stored_in], [n for n in stored_in if n not in named]
    wrong = {"names other files for": moved, "names, but no file contains,": lost}
    return Findings(
        problems=tuple(f"the index {what} {code_list(names)}" for what, names in wrong.items() if names),
        warnings=(f"the index does not name {code_list(more)}",) if more else (),
    )


def _dtypes(infos: Iterable[TensorInfo]) -> tuple[DtypeRecord, ...]:
    table: dict[str, list[TensorInfo]] = {}
    for info in infos:
        table.setdefault(info.dtype, []).append(info)
    return tuple(
        DtypeRecord(
            dtype=dtype,
            num_tensors=len(members),
            num_elements=sum(i.num_elements for i in members),
            size_bytes=sum(i.num_bytes for i in members),
        )
        for dtype, members in sorted(table.items(), key=lambda it: -sum(i.num_bytes for i in it[1]))
    )
