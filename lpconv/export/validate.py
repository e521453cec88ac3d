"""Compare an exported file with its model: checker, shape inference, and ONNX Runtime on fixed inputs."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx
import torch
from torch import Tensor

from lpconv.errors import InputError, VerificationError
from lpconv.export.options import PAST
from lpconv.export.trace import TracedCase
from lpconv.machine import out_of_memory
from lpconv.results import OnnxCheck


def check_graph(path: Path) -> None:
    """Run `onnx.checker` with strict shape inference on the file. Raises VerificationError with its message."""
    try:
        onnx.checker.check_model(str(path), full_check=True)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as e:
        raise VerificationError(
            f"the exported graph is not valid: {_first_line(e)}", hint="please report it with the model's config.json"
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
    options.log_severity_level = 3  # errors only; it warns about every initializer that it folds
    try:
        session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        outputs = [session.run(None, {k: v.numpy() for k, v in inputs.items()}) for inputs, _ in cases]
    except Exception as e:  # its exceptions have no common base class
        raise out_of_memory(e) or VerificationError(
            f"ONNX Runtime {onnxruntime.__version__} cannot run the file: {_first_line(e)}",
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


def _first_line(e: Exception) -> str:
    return next(iter(str(e).splitlines()), type(e).__name__)
