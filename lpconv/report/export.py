"""An export on the terminal."""

from rich.console import Group, RenderableType
from rich.text import Text

from lpconv.report.numbers import duration_text, size_text
from lpconv.report.printable import printable_record
from lpconv.report.terminal import facts_grid, heading, note_list, section, table_of
from lpconv.results import ExportResult, OnnxCheck


def render_export(result: ExportResult) -> RenderableType:
    """What was written, in which forms the weights are stored, and how the file compares with the model."""
    result = printable_record(result)
    facts = {
        "Model": f"{result.architecture}, ONNX opset {result.opset}",
        "Inputs": _signature(result.inputs),
        "Outputs": _signature(result.outputs),
        "Files": ", ".join(f"{f.name} {size_text(f.size_bytes)}" for f in result.files),
        "Time": duration_text(result.seconds),
    }
    rows = ((w.form, str(w.num_tensors), size_text(w.size_bytes)) for w in result.weights)
    return Group(
        *heading(f"{result.source.name} → {result.output}"),
        facts_grid(facts),
        *section("Weights", table_of("Stored as", "Tensors", "Size", rows=rows)),
        *section("Validation", Text(_check(result.check))),
        *note_list("Warnings", result.warnings),
    )


def _signature(values: dict[str, tuple[str, ...]]) -> str:
    return ", ".join(f"{name} [{', '.join(axes)}]" for name, axes in values.items())


def _check(check: OnnxCheck | None) -> str:
    if check is None:
        return "not run"
    return (
        f"passed: {check.runtime} differs from PyTorch by at most {check.max_rel_diff:.2g} of the largest output "
        f"({check.tolerance:g} allowed) on {len(check.cases)} batches"
    )
