"""Write an export: trace the model, store the weights in their form, validate, publish."""

import contextlib
import dataclasses
import json
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import torch
from torch import Tensor

from lpconv.errors import InputError, VerificationError, first_line
from lpconv.export.options import MAX_INLINE_BYTES, PAST, ExportOptions
from lpconv.export.rewrite import StoredWeight, rewrite, stored_weights
from lpconv.export.trace import TracedCase, open_traceable, open_with_cache, trace
from lpconv.machine import out_of_memory
from lpconv.models.whole import check_complete
from lpconv.plan.files import copy_side_files, plain_config, write_sums
from lpconv.plan.provenance import public_source, versions
from lpconv.progress import Progress
from lpconv.report.numbers import code_list
from lpconv.results import ExportResult, FileRecord, OnnxCheck, SourceRecord, ordered_json_text, to_json
from lpconv.storage.checkpoint import Checkpoint
from lpconv.storage.partfile import write_small, writing
from lpconv.storage.place import sha256_of
from lpconv.storage.staging import MARKER, Staging, read_marker
from lpconv.version import __version__

MODEL_FILE = "model.onnx"
_DATA_FILE = "model.onnx.data"


def export(
    checkpoint: Checkpoint, output: Path, options: ExportOptions, opset: int, progress: Progress
) -> ExportResult:
    """Export a checkpoint into the directory `output`; raises as `export_onnx` does."""
    started = time.perf_counter()
    checkpoint.check_promised()
    watched = checkpoint.watch()
    check_complete(checkpoint, allow_missing=options.allow_missing)
    identity = {"export": checkpoint.origin.name, "opset": opset}
    with Staging(output, identity, force=options.force) as staging, _keep_rejected(staging):
        source = checkpoint.record(lambda name: sha256_of(checkpoint.directory / name))
        result = _write_model(staging.directory, source, checkpoint, options, opset, progress)
        result = dataclasses.replace(result, output=str(output), seconds=time.perf_counter() - started)
        _write_side_files(staging.directory, checkpoint, result)
        watched.check()
        staging.publish()
    return result


def _write_model(
    folder: Path, source: SourceRecord, checkpoint: Checkpoint, options: ExportOptions, opset: int, progress: Progress
) -> ExportResult:
    """Write the graph and check it. The record lacks the output's name and the time."""
    provenance = read_marker(checkpoint.directory)
    progress.start("opening the model", 0)
    opened = open_with_cache(checkpoint) if options.cache else open_traceable(checkpoint)
    if options.validate:
        check_comparable(opened.cases)
    progress.start("tracing the graph", 0)
    graph = trace(opened, opset=opset)
    progress.start("storing the weights", 0)
    weights, unmatched, decoded = rewrite(graph, opened.parameters, stored_weights(checkpoint))
    _describe(graph, source, checkpoint)
    files = _save(graph, folder, external=options.external_data)
    cases = opened.cases
    result = ExportResult(
        source=source,
        output="",
        architecture=type(opened.model).__name__,
        method=provenance.get("method"),
        format=provenance.get("format"),
        opset=opset,
        inputs={v.name or "": _axes(v) for v in graph.graph.inputs},
        outputs={v.name or "": _axes(v) for v in graph.graph.outputs},
        weights=weights,
        files=files,
        check=None,
        seconds=0.0,
        versions=versions(),
        warnings=_warnings(opened.missing, unmatched, decoded),
    )
    del graph, opened  # each holds a copy of the weights, and ONNX Runtime needs the memory
    progress.start("validating", 0)
    return dataclasses.replace(result, check=_check(folder / MODEL_FILE, cases, options))


@contextlib.contextmanager
def _keep_rejected(staging: Staging) -> Iterator[None]:
    """Keep a file that fails its validation as OUT.failed."""
    try:
        yield
    except VerificationError as e:
        # The rejected folder carries a marker with the error, so that the next run may replace it.
        write_small(staging.directory / MARKER, ordered_json_text({"format_version": 1, "error": e.to_dict()}))
        rejected = staging.set_aside()
        hint = f"the rejected file is in `{rejected}`" + (f"; {e.hint}" if e.hint else "")
        raise VerificationError(e.message, hint=hint, details=e.details) from e


def _describe(graph: ir.Model, source: SourceRecord, checkpoint: Checkpoint) -> None:
    """Write the file's origin into its metadata, without local paths."""
    public, provenance = public_source(source), read_marker(checkpoint.directory)
    graph.producer_name, graph.producer_version = "lpconv", __version__
    origin = provenance.get("source") or {}
    facts = {
        "source": public.resolved,
        "revision": public.revision,
        "source_sha256": json.dumps({f.name: f.sha256 for f in public.files}),
        "method": provenance.get("method"),
        "format": provenance.get("format"),
        "converted_from": origin.get("resolved"),
        "version": __version__,
    }
    graph.metadata_props.update({f"lpconv.{k}": str(v) for k, v in facts.items() if v is not None})


def _save(graph: ir.Model, directory: Path, *, external: bool) -> tuple[FileRecord, ...]:
    """Save the graph, with the weights in a separate file if `external` or too large for a protobuf file."""
    size = sum(v.const_value.nbytes for v in graph.graph.initializers.values() if v.const_value is not None)
    beside = _DATA_FILE if external or size > MAX_INLINE_BYTES else None
    with writing(directory / MODEL_FILE):
        ir.save(graph, directory / MODEL_FILE, external_data=beside)
    paths = [directory / name for name in (MODEL_FILE, beside) if name is not None and (directory / name).exists()]
    return tuple(FileRecord(name=p.name, size_bytes=p.stat().st_size, sha256=sha256_of(p)) for p in paths)


def _axes(value: ir.Value) -> tuple[str, ...]:
    """Names of dynamic axes and sizes of fixed ones."""
    assert value.shape is not None
    return tuple(str(d.value if isinstance(d, ir.SymbolicDim) else d) for d in value.shape)


def _warnings(missing: Sequence[str], unmatched: Sequence[str], decoded: Sequence[StoredWeight]) -> tuple[str, ...]:
    warnings = []
    random = [n for n in unmatched if n in missing]
    if random:
        warnings.append(f"not in the checkpoint, so filled with random numbers: {code_list(random)}")
    merged = [n for n in unmatched if n not in missing]
    if merged:
        warnings.append(f"in fp32, because no stored tensor has exactly these values: {code_list(merged)}")
    if decoded:
        names, words = [w.name for w in decoded], decoded[0].decoded_from
        warnings.append(f"in fp32, because ONNX operators cannot decode {words}: {code_list(names)}")
    return tuple(warnings)


def _check(path: Path, cases: Sequence[TracedCase], options: ExportOptions) -> OnnxCheck | None:
    check_graph(path)
    if not options.validate:
        return None
    check = compare_with_torch(path, cases, tolerance=options.tolerance)
    if not check.passed:
        raise VerificationError(
            f"outputs differ by {check.max_rel_diff:.2g} of the largest output; {check.tolerance:g} is allowed",
            hint="allow more with --tolerance",
            details=to_json(check),
        )
    return check


def _write_side_files(directory: Path, checkpoint: Checkpoint, result: ExportResult) -> None:
    """Write tokenizer and other side files, the config of the decoded model, and the provenance (without times)."""
    copy_side_files(directory, checkpoint)
    write_small(directory / "config.json", ordered_json_text(plain_config(checkpoint)))
    public = dataclasses.replace(result, source=public_source(result.source))
    document = {k: v for k, v in to_json(public).items() if k not in ("output", "seconds")}
    write_small(directory / MARKER, ordered_json_text({"format_version": 1, **document}))
    write_sums(directory, result.files)


def check_graph(path: Path) -> None:
    """Run `onnx.checker` with strict shape inference on the file. Raises VerificationError with its message."""
    try:
        onnx.checker.check_model(str(path), full_check=True)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as e:
        raise VerificationError(
            f"the exported graph is not valid: {first_line(e)}", hint="please report it with the model's config.json"
        ) from e


def check_comparable(cases: Sequence[TracedCase]) -> None:
    """Raise InputError if the model's own outputs are NaN, which equals no output of the file."""
    if any(output.isnan().any() for _, outputs in cases for output in outputs):
        raise InputError(
            "the model's outputs are NaN, so those of the exported file cannot be compared with them",
            hint="check with `lpconv inspect --stats` whether the weights are finite, or pass --no-validate",
        )


def compare_with_torch(path: Path, cases: Sequence[TracedCase], *, tolerance: float) -> OnnxCheck:
    """Run the file on the inputs of each case and compare with PyTorch's outputs.

    Raises VerificationError if ONNX Runtime cannot open or run the file. A difference beyond `tolerance` is not raised
    but recorded.
    """
    import onnxruntime  # needs the onnx extra

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4  # its errors are raised too, and it warns about every initializer that it folds
    try:
        session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        outputs = [session.run(None, {k: v.numpy() for k, v in inputs.items()}) for inputs, _ in cases]
    except Exception as e:  # its exceptions have no common base class
        raise out_of_memory(e) or VerificationError(
            f"ONNX Runtime {onnxruntime.__version__} cannot run the file: {first_line(e)}",
            hint="try another --opset, or pass --no-validate to write the file for another runtime",
        ) from e
    pairs = [zip(wanted, got, strict=True) for (_, wanted), got in zip(cases, outputs, strict=True)]
    differences = [_differences(*pair) for case in pairs for pair in case]
    return OnnxCheck(
        runtime=f"onnxruntime {onnxruntime.__version__}",
        cases=tuple(_shapes(inputs) for inputs, _ in cases),
        max_abs_diff=max(absolute for absolute, _ in differences),
        max_rel_diff=max(relative for _, relative in differences),
        tolerance=tolerance,
    )


def _differences(wanted: Tensor, got: np.ndarray) -> tuple[float, float]:
    """(max |y - ŷ|, the same over max |y|) for elements that are finite on both sides; inf if finiteness differs."""
    y, z = wanted.double(), torch.from_numpy(got).double()
    if y.shape != z.shape or not torch.equal(torch.isfinite(y), torch.isfinite(z)):
        return math.inf, math.inf
    finite = torch.isfinite(y)
    if not finite.any():
        return 0.0, 0.0
    absolute, largest = float((y - z)[finite].abs().max()), float(y[finite].abs().max())
    return absolute, absolute / largest if largest else absolute


def _shapes(inputs: Mapping[str, Tensor]) -> str:
    """Sizes of the inputs; keys and values have the same sizes in each layer, and the mask follows from the others."""
    skipped = ("attention_mask", "position_ids")
    shapes = {name: list(x.shape) for name, x in inputs.items() if name not in skipped}
    return ", ".join(f"{n} {s}" for n, s in shapes.items() if not n.startswith(PAST) or n == f"{PAST}0.key")
