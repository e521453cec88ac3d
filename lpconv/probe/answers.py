"""A probe's record, answered for a few formats: what a report shows, now or long after the run."""

from collections.abc import Iterator, Mapping, Sequence

from lpconv.errors import UnsupportedError
from lpconv.formats.spec import BLOCK_FORMATS, get_format
from lpconv.probe.advice import assess, at_risk, fit, recommend_loss_scale, sentence, what_if
from lpconv.probe.record import GRADIENT_ROLES, ROLES, ProbedTensor, ProbeResult
from lpconv.report.numbers import ROLE_WORDS
from lpconv.results import FormatRates, LossScaleRecord, ProbedRecord, ProbeReport

DEFAULT_FORMATS = ("fp16", "e5m2", "e4m3fn", "bf16")
_FINDINGS = 3  # sentences per format


def answer(result: ProbeResult, formats: Sequence[str] = DEFAULT_FORMATS) -> ProbeReport:
    """What each of `formats` would do to every tensor, at loss scale 1 and at the one recommended for it.

    Raises UsageError for an unknown format and UnsupportedError for one that histograms do not resolve.
    """
    for name in formats:
        _check_format(name)
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
        at_risk=at_risk(result),
        warnings=(*result.options.get("warnings", ()), *_nonfinite(tensors)),
    )


def findings(result: ProbeResult, formats: Sequence[str] = DEFAULT_FORMATS) -> dict[str, tuple[str, ...]]:
    """The worst tensors of each format in words, worst first; none where it loses nothing."""
    return {name: tuple(_findings(result, name)) for name in formats}


def _record(tensor: ProbedTensor, formats: Sequence[str], scales: Mapping[str, LossScaleRecord]) -> ProbedRecord:
    h, is_gradient = tensor.exponents, tensor.role in GRADIENT_ROLES
    plain = {name: _rates(tensor, name, 0) for name in formats}
    scaled = {n: _rates(tensor, n, s.log2_scale) for n, s in scales.items() if is_gradient and s.log2_scale}
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


def _rates(tensor: ProbedTensor, name: str, log2_scale: int) -> FormatRates:
    found = what_if(tensor, name, log2_loss_scale=log2_scale)
    holds = fit(tensor, [name], log2_loss_scale=log2_scale)
    return FormatRates(
        format=name,
        log2_loss_scale=found.log2_loss_scale,
        underflow=found.rates.underflow,
        subnormal=found.rates.subnormal,
        overflow=found.rates.overflow,
        sqnr_db=found.rates.sqnr_db,
        fits=name in holds.formats,
        fits_own_scale=name in holds.formats_scaled,
    )


def _check_format(name: str) -> None:
    """Refuse names that are no format, with the nearest that is one, and block formats, which no histogram shows."""
    if name in BLOCK_FORMATS:
        raise UnsupportedError(
            f"`{name}` scales every block by its own values, which histograms of whole tensors do not show",
            hint=f"ask for its elements, {BLOCK_FORMATS[name].element.name}: with a scale for the whole tensor they "
            "underflow at least as often as in blocks",
        )
    get_format(name)


def loss_scales(result: ProbeResult, formats: Sequence[str] = DEFAULT_FORMATS) -> dict[str, LossScaleRecord]:
    """The recommendation for each format, or none at all where no gradient was recorded."""
    if not any(t.role in GRADIENT_ROLES and t.exponents.num_nonzero for t in result.tensors):
        return {}
    return {name: recommend_loss_scale(result, name) for name in formats}


def _findings(result: ProbeResult, name: str) -> Iterator[str]:
    by_place = {(t.layer, t.role): t for t in result.tensors}
    worst = assess(result, name)[:_FINDINGS]
    return (sentence(by_place[a.layer, a.role], name) for a in worst if a.lost > 0)


def _nonfinite(tensors: Sequence[ProbedRecord]) -> tuple[str, ...]:
    found = [t for t in tensors if t.num_nonfinite]
    if not found:
        return ()
    first, more = found[0], f" and {len(found) - 1} tensors more" if len(found) > 1 else ""
    return (f"infinite or NaN elements, which no rate counts: {first.words} of {first.layer}{more}",)
