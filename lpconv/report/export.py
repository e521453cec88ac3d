"""The document of an export: what was written, and how the file compares with the model."""

import re

from lpconv.report.document import Document, Table, Verdict, section, sections_of
from lpconv.report.numbers import duration_text, size_text
from lpconv.results import ExportResult, OnnxCheck


def export_document(result: ExportResult) -> Document:
    """Files written, storage of the weights, and the comparison of the file with the model."""
    rows = tuple((w.form, str(w.num_tensors), size_text(w.size_bytes)) for w in result.weights)
    return Document(
        kind="export",
        title=f"{result.source.name} → {result.output}",
        verdict=_verdict(result.check),
        facts={
            "Model": f"{result.architecture}, ONNX opset {result.opset}",
            "Inputs": _signature(result.inputs),
            "Outputs": _signature(result.outputs),
            "Files": ", ".join(f"{f.name} {size_text(f.size_bytes)}" for f in result.files),
            "Time": duration_text(result.seconds),
        },
        sections=sections_of(section("Weights", Table(columns=("Stored as", "Tensors", "Size"), rows=rows))),
        warnings=result.warnings,
    )


def _signature(values: dict[str, tuple[str, ...]]) -> str:
    """Names and axes; keys and values of all layers as one name each."""
    by_name = {re.sub(r"\.\d+\.", ".N.", name): axes for name, axes in values.items()}
    return ", ".join(f"{name} [{', '.join(axes)}]" for name, axes in by_name.items())


def _verdict(check: OnnxCheck | None) -> Verdict:
    if check is None:
        return Verdict(outcome="not run", text="The file was not compared with the model")
    comparison = (
        f"{check.runtime} differs from PyTorch by at most {check.max_rel_diff:.2g} of the largest output "
        f"({check.tolerance:g} allowed) on {len(check.cases)} batches"
    )
    if check.passed:
        return Verdict(outcome="passed", text=f"validation passed, {comparison}")
    return Verdict(outcome="failed", text=f"validation failed, {comparison}")
