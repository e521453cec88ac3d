"""Sentences about a conversion: what was done, what it cost and how it was verified."""

from collections.abc import Iterable, Sequence

from lpconv.report.numbers import (
    change_text,
    count_text,
    plural,
    share_text,
    size_text,
    sqnr_text,
)
from lpconv.report.tensors import converted_tensors, has_finer_scales, num_elements, output_errors, worst_tensors
from lpconv.report.verify import outcome_of, verify_headline
from lpconv.results import ConvertResult, TensorRecord

_METHODS = {"unit": "unit scaling", "scalify": "Scalify", "collage": "Collage", "multipoint": "Multipoint"}


def method_name(method: str) -> str:
    """The method's name in its paper; parts of a compound (``unit+collage``) are translated one by one."""
    return " + ".join(_METHODS.get(part, part) for part in method.split("+"))


def headline(result: ConvertResult) -> str:
    """The verdict of the verification and the change of size, in one line."""
    verdict, size = verify_headline(result.verify), change_text(result.bytes.read, result.bytes.written)
    return verdict if outcome_of(result.verify) == "failed" else f"{verdict}; weights {size}"


def summary(result: ConvertResult) -> str:
    """The whole result as one paragraph that can be quoted."""
    verdict = verify_headline(result.verify)
    return f"{conversion_summary(result)} {_size_sentence(result)} {verdict[:1].upper()}{verdict[1:]}."


def conversion_summary(result: ConvertResult) -> str:
    """What was done, what it cost the weights, and where input scales come from."""
    sentences = (
        _done_sentence(result),
        _error_sentence(result.tensors),
        _feedback_sentence(result),
        _inputs_sentence(result),
    )
    return " ".join(filter(None, sentences))


def _done_sentence(result: ConvertResult) -> str:
    """A sentence on the model, the method, and what was done to its tensors."""
    model = result.source.name + (f" ({result.architecture})" if result.architecture else "")
    return f"{model} was rewritten with {_done_words(result)}."


def _done_words(result: ConvertResult) -> str:
    changed = len(converted_tensors(result.tensors))
    kept = sum(t.action == "keep" for t in result.tensors)
    tied = sum(t.action == "tie" for t in result.tensors)
    parts = [f"{count_text(changed)} of {plural(len(result.tensors), 'tensor')} became {_stored_form(result)}"]
    on_grid = sum(t.on_grid for t in result.tensors)
    if on_grid:
        verb = "is" if on_grid == 1 else "are"
        parts.append(f"{count_text(on_grid)} of these had such values already and {verb} kept exactly")
    if kept:
        parts.append(f"{count_text(kept)} kept {'its' if kept == 1 else 'their'} original bits")
    if tied:
        parts.append(f"{plural(tied, 'tied weight')} {'is' if tied == 1 else 'are'} stored once")
    return f"{method_name(result.method)}: {', '.join(parts)}"


def has_input_scales(result: ConvertResult) -> bool:
    """Whether the files have input scales. Comparisons of a conversion do not apply them."""
    return result.calibration is not None and any(
        not n.endswith(("k_scale", "v_scale")) for n in result.calibration.absmax
    )


def _text_words(result: ConvertResult) -> str:
    """Name and length of the calibration text: "8,192 tokens of plays.txt"."""
    assert result.calibration is not None
    return f"{count_text(result.calibration.num_tokens)} tokens of {result.calibration.text}"


def _inputs_sentence(result: ConvertResult) -> str:
    """The source of input scales, and the error that was not measured; empty without input scales."""
    if not has_input_scales(result):
        return ""
    return (
        f"Input scales are stored in the file, calibrated on {_text_words(result)}. Comparisons here do not quantise "
        "inputs, which costs extra accuracy."
    )


def _feedback_sentence(result: ConvertResult) -> str:
    """Mean output errors with error feedback and to nearest; empty without error feedback."""
    errors = output_errors(t.rounding for t in result.tensors)
    if errors is None:
        return ""
    before, after = errors
    return (
        f"Error feedback on {_text_words(result)} removed {share_text(before - after, before)} of the error of layer "
        f"outputs: on average {share_text(after, 1)} of their squared size is lost, and {share_text(before, 1)} by "
        "rounding to nearest."
    )


def _stored_form(result: ConvertResult) -> str:
    changed = converted_tensors(result.tensors)
    formats = sorted({t.format for t in changed}) or [result.format]
    if result.residual:
        return f"{' or '.join(formats)} plus {'an' if result.residual[0] in 'aei' else 'a'} {result.residual} residual"
    if any(t.points for t in changed):
        return f"{' or '.join(formats)} codes, with one scale per row and point"
    scaled = has_finer_scales(result) or any(t.scale is not None for t in changed)
    return f"{' or '.join(formats)}{f' codes with {scale_words(result)}' if scaled else ''}"


def scale_words(result: ConvertResult) -> str:
    """Description of the scale granularity."""
    known = {"tensor": "one scale per tensor", "row": "one scale per row"}
    granularity = str(result.options.get("granularity", "tensor"))
    return known.get(granularity, f"scales of granularity {granularity}")


def _size_sentence(result: ConvertResult) -> str:
    read, written = result.bytes.read, result.bytes.written
    return f"The weights went from {size_text(read)} to {size_text(written)} ({change_text(read, written)})."


def _error_sentence(tensors: Iterable[TensorRecord]) -> str:
    """The worst error, and the number of elements outside of the format's range; empty if nothing was measured."""
    changed = converted_tensors(tensors)
    measured = [t for t in changed if t.sqnr_db is not None]
    if not measured:
        return ""
    worst = worst_tensors(measured, 1)
    if not worst:
        return "Every measured tensor equals its source exactly."
    ratio = f"The lowest signal-to-noise ratio of a tensor is {sqnr_text(worst[0].sqnr_db, ' dB')} ({worst[0].name})"
    return f"{ratio}; {_range_words(changed)}."


def _range_words(changed: Sequence[TensorRecord]) -> str:
    elements = sum(map(num_elements, changed))
    saturated = sum(t.num_saturated for t in changed)
    flushed = sum(t.num_flushed for t in changed)
    if not saturated and not flushed:
        return "no element exceeded the format's range"
    clipped = f"{plural(saturated, 'element')} saturated" if saturated else "no element saturated"
    zeroed = f"{count_text(flushed)} ({share_text(flushed, elements)}) became zero" if flushed else "none became zero"
    return f"{clipped} and {zeroed}"


def error_causes(t: TensorRecord) -> str:
    """Causes of error besides rounding: "3 saturated", "0.06 % to zero", "nothing"."""
    causes = []
    if t.num_nan or t.num_inf:
        causes.append(f"{count_text(t.num_nan + t.num_inf)} NaN or Inf in the source")
    if t.num_saturated:
        causes.append(f"{count_text(t.num_saturated)} saturated")
    if t.num_flushed:
        causes.append(f"{share_text(t.num_flushed, num_elements(t))} to zero")
    return ", ".join(causes) or "nothing"
