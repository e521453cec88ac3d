"""A conversion in sentences: what was done, what it cost and how it was checked. Shared by all the renderers."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from lpconv.report.convert.grouping import DoneGroup, converted, num_elements, worst_tensors
from lpconv.report.numbers import (
    change_text,
    count_text,
    error_text,
    listed,
    number_text,
    plural,
    scale_text,
    share_text,
    size_text,
    sqnr_text,
)
from lpconv.results import ConvertResult, FilesCheck, HashCheck, LogitsCheck, TensorRecord, VerifyResult, WeightsCheck

OUTCOME = {True: "passed", False: "failed", None: "not run"}
_METHODS = {"unit": "unit scaling", "scalify": "Scalify", "collage": "Collage", "multipoint": "Multipoint"}


@dataclass(frozen=True, kw_only=True)
class Check:
    """One step of the verification. `passed` is None where it was not run."""

    name: str
    passed: bool | None
    text: str


def method_name(method: str) -> str:
    """The method as its paper calls it; parts of a compound (``unit+collage``) are named one by one."""
    return " + ".join(_METHODS.get(part, part) for part in method.split("+"))


def headline(result: ConvertResult) -> str:
    """The verdict of the verification and the change of size, in one line."""
    v, size = result.verify, change_text(result.bytes.read, result.bytes.written)
    word = verdict(v)
    if word == "failed":
        return f"Verification failed: {listed(_reasons(v))}"
    if word == "not run":
        return f"Not verified; weights {size}"
    if v.logits is None or v.logits.skipped:
        return f"Verified by its {'weights' if v.weights else 'hashes'}; weights {size}"
    top1 = v.logits.top1_agreement
    first = "" if v.logits.bit_equal or top1 is None else f", the same first choice at {percent(top1)} of positions"
    return f"Verified: {_logits_found(v.logits)}{first}; weights {size}"


def summary(result: ConvertResult) -> str:
    """The whole result as one paragraph that a person can quote."""
    sentences = (
        _done_sentence(result),
        size_sentence(result),
        _error_sentence(result.tensors),
        verify_sentence(result.verify),
        inputs_sentence(result),
    )
    return " ".join(s for s in sentences if s)


def _done_sentence(result: ConvertResult) -> str:
    """Which model, by which method, and what became of its tensors."""
    model = result.source.name + (f" ({result.architecture})" if result.architecture else "")
    return f"{model} was rewritten with {done_words(result)}."


def done_words(result: ConvertResult) -> str:
    """The method and what became of the tensors."""
    changed = len(converted(result.tensors))
    kept = sum(t.action == "keep" for t in result.tensors)
    tied = sum(t.action == "tie" for t in result.tensors)
    parts = [f"{count_text(changed)} of {plural(len(result.tensors), 'tensor')} became {_stored_form(result)}"]
    on_grid = sum(t.on_grid for t in result.tensors)
    if on_grid:
        verb = "is" if on_grid == 1 else "are"
        parts.append(f"{count_text(on_grid)} of these lay on such a grid already and {verb} kept exactly")
    if kept:
        parts.append(f"{count_text(kept)} kept {'its' if kept == 1 else 'their'} bits")
    if tied:
        parts.append(f"{plural(tied, 'tied weight')} {'is' if tied == 1 else 'are'} stored once")
    return f"{method_name(result.method)}: {', '.join(parts)}"


def inputs_sentence(result: ConvertResult) -> str:
    """Where the scales of inputs come from, and what no figure of a conversion has; empty where there are none."""
    if result.calibration is None:
        return ""
    tokens = f"{count_text(result.calibration.num_tokens)} tokens of {result.calibration.text}"
    return (
        f"Inputs have scales in the file, calibrated on {tokens}. Comparisons here leave inputs as they are: what "
        "rounding them costs comes on top."
    )


def _stored_form(result: ConvertResult) -> str:
    changed = converted(result.tensors)
    formats = sorted({t.format for t in changed}) or [result.format]
    if result.residual:
        return f"{' or '.join(formats)} plus {'an' if result.residual[0] in 'aei' else 'a'} {result.residual} residual"
    if any(t.points for t in changed):
        return f"{' or '.join(formats)} codes, rows with a scale for each of their points"
    scaled = has_finer_scales(result) or any(t.scale is not None for t in changed)
    return f"{' or '.join(formats)}{f' codes with {scale_words(result)}' if scaled else ''}"


def has_finer_scales(result: ConvertResult) -> bool:
    """Whether less than a tensor has a scale of its own."""
    return bool(result.options.get("granularity", "tensor") != "tensor")


def scale_words(result: ConvertResult) -> str:
    """What has a scale of its own."""
    known = {"tensor": "one scale each", "row": "a scale per row"}
    granularity = str(result.options.get("granularity", "tensor"))
    return known.get(granularity, f"scales of granularity {granularity}")


def size_sentence(result: ConvertResult) -> str:
    """Weight bytes before and after."""
    read, written = result.bytes.read, result.bytes.written
    return f"The weights went from {size_text(read)} to {size_text(written)} ({change_text(read, written)})."


def _error_sentence(tensors: Iterable[TensorRecord]) -> str:
    """The worst error, and how many elements left the format's range; empty where nothing was converted or measured."""
    changed = converted(tensors)
    measured = [t for t in changed if t.sqnr_db is not None]
    if not measured:
        return ""
    worst = worst_tensors(measured, 1)
    if not worst:
        return "Every measured tensor holds its source exactly."
    ratio = f"The smallest signal-to-noise ratio of a tensor is {sqnr_text(worst[0].sqnr_db, ' dB')} ({worst[0].name})"
    return f"{ratio}; {_range_words(changed)}."


def _range_words(changed: Sequence[TensorRecord]) -> str:
    elements = sum(map(num_elements, changed))
    saturated = sum(t.num_saturated for t in changed)
    flushed = sum(t.num_flushed for t in changed)
    if not saturated and not flushed:
        return "no element left the format's range"
    clipped = f"{plural(saturated, 'element')} saturated" if saturated else "no element saturated"
    zeroed = f"{count_text(flushed)} ({share_text(flushed, elements)}) became zero" if flushed else "none became zero"
    return f"{clipped} and {zeroed}"


def verdict(v: VerifyResult) -> str:
    """The outcome as a word: passed, failed, or not run."""
    if not v.passed:
        return "failed"
    return "not run" if v.level == "none" else "passed"


def verify_sentence(v: VerifyResult) -> str:
    """The outcome with the deepest evidence there is for it."""
    word = verdict(v)
    if word == "not run":
        return "It was not verified."
    if word == "failed":
        return f"Verification failed: {listed(_reasons(v))}."
    if v.logits and not v.logits.skipped:
        return f"Verification passed: {_logits_words(v.logits)}."
    if v.weights:
        return f"Verification passed: {_weights_words(v.weights)}."
    if v.hash:
        return f"Verification passed: {_hash_words(v.hash)}."
    return f"Verification passed at level {v.level}."


def _reasons(v: VerifyResult) -> list[str]:
    """What failed: problems as they were met, else the checks and gates that did not hold."""
    failed = [f"{c.name}, {c.text}" for c in checks(v) if c.passed is False]
    return [*v.problems, *(text for text in failed if not v.problems or text.startswith("gate "))]


def checks(v: VerifyResult) -> tuple[Check, ...]:
    """Every step of the verification in order: hashes, weights, outputs, gates."""
    steps = []
    if v.hash:
        steps.append(Check(name="hashes", passed=not v.hash.mismatched, text=_hash_words(v.hash)))
    if v.files:
        ran = not v.files.different if v.files.compared else None
        steps.append(Check(name="files", passed=ran, text=_files_words(v.files)))
    if v.weights:
        words = _values_words if v.level == "values" else _weights_words
        steps.append(Check(name="weights", passed=not v.weights.mismatched, text=words(v.weights)))
    if v.logits:
        ran = None if v.logits.skipped else True
        steps.append(Check(name="outputs", passed=ran, text=_logits_words(v.logits)))
    elif v.files:
        steps.append(Check(name="outputs", passed=None, text="not compared; --data FILE does, or --level logits"))
    steps += [
        Check(name=f"gate {g.expression}", passed=g.passed, text=f"the value is {number_text(g.value)}")
        for g in v.gates
    ]
    return tuple(steps)


def _hash_words(check: HashCheck) -> str:
    if check.mismatched:
        bad = len(check.mismatched)
        return f"{count_text(bad)} of {plural(check.num_files, 'file')} differ: {listed(check.mismatched)}"
    return f"{plural(check.num_files, 'file')} match{'es' if check.num_files == 1 else ''} SHA256SUMS"


def _files_words(check: FilesCheck) -> str:
    different = f"{plural(len(check.different), 'difference')} among {', '.join(check.compared)}"
    equal = f"{', '.join(check.compared)} say the same" if check.compared else ""
    rest = f"not compared: {listed(check.not_compared)}" if check.not_compared else ""
    return "; ".join(filter(None, (different if check.different else equal, rest)))


def _values_words(check: WeightsCheck) -> str:
    """Of two checkpoints whose weights were compared, not converted again."""
    if check.min_sqnr_db == math.inf:
        return f"{plural(check.num_tensors, 'tensor')}, all equal"
    return (
        f"{plural(check.num_tensors, 'tensor')}, smallest SQNR {sqnr_text(check.min_sqnr_db, ' dB')} ({check.worst}), "
        f"largest relative error {error_text(check.max_rel_error)}"
    )


def _weights_words(check: WeightsCheck) -> str:
    if check.mismatched:
        bad = f"{count_text(len(check.mismatched))} of {plural(check.num_tensors, 'tensor')}"
        return f"{bad} differ from the reference cast: {listed(check.mismatched)}"
    if check.min_sqnr_db == math.inf:
        found = f"{plural(check.num_tensors, 'tensor')}, all equal to the source"
    else:
        place = f" ({check.worst})" if check.worst else ""
        found = (
            f"{plural(check.num_tensors, 'tensor')}, smallest SQNR {sqnr_text(check.min_sqnr_db, ' dB')}{place}, "
            f"largest relative error {error_text(check.max_rel_error)}"
            f"{' (of numbers that became 0)' if check.max_rel_error == 1 else ''}"
        )
    if not check.num_elements_checked:
        return found
    checked, total = check.num_elements_checked, check.num_elements
    share = "all " if checked == total else "" if total is None else f"{count_text(checked)} of "
    words = f"{found}; {share}{count_text(total or checked)} stored elements equal the reference cast"
    if not check.miss_probability:
        return words
    return f"{words} (one bad block elsewhere would be missed with a probability of {check.miss_probability:.2g})"


def _logits_words(check: LogitsCheck) -> str:
    if check.skipped:
        return check.skipped
    details = [] if check.bit_equal else _logits_details(check)
    details += [s for s in (check.model_class, check.inputs) if s]
    return _logits_found(check) + (f" ({', '.join(details)})" if details else "")


def _logits_found(check: LogitsCheck) -> str:
    if check.bit_equal:
        return "outputs are bit-equal to the source's"
    if check.rel_error is None:
        return "outputs were compared with the source's"
    return f"outputs are within a relative error of {error_text(check.rel_error)} of the source's"


def _logits_details(check: LogitsCheck) -> list[str]:
    parts = []
    if check.max_abs_diff is not None:
        parts.append(f"largest difference {error_text(check.max_abs_diff)}")
    if check.top1_agreement is not None:
        parts.append(f"same first choice at {percent(check.top1_agreement)} of positions")
    if check.mean_kl is not None:
        back = "" if check.reverse_kl is None else f" and back {error_text(check.reverse_kl)}"
        parts.append(f"KL {error_text(check.mean_kl)}{back} nats per position")
    if check.perplexity is not None and check.source_perplexity is not None:
        parts.append(f"perplexity {check.perplexity:.4g} after {check.source_perplexity:.4g}")
    return parts


DONE_COLUMNS = ("Action", "Tensors", "<Format", "Before", "After", "<Why")
WORST_COLUMNS = ("Tensor", "<Format", "SQNR dB", "Max rel", "Scale", "<Besides rounding")


def done_row(g: DoneGroup) -> tuple[str, ...]:
    """What was done to a group of tensors, and why, under `DONE_COLUMNS`."""
    formats = f"{g.source_dtype} → {g.format}" if g.action == "convert" else g.source_dtype
    return g.action, count_text(g.num_tensors), formats, size_text(g.bytes_in), size_text(g.bytes_out), g.reason


def worst_row(t: TensorRecord) -> tuple[str, ...]:
    """The figures of a converted tensor, under `WORST_COLUMNS`."""
    errors = sqnr_text(t.sqnr_db), error_text(t.max_rel_error)
    return t.name, t.format, *errors, scale_text(t.scale), besides_rounding(t)


def percent(share: float) -> str:
    """A share of positions in per cent."""
    # In millionths, so that share_text can keep 99.999 % apart from 100 %.
    return share_text(round(share * 1_000_000), 1_000_000)


def besides_rounding(t: TensorRecord) -> str:
    """What else than rounding cost this tensor accuracy: "3 saturated", "0.06 % to zero", "nothing"."""
    causes = []
    if t.num_nan or t.num_inf:
        causes.append(f"{count_text(t.num_nan + t.num_inf)} NaN or Inf in the source")
    if t.num_saturated:
        causes.append(f"{count_text(t.num_saturated)} saturated")
    if t.num_flushed:
        causes.append(f"{share_text(t.num_flushed, num_elements(t))} to zero")
    return ", ".join(causes) or "nothing"
