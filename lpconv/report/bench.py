"""The document of a bench: measurements of each row, the comparison with its baseline, and conclusions."""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TypeAlias

from lpconv.report.charts import Bar, Chart, bar_chart
from lpconv.report.compare import compare_document
from lpconv.report.document import Document, Table, Tile, Verdict, failed_gates, gates_section, section, sections_of
from lpconv.report.numbers import (
    MISSING,
    count_text,
    duration_text,
    name_list,
    number_text,
    plural,
    rate_text,
    ratio_text,
    share_text,
    size_text,
    unit_text,
)
from lpconv.results import BenchResult, BenchRow, GateRecord, RatioRecord, VerdictRecord

_Named: TypeAlias = Sequence[tuple[str, BenchRow]]  # (label, row) pairs
_CHANGE_COLUMNS = ("Configuration", "Before", "Now", "<Change")
_ENOUGH_ROUNDS = 8
_STEADY = 1.1  # largest ratio between the baseline's step times in different rows that goes unmentioned
_FLOPS = {"TFLOP/s": 1e12, "GFLOP/s": 1e9, "MFLOP/s": 1e6}
_TIMES = {"s": 1.0, "ms": 1e-3, "µs": 1e-6}
_UNITS = {"B": 1, "kB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12}


def bench_document(result: BenchResult) -> Document:
    """All measurements row by row, with the verdict on the best row."""
    named = list(zip(labels(result.rows), result.rows, strict=True))
    models = ", ".join(dict.fromkeys(r.model for r in result.rows)) or "nothing"
    baselines = ", ".join(dict.fromkeys(r.baseline for r in result.rows))
    changes = tuple((c.name, ratio_text(c.before), ratio_text(c.after), c.change) for c in result.changes)
    measured = f"{models}, measured in turn with its baseline: {baselines}"
    return Document(
        kind="bench",
        title=models,
        subtitle=measured + ("; this run was interrupted" if result.interrupted else ""),
        verdict=_verdict([(r.name, r) for r in result.rows], result.gates),
        tiles=_tiles(result),
        warnings=_notes(result),
        sections=sections_of(
            section("", _speed_chart(named), _memory_chart(named)),
            gates_section(result.gates),
            section("Every row", _row_table(result.rows)),
            section("Not measured", tuple(reasons(result.rows))),
            *(section(f"Verdict: {v.title}", v.sentences) for v in result.verdicts),
            section("Memory of tensors at the peak of a step", _memory_table(named)),
            section("Energy and clocks", _energy_table(named)),
            section("Speed-up against the older result", Table(columns=_CHANGE_COLUMNS, rows=changes)),
            *(section(f"Linear layers by shape: {v.title}", _linear_table(v)) for v in result.verdicts),
        ),
        facts=_facts(result),
        command=result.command,
        versions=result.versions,
    )


def verdict_sentences(base: BenchRow, rows: Sequence[BenchRow], *, emulates_fp8: bool) -> Iterator[str]:
    """Conclusions from measured rows that share the baseline `base`, and reasons to doubt them."""
    if emulates_fp8 and any(r.format == "fp8" for r in rows):
        yield (
            "This device emulates fp8: codes are decoded to bf16 and multiplied there. Rows show numerics, memory and "
            "the cost of casts, but not the speed of a GPU with fp8 tensor cores (compute capability 8.9 or higher)."
        )
    yield from (_row_sentence(r, base) for r in rows if not r.is_baseline)
    yield from _few_rounds(rows)
    yield from _load_changes(base, rows)
    yield from _disturbances(rows)


def _row_sentence(row: BenchRow, base: BenchRow) -> str:
    assert row.ratio is not None
    interval = ratio_text(row.ratio)
    if row.ratio.low > 1:
        outcome = f"{row.name} is faster than {row.baseline}: {interval} times its speed"
    elif row.ratio.high < 1:
        outcome = f"{row.name} is slower than {row.baseline}: {interval} times its speed"
    else:
        outcome = f"{row.name} and {row.baseline} do not differ measurably in speed: {interval}"
    if row.numerics is None:
        return outcome + "."
    errors = f"outputs differ from fp32 by {share_text(row.numerics.output_error, 1)}"
    if row.numerics.gradient_error is not None:
        errors += f", gradients by {share_text(row.numerics.gradient_error, 1)}"
    if base.numerics is not None:
        errors += f" ({base.name}: {share_text(base.numerics.output_error, 1)})"
    return f"{outcome}; {errors}."


def _few_rounds(rows: Sequence[BenchRow]) -> Iterator[str]:
    timings = [r.timing for r in rows if r.timing and not r.is_baseline and r.timing.num_launches == 1]
    fewest = min((t.num_rounds for t in timings), default=_ENOUGH_ROUNDS)
    if fewest < _ENOUGH_ROUNDS:
        yield f"The intervals come from {plural(fewest, 'round')}; do not trust them with fewer than {_ENOUGH_ROUNDS}."


def _load_changes(base: BenchRow, rows: Sequence[BenchRow]) -> Iterator[str]:
    """Rows measured while the machine was slower or faster than for the baseline's own row."""
    assert base.timing is not None
    for r in rows:
        change = (r.baseline_median_s or base.timing.median_s) / base.timing.median_s
        if not 1 / _STEADY < change < _STEADY:
            yield (
                f"While {r.name} was measured, {base.name} took {change:.2f} times as long as in its own row: the "
                "machine's load changed. The speed-up accounts for that, but step times and tokens/s do not."
            )


def _disturbances(rows: Sequence[BenchRow]) -> Iterator[str]:
    """NVML observations that make times doubtful."""
    states = [r.gpu for r in rows if r.gpu is not None]
    strangers = sorted({pid for s in states for pid in s.foreign_processes})
    reasons = sorted({reason for s in states for reason in s.throttle_reasons})
    if strangers:
        yield f"Other processes used the GPU meanwhile ({', '.join(map(str, strangers))}): do not trust the times."
    if reasons:
        yield f"The GPU was throttled ({', '.join(reasons)}), so the times are too long."


def _best_speed(named: _Named) -> tuple[str, str, RatioRecord] | None:
    """(label, result in words, ratio) of the variant with the best ratio to its baseline, or None.

    A variant is only called fastest if its whole interval is above 1.
    """
    ratios = ((n, r.ratio) for n, r in named if r.ratio and not r.is_baseline and r.status == "ok")
    best = max(ratios, key=lambda found: (found[1].low > 1, found[1].value), default=None)
    if best is None:
        return None
    words = "fastest" if best[1].low > 1 else "slower here" if best[1].high < 1 else "not measurably faster"
    return best[0], words, best[1]


def _verdict(named: _Named, gates: Sequence[GateRecord]) -> Verdict:
    """Verdict "failed" if a gate fails, "passed" if a row is measurably faster than its baseline, else "not run"."""
    text, is_faster = "No row was compared with a baseline", False
    if best := _best_speed(named):
        name, word, ratio = best
        text = f"{name} is {word}: {ratio_text(ratio)} times the baseline's speed"
        is_faster = word == "fastest"
    if emulated := dict.fromkeys(r.format for _, r in named if r.emulated):
        text = f"{' and '.join(emulated)} is emulated here, so times say nothing about a GPU that computes it. {text}"
        is_faster = False
    if failed := failed_gates(gates):
        return Verdict(outcome="failed", text=f"{'; '.join(failed)}; {text}")
    return Verdict(outcome="passed" if is_faster else "not run", text=text)


def _tiles(result: BenchResult) -> tuple[Tile, ...]:
    """The fastest, the smallest and the most accurate variant."""
    variants = [r for r in result.rows if not r.is_baseline and r.status == "ok"]
    tiles = []
    if best := _best_speed([(r.name, r) for r in variants]):
        label = f"{best[1].capitalize()}, against the baseline"
        tiles.append(Tile(label=label, figure=ratio_text(best[2]), detail=best[0]))
    if smallest := min((r for r in variants if r.peak_memory), key=lambda r: r.peak_memory or 0, default=None):
        tiles.append(Tile(label="Least peak memory", figure=size_text(smallest.peak_memory), detail=smallest.name))
    exact = [(r.numerics.output_error, i) for i, r in enumerate(variants) if r.numerics]
    if exact:
        error, nearest = min(exact)[0], variants[min(exact)[1]]
        same = (r.numerics for r in result.rows if r.is_baseline and r.baseline == nearest.baseline)
        own = next((n.output_error for n in same if n), None)
        detail = f"{nearest.name}; the baseline, {nearest.baseline}, has {share_text(own, 1)}"
        tiles.append(Tile(label="Output error", figure=share_text(error, 1), detail=detail))
    return tuple(tiles)


def _facts(result: BenchResult) -> dict[str, str]:
    if not result.rows:
        return {"Took": duration_text(result.seconds)}
    first = next((r for r in result.rows if r.timing is not None), result.rows[0])
    facts = {
        "Device": first.device,
        "Model": f"{first.model}, {plural(first.layers, 'layer')}" if first.layers else first.model,
        "Weights": ", ".join(dict.fromkeys(r.weights for r in result.rows if r.weights)) or MISSING,
        "Baseline": ", ".join(dict.fromkeys(r.baseline for r in result.rows)),
    }
    if first.parallel is not None:
        processes = f"{first.processes}, {first.parallel}"
        facts["Processes"] = f"{processes}; batch and memory are per process, tokens/s over all"
    if result.peaks is not None:
        rates = {"bf16": result.peaks.bf16_flops, "fp32": result.peaks.fp32_flops, "fp8": result.peaks.fp8_flops}
        flops = [f"{name} {unit_text(rate, _FLOPS)}" for name, rate in rates.items() if rate is not None]
        facts["Measured peaks"] = ", ".join([*flops, f"copies {rate_text(result.peaks.bytes_per_s, 1)}"])
    if not any(r.gpu for r in result.rows):
        facts["Energy"] = "not available: there is no GPU, or nvidia-ml-py is not installed"
    return facts | {"Took": duration_text(result.seconds)}


def labels(rows: Sequence[BenchRow]) -> list[str]:
    """A label for each row: its name, plus mode and sizes if rows differ in them."""
    alike = len({r.place for r in rows}) == 1
    return [r.name if alike else f"{r.name}, {r.place}" for r in rows]


def reasons(rows: Sequence[BenchRow]) -> list[str]:
    """Why rows were not measured, grouped by reason."""
    labels_by_reason: dict[str, list[str]] = {}
    for label, r in zip(labels(rows), rows, strict=True):
        if r.reason:
            labels_by_reason.setdefault(f"{r.status}, {r.reason}", []).append(label)
    return [f"{'; '.join(names)}: {reason}" for reason, names in labels_by_reason.items()]


def _notes(result: BenchResult) -> tuple[str, ...]:
    """Notes for the reader, including models whose weights are only partly from the checkpoint."""
    partly = dict.fromkeys((r.model, r.weights.partition(",")[0]) for r in result.rows if "random, else" in r.weights)
    drawn = (
        f"{model}: {words}, so errors of outputs and gradients are not those of the real model"
        for model, words in partly
    )
    return (*drawn, *result.notes)


# Heading and cell text of each column in the table of rows.
COLUMNS: dict[str, Callable[[BenchRow], str]] = {
    "Configuration": lambda r: r.name,
    "Mode": lambda r: r.mode,
    "Batch": lambda r: f"{r.batch} x {r.seq}",
    "Compiled": lambda r: r.compiled,
    "Step": lambda r: unit_text(r.timing.median_s, _TIMES) if r.timing else r.status,
    "Tokens/s": lambda r: f"{r.tokens_per_s:,.0f}" if r.tokens_per_s else MISSING,
    "Speed-up": lambda r: "baseline" if r.is_baseline else ratio_text(r.ratio),
    "Peak": lambda r: size_text(r.peak_memory),
    "Saved": lambda r: size_text(r.memory.saved_bytes if r.memory and r.mode == "train" else None),
    "Output err.": lambda r: share_text(r.numerics.output_error if r.numerics else None, 1),
    "Grad. err.": lambda r: share_text(r.numerics.gradient_error if r.numerics else None, 1),
    "Emulated": lambda r: ("yes" if r.emulated else "no") if r.status == "ok" else MISSING,
}
# Columns shown only if rows differ in them.
_OPTIONAL = ("Mode", "Batch", "Compiled", "Grad. err.", "Saved")


def _row_table(rows: Sequence[BenchRow]) -> Table:
    cells = {name: [cell(r) for r in rows] for name, cell in COLUMNS.items()}
    shown = [name for name in COLUMNS if name not in _OPTIONAL or len(set(cells[name])) > 1]
    return Table(columns=tuple(shown), rows=tuple(zip(*(cells[name] for name in shown), strict=True)), sortable=True)


def _memory_table(named: _Named) -> Table:
    """The peak memory of each row, with the share of each part."""
    rows = []
    for label, r in named:
        if r.memory is not None:
            parts, whole = dataclasses.asdict(r.memory.parts), r.memory.parts.total
            by_part = ", ".join(f"{name} {share_text(size, whole)}" for name, size in parts.items() if size)
            rows.append((label, size_text(r.memory.peak_bytes), by_part))
    return Table(columns=("Configuration", "Peak", "<By part"), rows=tuple(rows))


def _energy_table(named: _Named) -> Table:
    rows = []
    for label, r in named:
        if r.gpu is not None:
            joules = r.energy.joules_per_step if r.energy else None
            energy = "not available" if joules is None else f"{joules:.3g} J"
            numbers = map(number_text, (r.gpu.sm_clock_mhz, r.gpu.power_w, r.gpu.power_limit_w))
            others = ", ".join(map(str, r.gpu.foreign_processes))
            rows.append((label, energy, *numbers, ", ".join(r.gpu.throttle_reasons), others))
    columns = ("Configuration", "Energy/step", "SM MHz", "W", "Limit W", "<Throttled by", "<Other processes")
    return Table(columns=columns, rows=tuple(rows))


def _linear_table(verdict: VerdictRecord) -> Table:
    """The Linears of a model by shape, with the roofline's predictions unless fp8 is emulated."""
    predicted = any(g.gain is not None for g in verdict.gemms)
    rows = []
    for g in verdict.gemms:
        cells = [g.names[0], str(g.count), str(g.n), str(g.k), count_text(g.m), f"{g.flops / 1e9:.3g}", g.bound]
        if predicted:
            cells += [MISSING if g.gain is None else f"{g.gain:.2f}", count_text(g.break_even_tokens)]
        rows.append(tuple(cells))
    columns = ("First of its shape", "Count", "N", "K", "Tokens", "GFLOP", "<Bound by")
    more = ("fp8 gain", "Break-even tokens") if predicted else ()
    return Table(columns=(*columns, *more), rows=tuple(rows), has_names=True)


def _speed_chart(named: _Named) -> Chart | None:
    """Speed-up of every variant over its baseline, with 95 % intervals; None without variants."""
    bars = [
        Bar(name=n, text=ratio_text(r.ratio), lengths=(r.ratio.value,), interval=(r.ratio.low, r.ratio.high))
        for n, r in named
        if r.ratio and not r.is_baseline
    ]
    words = "Baseline time over time, with 95 % intervals; above 1 is faster."
    return bar_chart("Speed-up over the baseline", words, bars, x_label="speed-up", reference=1.0)


def _memory_chart(named: _Named) -> Chart | None:
    """Peak memory of every row by part, weights first; None if no memory was measured."""
    shown = [(n, dataclasses.asdict(r.memory.parts)) for n, r in named if r.memory]
    if not shown:
        return None
    names = list(shown[0][1])
    present = [name for name in names if any(p[name] for _, p in shown)]
    unit = size_text(max(sum(p.values()) for _, p in shown)).split()[1]
    bars = [
        Bar(name=n, text=size_text(sum(p.values())), lengths=tuple(float(p[name]) for name in present))
        for n, p in shown
    ]
    return bar_chart(
        "Memory of tensors at the peak",
        "What uses memory at the peak of a step.",
        bars,
        x_label=unit,
        parts={name: f"series-{i}" for i, name in enumerate(names) if name in present},
        tick=lambda size: f"{size / _UNITS[unit]:g}",
    )


def compare_benches(benches: Sequence[BenchResult], names: Sequence[str]) -> Document:
    """Several benches: bars of all rows in one chart, and the numbers of each row side by side."""
    named = [(f"{r.name}: {n}", r) for n, b in zip(names, benches, strict=True) for r in b.rows]
    return compare_document(
        names,
        [_figures(b) for b in benches],
        [_verdict_in_full(b) for b in benches],
        choice=_verdict(named, ()).text,
        charts=(_speed_chart(named), _memory_chart(named)),
    )


def _verdict_in_full(bench: BenchResult) -> Verdict:
    verdict = _verdict([(r.name, r) for r in bench.rows], bench.gates)
    sentences = " ".join(sentence for v in bench.verdicts for sentence in v.sentences)
    return Verdict(outcome=verdict.outcome, text=sentences or verdict.text)


def _figures(bench: BenchResult) -> Mapping[str, str]:
    """Settings of a bench, then speed-up and peak memory of every row."""

    def all_of(values: Iterable[str]) -> str:
        return name_list(list(dict.fromkeys(v for v in values if v))) or MISSING

    figures = {
        "model": all_of(r.model for r in bench.rows),
        "device": all_of(r.device for r in bench.rows if r.timing),
        "baseline": all_of(r.baseline for r in bench.rows),
        "weights": all_of(r.weights for r in bench.rows),
        "measured": plural(sum(r.status == "ok" for r in bench.rows), "row"),
    }
    for r in bench.rows:
        speed = "baseline" if r.is_baseline else ratio_text(r.ratio) if r.status == "ok" else r.status
        figures[f"{r.name}, {r.place}: speed-up"] = speed
        figures[f"{r.name}, {r.place}: peak memory"] = size_text(r.peak_memory)
    return figures
