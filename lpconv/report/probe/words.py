"""What the terminal and the page say about a probe in the same words and the same order."""

import math
from collections.abc import Iterable, Mapping, Sequence

from lpconv.report.numbers import count_text, plural, share_text
from lpconv.results import ProbedRecord, ProbeReport

_MAX_UNDERFLOW = 1e-3  # what the recommendation aims at
FIT_WORDS = (
    "Held: nothing beyond the range, at most 0.1 % to zero, at least 20 dB of SQNR; gradients at the recommended loss "
    "scale. In brackets, where they differ: with a power-of-two scale of each tensor's own."
)
LOSS_SCALE_COLUMNS = ("Format", "Loss scale", "At most", "Worst underflow at 1", "With the scale")
ALONE_WORDS = "Loss scales in these lines would suit that tensor alone; those below serve the whole model."


def worst_first(tensors: Iterable[ProbedRecord]) -> tuple[ProbedRecord, ...]:
    """By the share lost in the first format at loss scale 1, then by signal-to-noise ratio."""

    def badness(t: ProbedRecord) -> tuple[float, float]:
        rates = t.plain[0]
        return -rates.lost, math.inf if math.isnan(rates.sqnr_db) else rates.sqnr_db

    return tuple(sorted(tensors, key=badness))


def fit_rows(report: ProbeReport) -> tuple[tuple[str, ...], ...]:
    """Each class of tensor, and how many of how many each format holds: "3 of 26", or "0 (26) of 26" if scales help."""
    rows = []
    for words in report.classes:
        members = [t for t in report.tensors if t.words == words]
        rows.append((words, *(_fit_count(members, i) for i in range(len(report.formats)))))
    return tuple(rows)


def answer(report: ProbeReport) -> tuple[bool, str]:
    """Whether some format holds every tensor, and how many tensors each one holds, in one sentence."""
    held = [sum(t.scaled[i].fits_own_scale for t in report.tensors) for i in range(len(report.formats))]
    counts = ", ".join(f"{count_text(n)} by {name}" for name, n in zip(report.formats, held, strict=True))
    total = len(report.tensors)
    return total in held, f"Of {plural(total, 'tensor')}, held with a scale for each: {counts}."


def _fit_count(members: Sequence[ProbedRecord], index: int) -> str:
    held = sum(t.scaled[index].fits for t in members)
    own = sum(t.scaled[index].fits_own_scale for t in members)
    return f"{held} of {len(members)}" if own == held else f"{held} ({own}) of {len(members)}"


def held_by(tensor: ProbedRecord) -> str:
    """The formats that hold a tensor, those in brackets with a scale of its own only."""
    names = [r.format if r.fits else f"({r.format})" for r in tensor.scaled if r.fits or r.fits_own_scale]
    return ", ".join(names) or "–"


def brief_share(share: float) -> str:
    """A share in per cent with two significant digits."""
    if share == 0:
        return "0 %"
    return f"{100 * share:.2g} %" if share < 0.1 else f"{100 * share:.0f} %"


def loss_sentence(
    tensor: str, format: str, lost: Mapping[str, float], *, log2_scale: int | None, repair: tuple[int, float] | None
) -> str:
    """What a tensor loses: "input gradient of q: 19 % underflow in fp16 at loss scale 1; 2^7 brings it to 0.1 %".

    `lost` are shares of its elements by cause. `log2_scale` is None for what no loss scale multiplies; `repair` is a
    better one, and the share that is still lost there.
    """
    losses = [f"{brief_share(share)} {cause}" for cause, share in lost.items() if share > 0]
    text = f"{tensor}: {', '.join(losses) or 'nothing lost'} in {format}"
    if log2_scale is not None:
        text += f" at loss scale {loss_scale_text(log2_scale)}"
    return text if repair is None else f"{text}; {loss_scale_text(repair[0])} brings it to {brief_share(repair[1])}"


def loss_scale_text(log2_scale: int) -> str:
    """1, 2^7, 2^-3."""
    return "1" if log2_scale == 0 else f"2^{log2_scale}"


def loss_scale_rows(report: ProbeReport) -> tuple[tuple[str, ...], ...]:
    """The recommended loss scales, under `LOSS_SCALE_COLUMNS`."""
    return tuple(
        (
            s.format,
            loss_scale_text(s.log2_scale),
            loss_scale_text(s.max_log2_scale),
            share_text(s.worst_underflow_before, 1),
            share_text(s.worst_underflow_after, 1),
        )
        for s in report.loss_scales
    )


def capped_words(report: ProbeReport) -> str:
    """For which formats no loss scale saves every gradient; empty where there is none."""
    capped = [s.format for s in report.loss_scales if s.worst_underflow_after > _MAX_UNDERFLOW]
    if not capped:
        return ""
    return f"No loss scale brings every gradient to 0.1 % in {', '.join(capped)}: larger ones would overflow."


def tracking_words(report: ProbeReport) -> str:
    """What recording cost, as measured in this run."""
    steps = f"{report.steps_recorded} of {report.steps_seen} steps recorded"
    return f"{steps}, which took {share_text(report.overhead, 1)} of the steps' own time"
