"""Documents and sentences of a conversion: what was done, what it cost and how it was verified; and comparisons."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import PurePath

from lpconv.formats.spec import CODED
from lpconv.layouts import LAYOUTS, SCHEMES
from lpconv.report.compare import compare_document
from lpconv.report.document import Block, Cell, Code, Document, Section, Table, Tile, Verdict, section, sections_of
from lpconv.report.numbers import (
    KEPT_KL,
    MISSING,
    change_text,
    count_text,
    duration_text,
    error_text,
    format_text,
    kl_text,
    plural,
    rate_text,
    share_text,
    size_text,
    sqnr_text,
    usual_sqnr,
)
from lpconv.report.tensor_charts import feedback_chart, flat_sqnr_text, rms_chart, sqnr_chart
from lpconv.report.tensors import (
    action_sections,
    converted_tensors,
    in_layer_order,
    layer_section,
    listed_tensors,
    lowest_sqnr,
    nothing_converted,
    num_elements,
    output_errors,
    tensor_section,
    tokens_per_expert,
    tokens_text,
    worst_table,
    worst_tensors,
)
from lpconv.report.verify import outcome_of, outputs_tile, verification_section, verify_headline
from lpconv.results import ConvertResult, FileRecord, LogitsCheck, PartResult, PlanResult, TensorRecord

_SHARDS, _WORST = 8, 10  # most files and tensors shown on a terminal
_METHODS = {"unit": "unit scaling", "scalify": "Scalify", "collage": "Collage", "multipoint": "Multipoint"}
# Figures that differ between runs of the same conversion.
RUN_FIGURES = frozenset({"time", "speed", "peak memory"})


def convert_document(result: ConvertResult) -> Document:
    """Actions, savings and losses of a conversion, its verification, and how to open the output."""
    listed = listed_tensors(result.tensors)
    flat = flat_sqnr_text(converted_tensors(result.tensors))
    return Document(
        kind="conversion",
        title=PurePath(result.output).name or result.output,
        subtitle=f"{result.source.name} → {result.output}: {form_name(result)}",
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
            section("Lowest signal-to-noise", worst_table(result.tensors, _WORST), only="terminal"),
            layer_section(result.tensors),
            tensor_section(result, listed),
            section("How to open it", *opening_blocks(result, result.output)),
            _provenance_section(result),
            section("", f"Report: {result.output}/report.html", only="terminal"),
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
        **_time_facts(plan),
    }
    if plan.side_files:
        facts["Copied as is"] = f"{plural(len(plan.side_files), 'file')}: {', '.join(plan.side_files)}"
    formats = {t.format for t in converted_tensors(plan.tensors)}
    nothing = nothing_converted(formats, plan.format, verb="would be")
    return Document(
        kind="plan",
        verdict=Verdict(
            outcome="not run", text=nothing or f"would be {_change_words(plan.bytes.read, plan.bytes.written)}"
        ),
        title=f"{plan.source.name} → {plan.output}",
        summary=f"Plan with method {plan.method}, format: {format_text(plan.format)}. Nothing was written.",
        facts=facts,
        sections=sections_of(*action_sections(plan.tensors), files_section(plan.shards)),
        warnings=plan.warnings,
    )


def _time_facts(plan: PlanResult) -> dict[str, str]:
    """The estimated time; for error feedback from measured layers, with their memory."""
    total, measured = f"about {duration_text(plan.seconds)}", plan.measured
    if measured is None:
        return {"Time": "not known; --measure rounds the first layer to estimate it" if plan.seconds is None else total}
    layers = measured.layer_seconds
    each = " to ".join(dict.fromkeys(duration_text(limit(layers)) for limit in (min, max)))
    opening = duration_text(measured.opening_seconds)
    return {
        "Time": f"{total}, with {plural(len(layers), 'layer')} of {each} after {opening} of opening",
        "Measured": f"{plural(measured.num_measured, 'layer')}, peak memory {size_text(measured.peak_rss_bytes)}",
    }


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
    return f"{size_text(before)} → {size_text(after)} ({_change_words(before, after)})"


def _change_words(before: int, after: int) -> str:
    share = f", {share_text(after, before)} of the source" if before > 0 else ""
    return f"{change_text(before, after)}{share}"


def files_section(files: Sequence[FileRecord]) -> Section | None:
    """Files with their sizes; a terminal shows only the first ones."""
    rows = tuple((f.name, size_text(f.size_bytes)) for f in files)
    return section("Files", Table(columns=("File", "Size"), rows=rows, has_names=True, most=_SHARDS))


def _tiles(result: ConvertResult) -> tuple[Tile, ...]:
    read, written = result.bytes.read, result.bytes.written
    size = f"from {size_text(read)}: {_change_words(read, written)}"
    changed, rate = converted_tensors(result.tensors), rate_text(read + written, result.weights_seconds)
    total = f"of {plural(len(result.tensors), 'tensor')}"
    return (
        Tile(label="Weights", figure=size_text(written), detail=size),
        Tile(label="Tensors converted", figure=count_text(len(changed)), detail=total),
        _sqnr_tile(result, changed),
        outputs_tile(result.verify),
        *_feedback_tile(result),
        Tile(label="Time", figure=duration_text(result.seconds), detail=f"{rate} read and written"),
        Tile(label="Peak memory", figure=size_text(result.peak_rss_bytes), detail="peak RSS of the process"),
    )


def _sqnr_tile(result: ConvertResult, changed: Sequence[TensorRecord]) -> Tile:
    label, worst = "Lowest SQNR of a tensor", worst_tensors(changed, 1)
    if worst:
        detail = f"{worst[0].name}{usual_sqnr(f'{worst[0].format} {scale_words(result)}')}"
        return Tile(label=label, figure=sqnr_text(worst[0].sqnr_db, " dB"), detail=detail)
    if any(t.sqnr_db is not None for t in changed):
        return Tile(label=label, figure="exact", detail="every converted tensor")
    return Tile(label=label, figure=MISSING, detail="not measured")


def _feedback_tile(result: ConvertResult) -> tuple[Tile, ...]:
    """How much of the output error of layers error feedback removed; empty without it."""
    errors = output_errors(t.rounding for t in result.tensors)
    if errors is None:
        return ()
    detail = f"{share_text(errors[1], 1)} instead of {share_text(errors[0], 1)} to nearest"
    return (Tile(label="Output error removed", figure=share_text(errors[0] - errors[1], errors[0]), detail=detail),)


def opening_blocks(result: ConvertResult, path: str) -> tuple[Block, ...]:
    """Python code that opens an output, without lpconv unless it is in its own layout, and what to type to serve it."""
    layout, granularity = str(result.options.get("layout", "lpconv")), str(result.options.get("granularity"))
    known = LAYOUTS.get(layout, LAYOUTS["transformers"])  # a report may be of another version
    file = "/".join(filter(None, (path, known.file)))
    auto = auto_class(result.architecture)
    lines = tuple(line.format(auto=auto, path=file) for line in known.python)
    fits = (result.format == f and granularity.startswith(g) for f, g in known.served)
    is_served = auto == "AutoModelForCausalLM" and any(fits)
    serving = ("To serve it with vLLM:", Code(lines=(f"vllm serve {path}",)))
    return Code(lines=lines, language="python"), *(serving if is_served else ())


# Encoder-decoder families of text; most other models ForConditionalGeneration also read images.
_SEQ2SEQ = ("T5", "T5Gemma", "Bart", "Pegasus", "Blenderbot", "M2M100", "NllbMoe", "LED")
# Suffixes of class names in config.json's `architectures`, with the auto class that builds them.
_AUTO_CLASSES = {
    "ForCausalLM": "AutoModelForCausalLM",
    "LMHeadModel": "AutoModelForCausalLM",
    "ForImageClassification": "AutoModelForImageClassification",
    "ForMaskedLM": "AutoModelForMaskedLM",
    "WhisperForConditionalGeneration": "AutoModelForSpeechSeq2Seq",
    **{f"{name}ForConditionalGeneration": "AutoModelForSeq2SeqLM" for name in _SEQ2SEQ},
    "ForConditionalGeneration": "AutoModelForImageTextToText",
    "ForSequenceClassification": "AutoModelForSequenceClassification",
    "ForTokenClassification": "AutoModelForTokenClassification",
    "ForQuestionAnswering": "AutoModelForQuestionAnswering",
}


def auto_class(architecture: str | None) -> str:
    """The auto class of transformers that builds an architecture."""
    return next((auto for end, auto in _AUTO_CLASSES.items() if (architecture or "").endswith(end)), "AutoModel")


def _provenance_section(result: ConvertResult) -> Section | None:
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
    given = {name: value for name, value in sorted(result.options.items()) if value not in (None, "", [], ())}
    facts |= {f"Option {name}": _option_text(value) for name, value in given.items()}
    files = [("source", f) for f in result.source.files] + [("output", f) for f in result.files]
    rows = tuple((f.name, part, size_text(f.size_bytes), f.sha256 or "not read") for part, f in files)
    table = Table(columns=("File", "<Part", "Size", "<SHA-256"), rows=rows, has_names=True)
    return section("Where it came from", facts, table, only="page")


def _option_text(value: object) -> str:
    if isinstance(value, (list, tuple)):
        return ", ".join(map(_option_text, value))
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)


def form_name(result: ConvertResult) -> str:
    """What was written: a scheme of a third-party layout or a method, the format, and further settings that matter."""
    is_foreign, is_finer = result.options.get("layout", "lpconv") != "lpconv", result.has_finer_scales
    alike = (n for n, s in SCHEMES.items() if s.layout and s.options.items() <= result.options.items()
             and s.calibrated == has_input_scales(result))  # fmt: skip
    is_told = result.method != "unit" or not (is_foreign or is_finer)
    method = " + ".join(_METHODS.get(part, part) for part in result.method.split("+")) if is_told else ""
    return ", ".join(filter(None, (
        next(alike, method), format_words(result), scale_words(result) if is_foreign or is_finer else "",
        f"{result.residual} residual" if result.residual else "",
        "error feedback" if output_errors(t.rounding for t in result.tensors) else "",
    )))  # fmt: skip


def format_words(result: ConvertResult) -> str:
    """The number format, or the bits per integer of one that is entropy-coded."""
    bits = result.options.get("budget_bits")
    return f"integers of {bits:g} bits" if result.format == CODED.name and bits is not None else result.format


def headline(result: ConvertResult) -> str:
    """The verdict of the verification, the change of size and the number of warnings, in one line."""
    verdict, size = verify_headline(result.verify), change_text(result.bytes.read, result.bytes.written)
    warned = f"; {plural(len(result.warnings), 'warning')}" if result.warnings else ""
    return verdict if outcome_of(result.verify) == "failed" else f"{verdict}; weights {size}{warned}"


def summary(result: ConvertResult) -> str:
    """The whole result as one paragraph that can be quoted."""
    verdict, read, written = verify_headline(result.verify), result.bytes.read, result.bytes.written
    size = f"The weights went from {size_text(read)} to {size_text(written)} ({change_text(read, written)})."
    return f"{conversion_summary(result)} {size} {verdict[:1].upper()}{verdict[1:]}."


def conversion_summary(result: ConvertResult) -> str:
    """Sentences on the actions, the errors of the weights, and the source of input scales."""
    sentences = (
        _done_sentence(result),
        _error_sentence(result),
        _feedback_sentence(result),
        f"Input scales are stored in the file, calibrated on {_text_words(result)}."
        if has_input_scales(result)
        else "",
    )
    return " ".join(filter(None, sentences))


def _done_sentence(result: ConvertResult) -> str:
    """A sentence on the model, the method, and what was done to its tensors."""
    model = result.source.name + (f" ({result.architecture})" if result.architecture else "")
    changed = converted_tensors(result.tensors)
    formats = " or ".join(sorted({format_text(t.format) for t in changed}) or [format_text(result.format)])
    kept = sum(t.action == "keep" for t in result.tensors)
    tied = sum(t.action == "tie" for t in result.tensors)
    parts = [f"{count_text(len(changed))} of {plural(len(result.tensors), 'tensor')} became {formats}"]
    on_grid = sum(t.on_grid for t in result.tensors)
    if on_grid:
        verb = "is" if on_grid == 1 else "are"
        parts.append(f"{count_text(on_grid)} of these had such values already and {verb} kept exactly")
    if kept:
        parts.append(f"{count_text(kept)} kept {'its' if kept == 1 else 'their'} original bits")
    if tied:
        parts.append(f"{plural(tied, 'tied weight')} {'is' if tied == 1 else 'are'} stored once")
    return f"{model} was rewritten as {form_name(result)}: {', '.join(parts)}."


def has_input_scales(result: ConvertResult) -> bool:
    """Whether the files have input scales."""
    return result.calibration is not None and any(
        not n.endswith(("k_scale", "v_scale")) for n in result.calibration.absmax
    )


def _text_words(result: ConvertResult) -> str:
    """Name and length of the calibration text: "8,192 tokens of plays.txt"."""
    assert result.calibration is not None
    return f"{count_text(result.calibration.num_tokens)} tokens of {result.calibration.text}"


def _feedback_sentence(result: ConvertResult) -> str:
    """Mean output errors with error feedback and to nearest; empty without error feedback."""
    errors = output_errors(t.rounding for t in result.tensors)
    if errors is None:
        return ""
    before, after = errors
    tokens = tokens_per_expert({t.name: t.rounding for t in converted_tensors(result.tensors)})
    return (
        f"Error feedback on {_text_words(result)} removed {share_text(before - after, before)} of the error of layer "
        f"outputs: on average {share_text(after, 1)} of their squared size is lost, and {share_text(before, 1)} by "
        "rounding to nearest. It lowers the signal-to-noise ratio of weights in return."
        + (f" The text has {tokens_text(tokens)}." if tokens and all(tokens.values()) else "")  # else a warning says it
    )


def scale_words(result: ConvertResult) -> str:
    """Description of the scale granularity."""
    if result.method == "multipoint":
        return "one scale per row and point"
    known = {"tensor": "one scale per tensor", "row": "one scale per row"}
    granularity = str(result.options.get("granularity", "tensor"))
    of_group = f"one scale per {granularity.removeprefix('group:')} elements"
    return known.get(granularity, of_group if granularity.startswith("group:") else f"{granularity} scales")


def _error_sentence(result: ConvertResult) -> str:
    """The worst error, and the number of elements outside of the format's range; empty if nothing was measured."""
    changed = converted_tensors(result.tensors)
    measured = [t for t in changed if t.sqnr_db is not None]
    if not measured:
        return ""
    worst = worst_tensors(measured, 1)
    if not worst:
        return "Every measured tensor equals its source exactly."
    ratio = f"The lowest signal-to-noise ratio of a tensor is {sqnr_text(worst[0].sqnr_db, ' dB')} in {worst[0].name}"
    return f"{ratio}{usual_sqnr(f'{worst[0].format} {scale_words(result)}')}; {_range_words(changed)}."


def _range_words(changed: Sequence[TensorRecord]) -> str:
    elements = sum(map(num_elements, changed))
    saturated = sum(t.num_saturated for t in changed)
    flushed = sum(t.num_flushed for t in changed)
    if not saturated and not flushed:
        return "no element exceeded the format's range"
    clipped = f"{plural(saturated, 'element')} saturated" if saturated else "no element saturated"
    zeroed = f"{count_text(flushed)} ({share_text(flushed, elements)}) became zero" if flushed else "none became zero"
    return f"{clipped} and {zeroed}"


def compare_conversions(results: Sequence[ConvertResult], names: Sequence[str]) -> Document:
    """Several conversions: the SQNR of every tensor in one chart, and their figures side by side."""
    charts = [sqnr_chart([(name, converted_tensors(r.tensors)) for name, r in zip(names, results, strict=True)])]
    charts += [rms_chart(r, f"{name}: weight RMS") for name, r in zip(names, results, strict=True)]
    verdicts = [Verdict(outcome=outcome_of(r.verify), text=summary(r)) for r in results]
    sound = [(name, r) for name, r in zip(names, results, strict=True) if outcome_of(r.verify) == "passed"]
    choice, table = _choice(sound), _sqnr_section(results, names)
    return compare_document(names, list(map(figures, results)), verdicts, charts=charts, table=table, choice=choice)


def _choice(sound: Sequence[tuple[str, ConvertResult]]) -> str:
    """Which of the verified conversions of a model to choose, and why; empty for different models."""
    if len({r.source.name for _, r in sound}) != 1:
        return ""
    kls = {name: r.verify.logits.mean_kl for name, r in sound if r.verify.logits and r.verify.logits.is_text}
    sizes = {name: r.bytes.written for name, r in sorted(sound, key=lambda named: named[1].bytes.written)}
    smallest = next(iter(sizes))
    if len(known := {name: kl for name, kl in kls.items() if kl is not None}) < len(sizes):
        how = "`lpconv verify OUT --against MODEL --data FILE` compares it"
        return (
            f"{smallest} is the smallest ({size_text(sizes[smallest])}), but quality on text is not known of all: {how}"
        )
    kept = [name for name in sizes if known[name] <= KEPT_KL]
    if not kept:
        best = min(known, key=known.__getitem__)
        return f"None keeps its outputs on text; nearest is {best}: KL {kl_text(known[best])}"
    name = kept[0]
    size, kl = size_text(sizes[name]), kl_text(known[name])
    return f"Choose {name}, the smallest ({size}) that keeps its outputs on text: KL {kl}"


def figures(result: ConvertResult) -> dict[str, str]:
    """The figures for comparing conversions; a dash if a conversion does not have one."""
    return {label: value(result) for label, value in _FIGURES.items()}


def _sqnr_section(results: Sequence[ConvertResult], names: Sequence[str]) -> Section | None:
    by_name = [{t.name: t for t in converted_tensors(r.tensors)} for r in results]
    cells = [
        {n: Cell(text=f"{t.format}, {sqnr_text(t.sqnr_db)}", sort=t.sqnr_db) for n, t in run.items()} for run in by_name
    ]
    tensors = in_layer_order({name: t for run in by_name for name, t in run.items()}.values())
    table = Table(
        columns=("Tensor", *names),
        rows=tuple((t.name, *(run.get(t.name, MISSING) for run in cells)) for t in tensors),
        has_names=True,
        sortable=True,
        filter="attention",
    )
    return section("SQNR of every tensor, dB", table, only="page")


def _granularity(r: ConvertResult) -> str:
    return "row and point" if r.method == "multipoint" else str(r.options.get("granularity", MISSING))


def _median_sqnr(r: ConvertResult) -> float | None:
    measured = [t.sqnr_db for t in converted_tensors(r.tensors) if t.sqnr_db is not None]
    return statistics.median(measured) if measured else None


def _logits(r: ConvertResult, read: Callable[[LogitsCheck], str]) -> str:
    """A figure of outputs on text, or of bit-equal ones; others say nothing about quality."""
    logits = r.verify.logits
    return read(logits) if logits and (logits.is_text or logits.bit_equal) and not logits.skipped else MISSING


_FIGURES: dict[str, Callable[[ConvertResult], str]] = {
    "source": lambda r: r.source.name,
    "form": form_name,
    "format": format_words,
    "granularity": lambda r: MISSING if r.residual else _granularity(r),
    "layout": lambda r: str(r.options.get("layout", MISSING)),
    "size before": lambda r: size_text(r.bytes.read),
    "size after": lambda r: size_text(r.bytes.written),
    "change": lambda r: change_text(r.bytes.read, r.bytes.written),
    "tensors converted": lambda r: count_text(len(converted_tensors(r.tensors))),
    "tensors kept": lambda r: count_text(sum(t.action == "keep" for t in r.tensors)),
    "smallest SQNR, dB": lambda r: sqnr_text(lowest_sqnr(converted_tensors(r.tensors))),
    "median SQNR, dB": lambda r: sqnr_text(_median_sqnr(r)),
    "elements saturated": lambda r: count_text(sum(t.num_saturated for t in r.tensors)),
    "elements to zero": lambda r: count_text(sum(t.num_flushed for t in r.tensors)),
    "outputs compared on": lambda r: _logits(r, lambda c: c.inputs or MISSING),
    "outputs bit-equal": lambda r: _logits(r, lambda c: {True: "yes", False: "no", None: MISSING}[c.bit_equal]),
    "outputs rel. error": lambda r: _logits(r, lambda c: error_text(c.rel_error)),
    "same top prediction": lambda r: _logits(r, lambda c: share_text(c.top1_agreement, 1)),
    "KL": lambda r: _logits(r, lambda c: MISSING if c.mean_kl is None else kl_text(c.mean_kl)),
    "verification": lambda r: outcome_of(r.verify),
    "time": lambda r: duration_text(r.seconds),
    "speed": lambda r: rate_text(r.bytes.read + r.bytes.written, r.weights_seconds),
    "peak memory": lambda r: size_text(r.peak_rss_bytes),
    "warnings": lambda r: count_text(len(r.warnings)),
}
