"""`lpconv export onnx` as a library call: cheap checks first, before torch and transformers are imported."""

from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

from lpconv.errors import ResourceError, UnsupportedError, UsageError, check_installed
from lpconv.export.options import NO_CACHE_HINT, ExportOptions, integer_grid
from lpconv.forms import Headers
from lpconv.layouts.headers import recognise
from lpconv.layouts.reader import open_readable
from lpconv.options import check
from lpconv.progress import Progress, Silent
from lpconv.results import ExportResult
from lpconv.storage.checkpoint import Checkpoint, Openable
from lpconv.storage.source import open_source
from lpconv.storage.staging import check_free

# The lowest opset of torch's exporter, and the first ones in which DequantizeLinear accepts fp8, and int4 and groups.
_OLDEST_OPSET = 18
_FP8_OPSET = 19
_INTEGERS_OPSET = 21
_FLOAT8_DTYPES = {"F8_E4M3", "F8_E5M2"}
_DECODERS = ("ForCausalLM", "LMHeadModel")
_LAYERS_WITH_KEYS = {"full_attention", "sliding_attention", "chunked_attention"}


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
        _check_has_cache(checkpoint.config)
    opset = _choose_opset(options.opset, oldest=_oldest_opset(checkpoint))
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


def _check_has_cache(config: Mapping[str, Any]) -> None:
    """Raise UnsupportedError if config.json tells that the model is not a decoder with keys and values in each layer.

    `cache.open_with_cache` knows more models, but imports transformers.
    """
    name = (config.get("architectures") or ["the model"])[0]
    if config.get("is_encoder_decoder") or not str(name).endswith(_DECODERS):
        raise UnsupportedError(f"`{name}` is not a decoder, so it has no cache", hint=NO_CACHE_HINT)
    kinds = config.get("layer_types")
    others = sorted({str(kind) for kind in kinds} - _LAYERS_WITH_KEYS) if isinstance(kinds, list) else []
    if others:
        raise UnsupportedError(
            f"`{name}` has layers of type `{others[0]}`, which keep more than keys and values", hint=NO_CACHE_HINT
        )


def _oldest_opset(checkpoint: Checkpoint) -> int:
    """The oldest opset that has the formats of a checkpoint. Reads headers only."""
    with closing(open_source(checkpoint)) as source:
        headers = {name: entry.info for name, entry in source.entries.items()}
    if any(integer_grid(form) for form in recognise(Headers.of(checkpoint.config, headers)).values()):
        return _INTEGERS_OPSET
    return _FP8_OPSET if any(info.dtype in _FLOAT8_DTYPES for info in headers.values()) else _OLDEST_OPSET


def _choose_opset(wanted: int | None, *, oldest: int) -> int:
    """The opset to export with. Raises UsageError if `wanted` is older than the contents of the file allow."""
    if wanted is None:
        return oldest
    if wanted < oldest:
        why = "is older than what torch writes"
        if wanted >= _OLDEST_OPSET:
            why = "has no fp8" if oldest == _FP8_OPSET else "has no integers with a scale per group"
        raise UsageError(f"opset {wanted} {why}", hint=f"pass --opset {oldest} or higher, or leave it out")
    return wanted
