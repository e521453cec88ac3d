"""Try conversions of a model until the smallest one that keeps the quality is known.

A sample of each tensor's rows gives the noise-to-signal ratio and the plan gives the size. A conversion that is larger
and noisier than another is pruned, so among the rest the larger ones have less noise. A trial encodes in memory and
runs the model with the decoded weights and with its own on the same windows of text, so the gap is a mean of paired
differences. The first trial is the smallest conversion with little noise. Until one keeps the quality, larger ones with
clearly less noise follow; then smaller ones, the largest first. A conversion that certainly does not keep the quality
rules out the noisier ones, also those that have so much more noise than the last that they cannot keep it. One whose
interval leaves this open rules out nothing.

Error feedback keeps the size but takes minutes, and its noise in the weights is larger by design. So it is tried last,
on the conversions smaller than the answer, the largest first, until one does not keep the quality.

`--bits` chooses a format for each part, so that the checkpoint has at most so many bits per weight. A part is a tensor,
the weights that readers fuse, or the experts of a layer. All start in a narrow format. The cost of each is measured by
converting that part alone; those with the largest cost per additional byte are raised to a wider format until the bits
are used up.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from lpconv.advise.candidates import Settings, conversions, describe_conversion, judge_row, number_of, with_feedback
from lpconv.advise.options import Budget
from lpconv.advise.subject import Subject, job_of, open_converted, roundings_of
from lpconv.bench.models import gemms_of, running_bytes
from lpconv.bench.options import PLAIN, Case
from lpconv.bench.roofline import peaks_in, step_gemm_seconds
from lpconv.convert.apply import noise_of_sample
from lpconv.errors import LpconvError, UsageError, problem_text
from lpconv.formats.spec import FORMATS
from lpconv.layers import is_same_name
from lpconv.layouts.linears import format_groups, group_pattern
from lpconv.layouts.reader import stored_shapes
from lpconv.models.inputs import vocabulary_size
from lpconv.models.whole import linears_of
from lpconv.progress import Deadline, Progress, TimeIsUp, counted
from lpconv.results import AdviceRow, GapEstimate, LayerPart, PeakRecord, TensorRecord
from lpconv.storage.header import DTYPE_BITS
from lpconv.student import estimate_mean
from lpconv.verify.outputs import compare_outputs, outputs_of, verification_inputs

NO_TIME = "there was no time left to try it"
_SAMPLE = 2**13  # elements per tensor
# The interval is examined after 8, 16, 32 and 64 windows, and measuring stops once it decides whether the quality is
# kept. With error probabilities of 1 % each and 2 % at the end, the decision is right in 95 % of cases (Bonferroni).
_LOOKS = (8, 16, 32, 64)
_EARLY, _LAST = 0.99, 0.98
_SHARE = 1 / 2  # share of the remaining time for the sample, and for each candidate until one is good enough
_SAME_SIZE, _SAME_NOISE = 1.01, 10**0.1  # 1 % of the size, 1 dB
_LITTLE_NOISE = 1e-3  # relative to the signal: 30 dB, as for e4m3fn
_LESS = 20.0  # factor by which the noise of the next larger candidate is smaller (13 dB), if there is one
_DOUBT = 4.0  # factor by which a gap estimated from noise must exceed the quality to be ruled out
# Base settings, widest first, and the format for raised tensors if the source is wider than 16 bits; otherwise raised
# tensors are kept, at the same size and without loss.
_LADDERS: tuple[tuple[Settings, str], ...] = (
    ({"method": "unit", "format": "e4m3fn", "granularity": "row"}, "fp16"),
    ({"method": "multipoint", "format": "int4", "budget_bits": 4.5}, "keep"),
)
_WINDOWS = 2


@dataclass(frozen=True, kw_only=True)
class Trial:
    """Setup of a trial: the model, the budget, and forecasts by the format in which a model is opened.

    `text` is what error feedback is calibrated on, as in `convert --calibrate`; `bits` is the most per weight, if
    limited. `costs_s` are the seconds that finished trials took to open a conversion and to run a window.
    """

    subject: Subject
    budget: Budget
    forecasts: dict[str, dict[str, Any]]
    progress: Progress
    text: str = "demo"
    runtime: str | None = None
    bits: float | None = None
    costs_s: list[tuple[float, float]] = field(default_factory=list)

    @property
    def seconds_for_a_look(self) -> float:
        """Time for opening another conversion and a first look at it, judged by the last one; 0 before the first."""
        opened_s, window_s = self.costs_s[-1] if self.costs_s else (0.0, 0.0)
        return opened_s + _LOOKS[0] * window_s


def measure_conversions(trial: Trial, deadline: Deadline) -> Iterator[Sequence[AdviceRow]]:
    """Yield all conversions, then updated rows, as far as time allows."""
    rows = _screen(trial, deadline.part(_SHARE))
    yield rows
    waiting = [row for row in rows if row.status == "unmeasured" and row.size_bytes is not None]
    last, answer = None, None
    while (row := _next_to_try(waiting, last, answer)) is not None and trial.seconds_for_a_look < deadline.left_s:
        waiting.remove(row)
        last = measure(trial, row, deadline.part(_SHARE) if answer is None else deadline)
        yield [last, *(known := _ruled_out(waiting, last, trial))]
        waiting = [r for r in waiting if r.name not in {k.name for k in known}]
        answer = last if _keeps_quality(last, trial) else answer  # after the first one only smaller ones are tried
    yield [replace(row, seconds=trial.seconds_for_a_look) for row in waiting]
    smaller = [r for r in rows if r.status == "unmeasured" and _size(r) < _size(answer)]
    yield from _measure_feedback(trial, smaller, deadline)


def _size(row: AdviceRow | None) -> float:
    return math.inf if row is None or row.size_bytes is None else row.size_bytes


def _keeps_quality(row: AdviceRow, trial: Trial) -> bool:
    return row.gap is not None and row.gap.high <= trial.budget.quality


def _next_to_try(waiting: Sequence[AdviceRow], last: AdviceRow | None, answer: AdviceRow | None) -> AdviceRow | None:
    """The conversion to try next, of those that are `waiting`, smallest first; None if none could be better.

    First the smallest with little noise. Until one is good enough, a larger one with clearly less noise than the last;
    afterwards the largest that is smaller than the answer.
    """
    if answer is not None:
        return next((row for row in reversed(waiting) if _size(row) < _size(answer)), None)
    if last is None:
        return next((r for r in waiting if r.noise is not None and r.noise <= _LITTLE_NOISE), [None, *waiting][-1])
    larger = [row for row in waiting if _size(row) > _size(last)]
    most = (last.noise or 0.0) / _LESS
    return next((r for r in larger if r.noise is not None and r.noise <= most), [None, *larger][-1])


def _ruled_out(waiting: Sequence[AdviceRow], row: AdviceRow, trial: Trial) -> list[AdviceRow]:
    """The waiting rows that cannot be the answer after `row` was measured, with the reason."""
    quality, known = trial.budget.quality, list[AdviceRow]()
    for other in waiting:
        why = ""
        if _keeps_quality(row, trial) and _size(other) > _size(row):
            why = f"larger than {row.name}, which is good enough"
        elif row.gap is not None and _size(other) < _size(row) and _no_finer_inputs(other, row):
            if row.gap.low > quality:
                why = f"noisier than {row.name}, which is not good enough"
            elif least_gap(other, row, trial.subject.metric) > _DOUBT * quality:
                why = f"much noisier than {row.name}, so its gap would exceed the limit"
        known += [replace(other, status="pruned", why=why)] if why else []
    return known


def _measure_feedback(trial: Trial, rows: Sequence[AdviceRow], deadline: Deadline) -> Iterator[Sequence[AdviceRow]]:
    """Yield `rows`, smallest first, with error feedback instead of rounding to nearest, as far as there is time."""
    waiting = []
    for row in rows:
        settings = with_feedback(row.settings, trial.text)
        if settings is not None:
            why = "it needs calibration, and there was no time left to try it"
            name = describe_conversion(settings)
            waiting.append(replace(row, name=name, settings=settings, status="unmeasured", noise=None, why=why))
    yield waiting
    while waiting and trial.seconds_for_a_look < deadline.left_s:
        limit = deadline.part(1.0)
        limit.fits = True  # the first layers tell whether the calibration fits into the time
        row = measure(replace(trial, progress=limit), waiting.pop(), deadline)
        over = row.gap is None or row.gap.low > trial.budget.quality
        why = f"smaller than {row.name}, which is not good enough"
        yield [row, *(replace(r, status="pruned", why=why) for r in waiting if over and row.status != "unmeasured")]
        waiting = [] if over else waiting


def measure_conversion(trial: Trial, name: str, settings: Settings, deadline: Deadline) -> AdviceRow:
    """Measure one conversion as far as time allows."""
    row = _sample_row(trial, name, settings, deadline)
    return row if row.status == "failed" else measure(trial, row, deadline)


def _screen(trial: Trial, deadline: Deadline) -> list[AdviceRow]:
    """Every conversion with its size and sampled noise if time allows, smallest first, with dominated ones pruned."""
    candidates = counted(conversions(trial.runtime).items(), "sampling weights", "candidates", trial.progress)
    rows = [_sample_row(trial, name, settings, deadline) for name, settings in candidates]
    return sorted(prune_rows(rows), key=lambda row: row.size_bytes or math.inf)


def _sample_row(trial: Trial, name: str, settings: Settings, deadline: Deadline) -> AdviceRow:
    """A conversion with its size, sampled noise, and a forecast of its memory and time, unless the deadline passed."""
    row = AdviceRow(purpose="infer", name=name, settings=settings, status="unmeasured", why=NO_TIME)
    if deadline.left_s <= 0:
        return row
    try:
        with job_of(trial.subject, settings) as job:
            rounded = next((r.words for r in roundings_of(job).values()), None)
            noise = noise_of_sample(job, elements=_SAMPLE)
            row = replace(row, size_bytes=job.plan.bytes_out, noise=noise, rounded_inputs=rounded)
            weights = job.plan.num_weights
    except LpconvError as e:
        return replace(row, status="failed", why=problem_text(e))
    if trial.bits is not None and 8 * _size(row) > trial.bits * weights * _SAME_SIZE:
        row = replace(row, status="pruned", why=f"more than {trial.bits:g} bits per weight")
    is_narrow = FORMATS[number_of(settings)].storage_bits <= 16 and "residual" not in settings  # opens in 16 bits
    return replace(row, **trial.forecasts["bf16" if is_narrow else "fp32"])


def measure(trial: Trial, row: AdviceRow, deadline: Deadline) -> AdviceRow:
    """Measure the gap of a sampled row and check it against the budget; windows are run as time allows."""
    subject, started_s = trial.subject, deadline.spent_s
    try:
        model, records = open_converted(subject, row.settings, trial.progress, phase=f"encoding {row.name}")
        opened_s = deadline.spent_s - started_s
        gap = _gap(trial, row.name, model, deadline)
        trial.costs_s.append((opened_s, (deadline.spent_s - started_s - opened_s) / gap.count))
        if subject.metric == "output":
            gap = replace(gap, low=max(gap.low, 0.0))  # relative errors are not negative
        figures = _figures(subject, model)
    except LpconvError as e:
        return replace(row, status="failed", why=problem_text(e))
    except TimeIsUp:
        return row
    if not math.isfinite(gap.value):
        return replace(row, status="failed", why="the model's outputs are not finite")
    sqnr = min((r.sqnr_db for r in records if r.action == "convert" and r.sqnr_db is not None), default=None)
    known = replace(row, status="measured", why="", gap=gap, sqnr_db=sqnr, figures=figures)
    known = replace(known, seconds=deadline.spent_s - started_s)
    if "rounding" in row.settings:
        known = replace(known, calibration_s=opened_s)
    judged = judge_row(known, trial.budget)
    words = "good enough" if judged.meets else "not good enough" if gap.low > trial.budget.quality else "undecided"
    trial.progress.message(f"{row.name}: gap {gap.value:.4f} ({gap.low:.4f} to {gap.high:.4f}), {words}")
    return judged


def _gap(trial: Trial, name: str, model: Any, deadline: Deadline) -> GapEstimate:
    """The gap on a few windows, then on twice as many, until its interval decides or the time is up.

    Raises TimeIsUp if there was not even time for two windows.
    """
    subject, quality, gaps = trial.subject, trial.budget.quality, list[float]()
    with suppress(TimeIsUp):
        deadline.start(f"running {name}", len(subject.windows), unit="windows")
        while len(gaps) < len(subject.windows) and deadline.left_s > 0:
            gaps.append(subject.gap(model, len(gaps)))
            deadline.advance(1)
            gap = _estimate(gaps, subject) if len(gaps) in _LOOKS else None
            if gap is not None and (gap.high <= quality or gap.low > quality or not math.isfinite(gap.value)):
                return gap
    if len(gaps) < 2:
        raise TimeIsUp
    return _estimate(gaps, subject)


def _estimate(gaps: Sequence[float], subject: Subject) -> GapEstimate:
    return estimate_mean(gaps, _LAST if len(gaps) == len(subject.windows) else _EARLY)


def _figures(subject: Subject, model: Any) -> dict[str, float]:
    """The metrics that the gates of `convert --verify logits` will check."""
    inputs = verification_inputs(subject.model, subject.prepared.checkpoint.directory).tensors
    with torch.inference_mode():
        check = compare_outputs(outputs_of(subject.model, inputs), outputs_of(model, inputs))
    name, value = ("kl", check.mean_kl) if subject.metric == "loss" else ("logits_rel_error", check.rel_error)
    return {} if value is None else {name: value}


def least_gap(row: AdviceRow, measured: AdviceRow, metric: str) -> float:
    """The smallest gap to expect of a conversion, given another one that was measured.

    Small noise in the weights changes outputs in proportion to its square root, and the loss of a trained model, whose
    gradient is small, in proportion to the noise itself.
    """
    if row.noise is None or not measured.noise or measured.gap is None:
        return 0.0
    growth = row.noise / measured.noise
    return measured.gap.low * (math.sqrt(growth) if metric == "output" else growth)


def prune_rows(rows: Sequence[AdviceRow]) -> list[AdviceRow]:
    """The rows, with those pruned that another one beats in size and noise, or equals and precedes."""
    pruned: list[AdviceRow] = []
    for row in rows:
        better = next((r.name for r in rows if _no_worse(r, row) and not _no_worse(row, r)), None)
        alike = next((r.name for r in pruned if r.status != "pruned" and _no_worse(r, row)), None)
        why = f"beaten by {better}" if better else f"no better than {alike}" if alike else ""
        pruned.append(replace(row, status="pruned", why=f"{why} in size and weights") if why else row)
    return pruned


def _no_finer_inputs(row: AdviceRow, than: AdviceRow) -> bool:
    """Whether `row` rounds inputs or `than` does not; otherwise its gap may be smaller despite noisier weights."""
    return row.rounded_inputs is not None or than.rounded_inputs is None


def _no_worse(row: AdviceRow, than: AdviceRow) -> bool:
    if row.size_bytes is None or row.noise is None or than.size_bytes is None or than.noise is None:
        return False
    is_no_larger = row.size_bytes <= than.size_bytes * _SAME_SIZE
    return is_no_larger and row.noise <= than.noise * _SAME_NOISE and _no_finer_inputs(than, row)


def forecast(subject: Subject, batch_size: int, peaks: PeakRecord, *, opened: str) -> dict[str, Any]:
    """Estimated fields of an `AdviceRow`: memory and time of a step of a model opened in bf16 or fp32."""
    model, seq_len = subject.model, subject.prepared.seq_len
    case = Case(
        model="", layers=None, format=opened, method=PLAIN, mode="infer", optimizer=None, seq=seq_len,
        batch=batch_size, compiled="off", device="cpu",
    )  # fmt: skip
    gemms, m = gemms_of(model), batch_size * seq_len
    return {
        "memory_bytes": running_bytes(model, case, vocabulary_size(model.config)),
        "memory_from": f"estimate, opened in {'fp32' if opened == 'fp32' else '16 bits'}",
        "step_time_s": step_gemm_seconds(gemms, m, peaks_in(opened, peaks), method=None, train=False),
        "time_from": "roofline of its Linear layers, from measured peaks",
    }


@dataclass(frozen=True, kw_only=True)
class Base:
    """The narrow conversion to start from, the format of raised tensors, and the bytes available for raising."""

    settings: Settings
    raised: str
    raised_bits: int
    spare_bytes: float


def base_for(subject: Subject, bits: float) -> Base:
    """The widest base that fits. Raises UsageError, with the minimum number of bits, if none does."""
    least = 0.0
    for settings, raised in _LADDERS:
        with job_of(subject, settings) as job:
            weights = job.plan.num_weights
            widest = max(DTYPE_BITS[t.info.dtype] for t in job.plan.tensors if t.action != "tie")
            spare = weights * bits / 8 - job.plan.bytes_out
            least = 8 * job.plan.bytes_out / weights
        if spare >= 0:
            kept = raised == "keep" or widest <= 16
            return Base(
                settings=settings,
                raised="keep" if kept else raised,
                raised_bits=widest if kept else 16,
                spare_bytes=spare,
            )
    raise UsageError(
        f"--bits {bits:g}: this model needs at least {least:.2f} bits per weight, with {describe_conversion(settings)}",
        hint="embeddings and output heads are stored in 16 bits; pass a larger value",
    )


def raise_costly_parts(subject: Subject, base: Base, deadline: Deadline, progress: Progress) -> tuple[str, Settings]:
    """(name, settings) of the base with those parts raised whose cost per additional byte is largest."""
    model, records = open_converted(subject, base.settings, progress)
    parts, _ = parts_of(subject, model, records, deadline, progress)
    bytes_of = {r.name: r.bytes_out for r in records}
    sizes = {group_pattern(names): sum(bytes_of[n] for n in names) for names in format_groups(_converted(records))}
    chosen = choose_parts(parts, sizes, base, metric=subject.metric)
    rules = [f"{p.tensor}={base.raised}" for p in chosen]
    to = "kept" if base.raised == "keep" else f"in {base.raised}"
    name = f"{describe_conversion(base.settings)} with {len(chosen)} of {len(parts)} parts {to}"
    return name, base.settings | {"rules": rules}


def choose_parts(parts: Sequence[LayerPart], sizes: Mapping[str, int], base: Base, *, metric: str) -> list[LayerPart]:
    """Choose parts greedily, by divergence saved per byte. Relative errors of outputs add up in squares."""
    power = 1 if metric == "loss" else 2

    def extra(part: LayerPart) -> float:
        return sizes[part.tensor] * (base.raised_bits / part.bits - 1)

    left, chosen = base.spare_bytes, []
    for part in sorted(parts, key=lambda p: -(p.divergence**power) / max(extra(p), 1.0)):
        if 0 < extra(part) <= left:
            chosen.append(part)
            left -= extra(part)
    return chosen


def parts_of(
    subject: Subject, model: Any, records: Sequence[TensorRecord], deadline: Deadline, progress: Progress
) -> tuple[tuple[LayerPart, ...], float | None]:
    """The cost of each part in which the converted `model` differs from the subject, and of all parts together.

    A part is a tensor, the weights that readers fuse, or the experts of a layer. The largest come first, because
    formats are chosen for those. If time runs out, the others are missing and the cost of all is None.
    """
    own, other = dict(subject.model.named_parameters()), dict(model.named_parameters())
    changed = [n for n in own if not torch.equal(own[n], other[n])]
    checkpoint, converted = subject.prepared.checkpoint, _converted(records)
    experts = linears_of(checkpoint, stored_shapes(checkpoint)).experts
    groups = ((names, _parameters_of(names, changed, experts)) for names in format_groups(converted))
    held = sorted((g for g in groups if g[1]), key=lambda g: -sum(own[n].numel() for n in g[1]))
    windows = subject.windows[:_WINDOWS]
    with torch.inference_mode():
        wanted = [outputs_of(subject.model, w) for w in windows]
    parts: list[LayerPart] = []
    with suppress(TimeIsUp):
        for names, parameters in counted(held, "cost of each part", "parts", progress):
            if deadline.left_s <= 0:
                break
            values = {n: other[n] for n in parameters}
            parts.append(_part([converted[n] for n in names], _divergence(subject, values, windows, wanted)))
    is_whole = len(parts) == len(held)
    whole = _divergence(subject, {n: other[n] for n in changed}, windows, wanted) if is_whole else None
    return tuple(sorted(parts, key=lambda p: -p.divergence)), whole


def _divergence(
    subject: Subject, values: Mapping[str, Tensor], windows: Sequence[Any], wanted: Sequence[Tensor]
) -> float:
    """Divergence of the outputs when some parameters have other values."""
    parameters = dict(subject.model.named_parameters())
    own = {n: parameters[n].data for n in values}
    try:
        for name, value in values.items():
            parameters[name].data = value.data
        with torch.inference_mode():
            checks = [compare_outputs(a, outputs_of(subject.model, w)) for a, w in zip(wanted, windows, strict=True)]
    finally:
        for name, data in own.items():
            parameters[name].data = data
    gaps = [c.mean_kl if subject.metric == "loss" else c.rel_error for c in checks]
    return max(0.0, sum(math.inf if gap is None else gap for gap in gaps) / len(gaps))


def _converted(records: Iterable[TensorRecord]) -> dict[str, TensorRecord]:
    return {r.name: r for r in records if r.action == "convert"}


def _parameters_of(names: Sequence[str], parameters: Iterable[str], experts: Mapping[str, str]) -> list[str]:
    """The parameters that hold stored tensors, or into whose module transformers merges them as experts."""
    modules = {experts[n] for n in names if n in experts}
    return [p for p in parameters if p.rpartition(".")[0] in modules or any(is_same_name(p, n) for n in names)]


def _part(records: Sequence[TensorRecord], divergence: float) -> LayerPart:
    """The cost of tensors that are decided together."""
    elements = sum(math.prod(r.shape) for r in records)
    return LayerPart(
        tensor=group_pattern([r.name for r in records]),
        format=records[0].format or "",
        bits=8 * sum(r.bytes_out for r in records) / elements if elements else 0.0,
        sqnr_db=min((r.sqnr_db for r in records if r.sqnr_db is not None), default=None),
        divergence=divergence,
    )
