"""A whole bench: cases grouped by baseline, two child processes at a time, rows as they come."""

import dataclasses
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from lpconv.bench.cases import PLAIN, Case, baseline_of, expand
from lpconv.bench.child import Child
from lpconv.bench.defaults import choose_model
from lpconv.bench.gemm import Gemm
from lpconv.bench.interleave import Effort, Samples, interleave, ratio_of, timing_of
from lpconv.bench.nvml import GpuMonitor, find_monitor, measure_energy
from lpconv.bench.verdict import verdict
from lpconv.errors import LpconvError, ResourceError, UnsupportedError, UsageError
from lpconv.progress import Progress, Silent
from lpconv.results import (
    BenchResult,
    BenchRow,
    EnergyRecord,
    MemoryRecord,
    NumericsRecord,
    PeakRecord,
    RatioRecord,
    VerdictRecord,
    from_json,
)

__all__ = ["FAILED", "OK", "SKIPPED", "TOO_LARGE", "BenchOptions", "bench", "compare_with_itself"]

OK, SKIPPED, TOO_LARGE, FAILED = "ok", "skipped", "too large", "failed"
_MEMORY_SHARE = 0.9  # of what is free; two cases that are built at once get half of it each
_NO_NVML = "there is no GPU, or nvidia-ml-py is not installed (pip install nvidia-ml-py)"


@dataclass(frozen=True, kw_only=True)
class BenchOptions:
    """What to measure. `model` None lets the device choose; `device` None takes the GPU where there is one.

    `sizes` are pairs of batch and sequence length, none for what suits the model and device.
    """

    model: str | None = None
    formats: tuple[str, ...] = ("fp8",)
    methods: tuple[str, ...] = ()
    modes: tuple[str, ...] = ("infer",)
    optimizers: tuple[str, ...] = ("adamw",)
    batches: tuple[int, ...] = ()
    seqs: tuple[int, ...] = ()
    layers: int | None = None
    compiled: str = "blocks"
    baseline: str = "bf16+compile"
    device: str | None = None
    threads: int | None = None
    seed: int = 0
    effort: Effort
    command: str | None = None


def bench(
    options: BenchOptions,
    *,
    progress: Progress | None = None,
    on_result: Callable[[BenchResult], object] = lambda result: None,
    monitor: GpuMonitor | None = None,
) -> BenchResult:
    """Measure every case of `options`. `on_result` gets what there is after every row, marked as interrupted.

    A case that does not fit, misses a library or fails is a row that says so; the others go on. Raises UsageError and
    InputError for a request that no case can meet, UnsupportedError for a device that is not there.
    """
    told = progress or Silent()
    _groups(
        _cases(options, {"device": "cpu", "name": ""})[0], options
    )  # wrong names are found before any process starts
    with Child() as child:
        device = child.ask("look", device=options.device)
        cases, notes = _cases(options, device)
        for note in notes:
            told.message(note)
        run = _Run(
            options=options,
            told=told,
            on_result=on_result,
            notes=notes,
            monitor=monitor or _monitor(device),
            idle=child,
        )
        for base_case, variants in _groups(cases, options).items():
            run.measure_group(base_case, variants)
        return run.result(interrupted=False)


def _cases(options: BenchOptions, device: dict[str, Any]) -> tuple[list[Case], tuple[str, ...]]:
    """Everything to measure on a device, and what to tell the user about it."""
    template, notes = choose_model(options.model, options.layers, device)
    template = dataclasses.replace(
        template, compiled=options.compiled, threads=options.threads, seed=options.seed, device=device["device"]
    )
    sizes = [(batch, seq) for batch in options.batches or (template.batch,) for seq in options.seqs or (template.seq,)]
    cases = list(
        expand(
            template,
            formats=options.formats,
            methods=options.methods,
            modes=options.modes,
            optimizers=options.optimizers,
            sizes=sizes,
        )
    )
    return cases, notes


def compare_with_itself(case: Case, effort: Effort) -> RatioRecord:
    """Two processes with the same case, measured in turn: an honest interval contains 1."""
    with Child() as one, Child() as other:
        for child in (one, other):
            child.prepare(case, _MEMORY_SHARE / 2)
        for child in (one, other):
            child.receive()
        return ratio_of(*interleave(one, other, effort))


def _monitor(device: dict[str, Any]) -> GpuMonitor | None:
    return find_monitor(device["index"]) if device["device"] != "cpu" else None


def _groups(cases: Sequence[Case], options: BenchOptions) -> dict[Case, list[Case]]:
    """Cases by the baseline they share, without the baseline itself."""
    found: dict[Case, list[Case]] = {}
    for case in cases:
        base = baseline_of(case, options.baseline, compiled=options.compiled)
        found.setdefault(base, []).extend([case] if case != base else [])
    return found


@dataclass(kw_only=True)
class _Run:
    options: BenchOptions
    told: Progress
    on_result: Callable[[BenchResult], object]
    notes: tuple[str, ...]
    monitor: GpuMonitor | None
    idle: Child | None = None
    rows: list[BenchRow] = field(default_factory=list)
    verdicts: list[VerdictRecord] = field(default_factory=list)
    peaks: PeakRecord | None = None
    versions: dict[str, str] = field(default_factory=dict)
    start: float = field(default_factory=time.perf_counter)

    def result(self, *, interrupted: bool) -> BenchResult:
        """Everything so far."""
        settings = dataclasses.asdict(self.options)
        return BenchResult(
            rows=tuple(self.rows),
            peaks=self.peaks,
            verdicts=tuple(self.verdicts),
            notes=self.notes,
            options={k: v for k, v in settings.items() if k != "command"},
            versions=self.versions,
            command=self.options.command,
            seconds=time.perf_counter() - self.start,
            interrupted=interrupted,
        )

    def measure_group(self, base_case: Case, variants: Sequence[Case]) -> None:
        """The baseline's row, a row for each variant, and the verdict on them."""
        first = len(self.rows)
        with self._child() as base:
            if self.peaks is None:
                self.peaks = from_json(PeakRecord, base.ask("peaks", device=base_case.device))
            group = _Group(case=base_case, child=base, name=_baseline_name(base_case))
            self.told.message(f"{group.title}: building and compiling {group.name}")
            base.prepare(base_case, _MEMORY_SHARE / 2 if variants else _MEMORY_SHARE)
            try:
                for case in variants:
                    self._measure_variant(group, case)
                self._measure_alone(group)
            except ResourceError as e:  # the baseline does not fit, and so nothing is comparable
                for case in [base_case, *variants]:
                    self._keep(self._bare_row(case, group, TOO_LARGE, e))
                return
        found = verdict(self.rows[first:], group.gemms, self.peaks)
        self.verdicts += [found] if found else []

    def _child(self) -> Child:
        """A process without a case: the one that looked at the machine, and then new ones."""
        child, self.idle = self.idle or Child(), None
        return child

    def _measure_variant(self, group: "_Group", case: Case) -> None:
        """The case's row; before the first one, the baseline's from the same rounds."""
        share = _MEMORY_SHARE if group.description else _MEMORY_SHARE / 2  # the first is built beside the baseline
        with Child() as child:
            child.prepare(case, share)
            group.wait()
            self.told.message(f"{group.title}: {case.format} {case.method}")
            try:
                description = child.receive()
                base_samples, samples = interleave(group.child, child, self.options.effort)
                row = self._row(group, case, child, description, samples, base_samples)
            except UsageError:
                raise
            except LpconvError as e:
                self._keep(self._bare_row(case, group, _status(e), e))
                return
            if not group.measured:
                self._keep_baseline(group, base_samples)
            self._keep(row)

    def _measure_alone(self, group: "_Group") -> None:
        """The baseline by itself, where no variant has been measured beside it."""
        group.wait()
        if not group.measured:
            samples, _ = interleave(group.child, None, self.options.effort)
            self._keep_baseline(group, samples)

    def _keep_baseline(self, group: "_Group", samples: Samples) -> None:
        group.measured = True
        self._keep(self._row(group, group.case, group.child, group.description, samples, None))

    def _row(
        self,
        group: "_Group",
        case: Case,
        child: Child,
        description: dict[str, Any],
        samples: Samples,
        base_samples: Samples | None,
    ) -> BenchRow:
        self.versions = description["versions"]
        memory = from_json(MemoryRecord, child.ask("memory"))
        timing = timing_of(samples, case.device)
        one = RatioRecord(value=1.0, low=1.0, high=1.0)
        return dataclasses.replace(
            self._bare_row(case, group, OK, None),
            weights=description["weights"],
            layers=description["num_layers"],
            device=description["device"],
            emulated=description["emulated"],
            ratio=one if base_samples is None else ratio_of(base_samples, samples),
            tokens_per_s=case.tokens / timing.median_s,
            peak_memory=memory.peak_bytes,
            estimate_bytes=description["estimate_bytes"],
            timing=timing,
            memory=memory,
            numerics=from_json(NumericsRecord, description["numerics"]),
            energy=self._energy(case, child),
            gpu=self.monitor.state({group.child.pid, child.pid, os.getpid()}) if self.monitor else None,
            compile_s=description["compile_s"],
            recompiles=samples.recompiles,
            round_medians_s=tuple(samples.medians),
            versions=description["versions"],
        )

    def _energy(self, case: Case, child: Child) -> EnergyRecord:
        if self.monitor is None:
            return EnergyRecord(unavailable=_NO_NVML)
        return measure_energy(self.monitor, lambda seconds: int(child.ask("spin", seconds=seconds)), case.tokens)

    def _bare_row(self, case: Case, group: "_Group", status: str, error: LpconvError | None) -> BenchRow:
        return BenchRow(
            model=case.model,
            weights="",
            layers=case.layers or 0,
            format=case.format,
            method=case.method,
            optimizer=case.optimizer,
            compiled=case.compiled,
            mode=case.mode,
            batch=case.batch,
            seq=case.seq,
            device=case.device,
            emulated=False,
            baseline=group.name,
            is_baseline=case == group.case,
            status=status,
            reason=None if error is None else f"{error.message} ({error.hint})" if error.hint else error.message,
            estimate_bytes=_estimate(error),
            command=self.options.command,
        )

    def _keep(self, row: BenchRow) -> None:
        self.rows.append(row)
        self.on_result(self.result(interrupted=True))


@dataclass(kw_only=True)
class _Group:
    """Cases with one baseline: its process, what that said of itself once it was built, and whether it has its row."""

    case: Case
    child: Child
    name: str
    description: dict[str, Any] = field(default_factory=dict)
    measured: bool = False

    @property
    def title(self) -> str:
        return f"{self.case.model}, {self.case.mode}, batch {self.case.batch} x {self.case.seq}"

    @property
    def gemms(self) -> tuple[Gemm, ...]:
        return tuple(from_json(Gemm, g) for g in self.description.get("gemms", ()))

    def wait(self) -> None:
        """Until the baseline is built; what went wrong with it is raised here."""
        if not self.description:
            self.description = self.child.receive()


def _baseline_name(case: Case) -> str:
    how = {"off": "eager", "blocks": "compiled by block", "model": "compiled"}[case.compiled]
    return f"{case.format} {how}" if case.method == PLAIN else f"{case.format} {case.method} {how}"


def _status(error: LpconvError) -> str:
    if isinstance(error, ResourceError):
        return TOO_LARGE
    return SKIPPED if isinstance(error, UnsupportedError) else FAILED


def _estimate(error: LpconvError | None) -> int | None:
    found = error.details.get("estimate_bytes") if error is not None else None
    return found if isinstance(found, int) else None
