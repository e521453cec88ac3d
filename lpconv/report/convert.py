"""Documents of a conversion: what was done, what it saved, what it cost in accuracy, and how it was verified."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import PurePath

from lpconv.report.convert_tables import action_sections, layer_section, listed_tensors, tensor_section, worst_section
from lpconv.report.convert_words import conversion_summary, has_input_scales, headline, method_name
from lpconv.report.document import Code, Document, Facts, Section, Table, Tile, Verdict, section, sections_of
from lpconv.report.numbers import (
    MISSING,
    change_text,
    count_text,
    duration_text,
    error_text,
    plural,
    rate_text,
    share_text,
    size_text,
    sqnr_text,
)
from lpconv.report.tensor_charts import feedback_chart, flat_sqnr_text, rms_chart, sqnr_chart
from lpconv.report.tensors import converted_tensors, nothing_converted, output_errors, worst_tensors
from lpconv.report.verify import outcome_of, verification_section
from lpconv.results import ConvertResult, FileRecord, PartResult, PlanResult, TensorRecord

_SHARDS = 8  # most files shown on a terminal


def convert_document(result: ConvertResult) -> Document:
    """What was done, saved and lost, how the output was verified, and how to open it."""
    listed = listed_tensors(result.tensors)
    flat = flat_sqnr_text(converted_tensors(result.tensors))
    residual = f", {result.residual} residual" if result.residual else ""
    form = f"{method_name(result.method)}, {result.format}{residual}"
    return Document(
        kind="conversion",
        title=PurePath(result.output).name or result.output,
        subtitle=f"{result.source.name} → {result.output}: {form}",
        verdict=Verdict(outcome=outcome_of(result.verify), text=headline(result)),
        summary=conversion_summary(result),
        tiles=_tiles(result),
        warnings=result.warnings,
        sections=sections_of(
            section("", feedback_chart(result.tensors)),
            section("", None if flat else sqnr_chart([(result.output, converted_tensors(listed))])),
            verification_section(result.verify),
            section("", rms_chart(replace(result, tensors=listed))),
            section("Signal-to-noise ratios", flat, only="page"),
            *action_sections(result.tensors),
            worst_section(result.tensors),
            layer_section(result.tensors),
            tensor_section(result, listed),
            _opening_section(result),
            _provenance_section(result),
            section("", f"Report with charts: {result.output}/report.html", only="terminal"),
        ),
        command=result.command,
        versions=result.versions,
    )


def plan_document(plan: PlanResult) -> Document:
    """The plan of a conversion: what it would write and the resources that it needs."""
    facts = {
        "Size": _size_change(plan.bytes.read, plan.bytes.written),
        "Disk": f"{size_text(plan.disk_bytes)} needed, {size_text(plan.disk_free_bytes)} free",
        "Memory": f"{size_text(plan.memory_bytes)} with {plural(plan.workers, 'worker')}",
        "Time": f"about {duration_text(plan.seconds)}",
    }
    if plan.side_files:
        facts["Copied as is"] = f"{plural(len(plan.side_files), 'file')}: {', '.join(plan.side_files)}"
    nothing = nothing_converted({t.format for t in converted_tensors(plan.tensors)}, plan.format)
    return Document(
        kind="plan",
        verdict=Verdict(outcome="not run", text=nothing) if nothing else None,
        title=f"{plan.source.name} → {plan.output}",
        summary=f"Plan for {method_name(plan.method)} in {plan.format}. Nothing was written.",
        facts=facts,
        sections=sections_of(*action_sections(plan.tensors), files_section(plan.shards)),
        warnings=plan.warnings,
    )


def part_document(result: PartResult) -> Document:
    """What one worker wrote, and the remaining steps."""
    files = tuple(f for s in result.shards for f in s.files)
    empty = "The plan has fewer files than parts, so this part has none; use a smaller --max-shard-size."
    return Document(
        kind="part",
        title=f"Part {result.part}/{result.parts} of {result.output}",
        summary="The output is published once all parts exist and --finish has combined them." if files else empty,
        facts={
            "Size": _size_change(result.bytes.read, result.bytes.written),
            "Time": duration_text(result.seconds),
            "Peak memory": size_text(result.peak_rss_bytes),
        },
        sections=sections_of(files_section(files)),
    )


def _size_change(before: int, after: int) -> str:
    share = f", {share_text(after, before)} of the source" if before > 0 else ""
    return f"{size_text(before)} → {size_text(after)} ({change_text(before, after)}{share})"


def files_section(files: Sequence[FileRecord]) -> Section | None:
    """Files with their sizes; a terminal shows only the first ones."""
    rows = tuple((f.name, size_text(f.size_bytes)) for f in files)
    return section("Files", Table(columns=("File", "Size"), rows=rows, has_names=True, most=_SHARDS))


def _tiles(result: ConvertResult) -> tuple[Tile, ...]:
    read, written = result.bytes.read, result.bytes.written
    share = f", {share_text(written, read)} of the source" if read > 0 else ""
    size = f"from {size_text(read)}: {change_text(read, written)}{share}"
    changed, rate = converted_tensors(result.tensors), rate_text(read + written, result.weights_seconds)
    total = f"of {plural(len(result.tensors), 'tensor')}"
    return (
        Tile(label="Weights", figure=size_text(written), detail=size),
        Tile(label="Tensors converted", figure=count_text(len(changed)), detail=total),
        _sqnr_tile(changed),
        _outputs_tile(result),
        *_feedback_tile(result),
        Tile(label="Time", figure=duration_text(result.seconds), detail=f"{rate} read and written"),
        Tile(label="Peak memory", figure=size_text(result.peak_rss_bytes), detail="peak RSS of the process"),
    )


def _sqnr_tile(changed: Sequence[TensorRecord]) -> Tile:
    label, worst = "Lowest SQNR of a tensor", worst_tensors(changed, 1)
    if worst:
        return Tile(label=label, figure=sqnr_text(worst[0].sqnr_db, " dB"), detail=worst[0].name)
    if any(t.sqnr_db is not None for t in changed):
        return Tile(label=label, figure="exact", detail="every converted tensor")
    return Tile(label=label, figure=MISSING, detail="not measured")


def _outputs_tile(result: ConvertResult) -> Tile:
    label, logits = "Model outputs", result.verify.logits
    if logits is None or logits.skipped:
        return Tile(label=label, figure=MISSING, detail=(logits.skipped if logits else None) or "not compared")
    if logits.bit_equal:
        return Tile(label=label, figure="bit-equal", detail="to the source's")
    as_they_are = ", inputs not rounded" if has_input_scales(result) else ""
    detail = f"relative error to the source's{as_they_are}"
    return Tile(label=label, figure=error_text(logits.rel_error), detail=detail)


def _feedback_tile(result: ConvertResult) -> tuple[Tile, ...]:
    """How much of the output error of layers error feedback removed; empty without it."""
    errors = output_errors(t.rounding for t in result.tensors)
    if errors is None:
        return ()
    detail = f"{share_text(errors[1], 1)} instead of {share_text(errors[0], 1)} to nearest"
    return (Tile(label="Output error removed", figure=share_text(errors[0] - errors[1], errors[0]), detail=detail),)


def _opening_section(result: ConvertResult) -> Section | None:
    layout = str(result.options.get("layout", "lpconv"))
    if layout == "lpconv":
        lines: tuple[str, ...] = ("import lpconv", f"model = lpconv.load({result.output!r})")
    else:
        lines = opening_lines(layout, result.architecture, result.output)
    return section("How to open it", Code(lines=lines, language="python"))


def opening_lines(layout: str, architecture: str | None, path: str) -> tuple[str, ...]:
    """Python code that opens an output in a third-party layout without lpconv."""
    if layout == "mlx":
        return ("from mlx_lm import load", f"model, tokenizer = load({path!r})")
    if layout == "gguf":
        return ("from llama_cpp import Llama", f"model = Llama({path + '/model.gguf'!r})")
    auto = auto_class(architecture)
    return (f"from transformers import {auto}", f"model = {auto}.from_pretrained({path!r})")


# Suffixes of class names in config.json's `architectures`, with the auto class that builds them.
_AUTO_CLASSES = {
    "ForCausalLM": "AutoModelForCausalLM",
    "LMHeadModel": "AutoModelForCausalLM",
    "ForMaskedLM": "AutoModelForMaskedLM",
    "ForConditionalGeneration": "AutoModelForSeq2SeqLM",
    "ForSequenceClassification": "AutoModelForSequenceClassification",
    "ForTokenClassification": "AutoModelForTokenClassification",
    "ForQuestionAnswering": "AutoModelForQuestionAnswering",
}


def auto_class(architecture: str | None) -> str:
    """The auto class of transformers that builds an architecture."""
    return next((auto for end, auto in _AUTO_CLASSES.items() if (architecture or "").endswith(end)), "AutoModel")


def _provenance_section(result: ConvertResult) -> Section | None:
    files = [("source", f) for f in result.source.files] + [("output", f) for f in result.files]
    rows = tuple((f.name, part, size_text(f.size_bytes), f.sha256 or "not read") for part, f in files)
    table = Table(columns=("File", "<Part", "Size", "<SHA-256"), rows=rows, has_names=True)
    return section("Where it came from", Facts(values=_provenance(result)), table, only="page")


def _provenance(result: ConvertResult) -> Mapping[str, str]:
    facts = {
        "Source": result.source.name,
        "Resolved to": result.source.resolved,
        "Revision": result.source.revision or MISSING,
        "Architecture": result.architecture or MISSING,
        "Output": result.output,
        "Copied as is": ", ".join(result.side_files) or MISSING,
    }
    if (calibration := result.calibration) is not None:
        windows = f"{count_text(calibration.num_tokens)} tokens in windows of {calibration.seq_len}"
        facts["Calibrated on"] = f"{calibration.text}, {windows}, SHA-256 {calibration.sha256}"
    return facts | {f"Option {name}": _option_text(value) for name, value in sorted(result.options.items())}


def _option_text(value: object) -> str:
    """The value of an option as text; a dash if there is none."""
    if isinstance(value, (list, tuple)):
        return ", ".join(map(_option_text, value)) or MISSING
    if isinstance(value, bool):
        return "yes" if value else "no"
    return MISSING if value is None or value == "" else str(value)
