"""`lpconv export onnx` as a library call: its light checks, before torch and transformers are imported."""

from pathlib import Path

from lpconv.errors import ResourceError
from lpconv.export.options import ExportOptions, choose_opset, has_fp8, require_packages
from lpconv.forms.reader import open_readable
from lpconv.options import check
from lpconv.progress import Progress, Silent
from lpconv.results import ExportResult
from lpconv.storage.checkpoint import Openable
from lpconv.storage.staging import check_apart, check_free


def export_onnx(
    model: Openable, output: Path, options: ExportOptions, *, progress: Progress | None = None
) -> ExportResult:
    """Export a checkpoint into the directory `output`, which appears only when everything has passed.

    `model` is what `convert` takes, or an output of it. The weights stay in the format they are stored in. Raises an
    `LpconvError` for every failure that is not a bug; VerificationError where the file's outputs differ from the
    model's by more than the tolerance.
    """
    check(options)
    _check_name(output)
    checkpoint = open_readable(model, revision=options.revision)
    check_apart(checkpoint.directory, output)
    check_free(output, force=options.force)
    opset = choose_opset(options.opset, has_fp8=has_fp8(checkpoint))
    require_packages("onnxscript", *(["onnxruntime"] if options.validate else []))
    from lpconv.export.write import export  # torch and transformers, which take seconds to import, from here on

    return export(checkpoint, output, options, opset, progress or Silent())


def _check_name(output: Path) -> None:
    """Raise ResourceError for a place that the libraries of ONNX cannot name, where a conversion could be written."""
    try:
        str(output.absolute()).encode()
    except UnicodeEncodeError as e:
        raise ResourceError(
            "no ONNX file can be written below a folder whose name is not UTF-8", hint="choose another --output"
        ) from e
