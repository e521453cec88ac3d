"""`lpconv export onnx` as a library call: cheap checks first, before torch and transformers are imported."""

from pathlib import Path

from lpconv.errors import ResourceError, check_installed
from lpconv.export.options import ExportOptions, check_has_cache, choose_opset, oldest_opset
from lpconv.layouts.reader import open_readable
from lpconv.options import check
from lpconv.progress import Progress, Silent
from lpconv.results import ExportResult
from lpconv.storage.checkpoint import Openable
from lpconv.storage.staging import check_free


def export_onnx(
    model: Openable, output: Path, options: ExportOptions, *, progress: Progress | None = None
) -> ExportResult:
    """Export a checkpoint into the directory `output`, which is published only after all checks have passed.

    `model` is anything that `convert` accepts, or an output of it. Weights keep their stored format. Raises an
    `LpconvError` for every failure that is not a bug; VerificationError if the file's outputs differ from the model's
    by more than the tolerance.
    """
    check(options)
    _check_name(output)
    checkpoint = open_readable(model, revision=options.revision)
    checkpoint.check_apart(output)
    check_free(output, force=options.force)
    if options.cache:
        check_has_cache(checkpoint.config)
    opset = choose_opset(options.opset, oldest=oldest_opset(checkpoint))
    packages = ("onnx", "onnx-ir", "onnxscript", *(["onnxruntime"] if options.validate else []))
    check_installed("exporting to ONNX", *packages, extra="onnx")
    from lpconv.export.write import export  # imports torch and transformers (seconds)

    return export(checkpoint, output, options, opset, progress or Silent())


def _check_name(output: Path) -> None:
    """Raise ResourceError for a path that is not valid UTF-8, which ONNX libraries cannot write to."""
    try:
        str(output.absolute()).encode()
    except UnicodeEncodeError as e:
        raise ResourceError(
            "ONNX files cannot be written to a folder whose path is not UTF-8", hint="choose another --output"
        ) from e
