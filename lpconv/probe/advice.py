"""What a format would lose in which tensors, which loss scale repairs it, and which formats fit, from a probe's record.

All rates are exact (see `formats.histogram`); only signal-to-noise ratios are estimates. The loss scale multiplies the
gradients and nothing else.
"""

from collections.abc import Mapping, Sequence

from lpconv.errors import UnsupportedError, UsageError
from lpconv.formats.histogram import Rates
from lpconv.formats.spec import BLOCK_FORMATS, get_format
from lpconv.probe.record import GRADIENT_ROLES, ROLES, ProbedTensor, ProbeResult
from lpconv.report.numbers import ROLE_WORDS, power_text, share_text
from lpconv.results import FormatRates, LossScaleRecord, ProbedRecord, ProbeReport
from lpconv.results.documents import fields_from
from lpconv.scaled.critical import MAX_CREST

MAX_UNDERFLOW = 1e-3  # share of a tensor's elements: the threshold of adaptive loss scaling (arXiv 1910.12385)
MIN_SQNR_DB = 20.0  # error power of 1 % of the signal's; e4m3fn on a Gaussian tensor in range gives 31 dB, e5m2 26
HEADROOM = 2  # binades kept free above the largest recorded gradient, for later steps (arXiv 1710.03740 keeps 2 to 3)
_MAX_LOG2_SCALE = 40  # the whole range of fp16; a larger factor would not help
DEFAULT_FORMATS = ("fp16", "e5m2", "e4m3fn", "bf16")
_FINDINGS = 3  # sentences per format


def what_if(tensor: ProbedTensor, format: str, *, log2_loss_scale: int = 0) -> FormatRates:
    """Return the effect of `format` on one recorded tensor.

    It fits if nothing overflows, at most 0.1 % underflows, and the SQNR is at least 20 dB; with `fits_own_scale`, so it
    does if the tensor's own scale replaces the loss scale.
    """
    scale = log2_loss_scale if tensor.role in GRADIENT_ROLES else 0
    rates = tensor.exponents.rates(format, log2_scale=scale)
    scaled = tensor.exponents.rates(format, log2_scale=own_scale(tensor, format))
    return FormatRates(
        format=format,
        log2_loss_scale=scale,
        **fields_from(FormatRates, rates),
        fits=_next_to_nothing_lost(rates),
        fits_own_scale=_next_to_nothing_lost(scaled),
    )


def _next_to_nothing_lost(rates: Rates) -> bool:
    return rates.overflow == 0 and rates.underflow <= MAX_UNDERFLOW and not rates.sqnr_db < MIN_SQNR_DB


def assess(
    result: ProbeResult, format: str, *, log2_loss_scale: int = 0
) -> tuple[tuple[ProbedTensor, FormatRates], ...]:
    """Assess every recorded tensor in `format`, worst first: most elements lost, then lowest signal-to-noise ratio."""
    pairs = ((t, what_if(t, format, log2_loss_scale=log2_loss_scale)) for t in result.tensors)
    return tuple(sorted(pairs, key=lambda pair: pair[1].worst_first))


def operands_at_risk(result: ProbeResult) -> tuple[str, ...]:
    """Descriptions of the operands that fp8 with one scale per tensor represents badly, worst first, and then a remedy.

    Activations and weights are assessed in e4m3fn, gradients in e5m2. An element far above all others multiplies a
    single weight, whose rounding error then does not average out.
    """
    risks: list[tuple[float, str]] = []
    for t in result.tensors:
        if t.role not in ("input", "weight", "grad_output") or not t.exponents.num_nonzero:
            continue
        format = "e5m2" if t.role in GRADIENT_ROLES else "e4m3fn"
        crest, sqnr_db = t.exponents.crest, t.exponents.sqnr_db(format, log2_scale=own_scale(t, format))
        if (t.role == "input" and crest > MAX_CREST) or sqnr_db < MIN_SQNR_DB:
            text = f"{ROLE_WORDS[t.role]} of {t.layer}: its largest element is {crest:.3g} times its RMS"
            risks.append((-crest, f"{text}; {format} with one scale keeps {sqnr_db:.1f} dB"))
    if not risks:
        return ()
    cure = "lpconv finetune --recipe unit-fp8 uses scales that never clip, and keeps such layers in 16 bits"
    return (*(text for _, text in sorted(risks)), f"{cure} (--critical auto)")


def recommend_loss_scale(result: ProbeResult, format: str, *, max_underflow: float = MAX_UNDERFLOW) -> LossScaleRecord:
    """Return the smallest power of two, at least 1, at which no gradient underflows by more than `max_underflow`.

    If there is none within the headroom, return the largest that the headroom allows (below 1 if need be). Raises
    UsageError if no gradient was recorded.
    """
    gradients = [t for t in result.tensors if t.role in GRADIENT_ROLES and t.exponents.num_nonzero]
    if not gradients:
        raise UsageError("the probe recorded no gradients", hint="run a backward pass inside `track`")
    top = max(max(t.exponents.exponents) for t in gradients)
    limit = min(get_format(format).max_exponent - HEADROOM - top, _MAX_LOG2_SCALE)

    def worst(log2_scale: int) -> float:
        total = (t.exponents.num_underflow(format, log2_scale=log2_scale) / t.exponents.num_nonzero for t in gradients)
        return max(total)

    chosen = next((k for k in range(limit + 1) if worst(k) <= max_underflow), limit)
    return LossScaleRecord(
        format=format,
        log2_scale=chosen,
        max_log2_scale=limit,
        worst_underflow_before=worst(0),
        worst_underflow_after=worst(chosen),
    )


def own_scale(tensor: ProbedTensor, format: str) -> int:
    """Return log2 of the largest power-of-two scale without overflow in `format`; 0 for a tensor of zeros.

    Under the OCP MX rule (v1.0 §6.3) every block of the tensor gets at least this scale, so blocks of the format flush
    at most as many elements as this scale does.
    """
    h = tensor.exponents
    if h.num_nonzero == 0:
        return 0
    scale = get_format(format).max_exponent - max(h.exponents)
    return scale if h.num_overflow(format, log2_scale=scale) == 0 else scale - 1


def sentence(tensor: ProbedTensor, format: str, *, log2_loss_scale: int = 0) -> str:
    """Describe one tensor: "input gradient of q: 19 % underflow in fp16 at loss scale 1; 2^7 brings it to 0.1 %"."""
    rates = what_if(tensor, format, log2_loss_scale=log2_loss_scale)
    shares = {"underflow": rates.underflow, "overflow": rates.overflow}
    losses = ", ".join(f"{share_text(share, 1)} {cause}" for cause, share in shares.items() if share > 0)
    text = f"{ROLE_WORDS[tensor.role]} of {tensor.layer}: {losses or 'nothing lost'} in {format}"
    if tensor.role not in GRADIENT_ROLES:
        return text
    text += f" at loss scale {power_text(rates.log2_loss_scale)}"
    repair = _repair(tensor, format, rates)
    return text if repair is None else f"{text}; {power_text(repair[0])} brings it to {share_text(repair[1], 1)}"


def table(result: ProbeResult, format: str, *, log2_loss_scale: int = 0, limit: int = 10) -> str:
    """Return the worst tensors in `format` as lines of text, with the loss scale that would suit all of them."""
    worst = assess(result, format, log2_loss_scale=log2_loss_scale)
    width = max((len(t.layer) for t, _ in worst[:limit]), default=5)
    lines = [f"{'layer':{width}}  {'tensor':15}  underflow  subnormal   overflow      SQNR"]
    for t, r in worst[:limit]:
        shares = "".join(f"{share_text(v, 1):>11}" for v in (r.underflow, r.subnormal, r.overflow))
        lines.append(f"{t.layer:{width}}  {ROLE_WORDS[t.role]:15}{shares}{r.sqnr_db:>7.1f} dB")
    if len(worst) > limit:
        lines.append(f"and {len(worst) - limit} more with smaller losses")
    for scale in loss_scales(result, [format]).values():
        lines.append(
            f"loss scale for {format}: {power_text(scale.log2_scale)} "
            f"(worst gradient underflow {share_text(scale.worst_underflow_before, 1)} at 1, "
            f"{share_text(scale.worst_underflow_after, 1)} there; at most {power_text(scale.max_log2_scale)})"
        )
    lines.append(f"{result.steps_recorded} of {result.steps_seen} steps, {share_text(result.overhead, 1)} overhead")
    return "\n".join(lines)


def _repair(tensor: ProbedTensor, format: str, rates: FormatRates) -> tuple[int, float] | None:
    """(log2 of the scale, share still lost) at the nearest scale with at most 0.1 % lost, or else at the best scale.

    None if the loss is small already, or if no scale reduces it.
    """
    if rates.lost <= MAX_UNDERFLOW:
        return None
    up = range(rates.log2_loss_scale + 1, _MAX_LOG2_SCALE + 1)
    candidates = up if rates.underflow >= rates.overflow else range(rates.log2_loss_scale - 1, -41, -1)
    h, total = tensor.exponents, tensor.exponents.num_nonzero
    lost = {
        k: (h.num_underflow(format, log2_scale=k) + h.num_overflow(format, log2_scale=k)) / total for k in candidates
    }
    best = next((k for k, share in lost.items() if share <= MAX_UNDERFLOW), min(lost, key=lost.__getitem__))
    return (best, lost[best]) if lost[best] < rates.lost else None


def answer(result: ProbeResult, formats: Sequence[str] = DEFAULT_FORMATS) -> ProbeReport:
    """Report the effect of each of `formats` on every recorded tensor, at loss scale 1 and at the recommended one.

    Raises UsageError for an unknown format and UnsupportedError for one that histograms do not resolve.
    """
    formats = [_format_name(name) for name in formats]
    scales = loss_scales(result, formats)
    tensors = tuple(_record(t, formats, scales) for t in result.tensors)
    return ProbeReport(
        name=str(result.options.get("model", "tracked model")),
        facts={str(k): str(v) for k, v in result.options.get("facts", {}).items()},
        formats=tuple(formats),
        classes=tuple(ROLE_WORDS[r] for r in ROLES if any(t.role == r for t in tensors)),
        steps_seen=result.steps_seen,
        steps_recorded=result.steps_recorded,
        losses=result.losses,
        overhead=result.overhead,
        tensors=tensors,
        loss_scales=tuple(scales.values()),
        findings=findings(result, formats),
        at_risk=operands_at_risk(result),
        noise=result.noise,
        warnings=(*result.options.get("warnings", ()), *_nonfinite(tensors)),
    )


def findings(result: ProbeResult, formats: Sequence[str] = DEFAULT_FORMATS) -> dict[str, tuple[str, ...]]:
    """Descriptions of the worst tensors in each format, worst first; empty if the format loses nothing."""
    return {
        name: tuple(sentence(tensor, name) for tensor, rates in assess(result, name)[:_FINDINGS] if rates.lost > 0)
        for name in formats
    }


def _record(tensor: ProbedTensor, formats: Sequence[str], scales: Mapping[str, LossScaleRecord]) -> ProbedRecord:
    h, is_gradient = tensor.exponents, tensor.role in GRADIENT_ROLES
    plain = {name: what_if(tensor, name) for name in formats}
    scaled = {
        n: what_if(tensor, n, log2_loss_scale=s.log2_scale) for n, s in scales.items() if is_gradient and s.log2_scale
    }
    return ProbedRecord(
        layer=tensor.layer,
        role=tensor.role,
        words=ROLE_WORDS[tensor.role],
        is_gradient=is_gradient,
        num_elements=h.num_elements,
        num_zero=h.num_zero,
        num_nonfinite=h.num_inf + h.num_nan,
        exponents=tuple(h.exponents.items()),
        plain=tuple(plain.values()),
        scaled=tuple((plain | scaled).values()),
    )


def _format_name(name: str) -> str:
    """The usual name of a format. Rejects unknown ones, and block formats, whose scales histograms do not show."""
    block = BLOCK_FORMATS.get(name.lower())
    if block is not None:
        raise UnsupportedError(
            f"`{name}` scales every block separately, which cannot be predicted from a histogram of the whole tensor",
            hint=f"ask for its elements, {block.element.name}, instead: with one scale per tensor they underflow at "
            "least as often as in blocks",
        )
    return get_format(name).name


def loss_scales(result: ProbeResult, formats: Sequence[str] = DEFAULT_FORMATS) -> dict[str, LossScaleRecord]:
    """The recommended loss scale for each format; empty if no gradient was recorded."""
    if not any(t.role in GRADIENT_ROLES and t.exponents.num_nonzero for t in result.tensors):
        return {}
    return {name: recommend_loss_scale(result, name) for name in formats}


def _nonfinite(tensors: Sequence[ProbedRecord]) -> tuple[str, ...]:
    affected = [t for t in tensors if t.num_nonfinite]
    if not affected:
        return ()
    first, more = affected[0], f" and {len(affected) - 1} tensors more" if len(affected) > 1 else ""
    return (f"infinite or NaN elements, which no rate counts: {first.words} of {first.layer}{more}",)
