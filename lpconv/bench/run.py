"""A whole bench: cases grouped by baseline, two of them in memory at a time, rows as they come."""

import dataclasses
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from lpconv.bench.cases import PLAIN, Case, baseline_of, expand, parallel_of
from lpconv.bench.child import Child
from lpconv.bench.defaults import choose_model
from lpconv.bench.gemm import Gemm
from lpconv.bench.interleave import Effort, Samples, interleave, ratio_of, timing_of
from lpconv.bench.nvml import GpuMonitor, find_monitor, measure_energy
from lpconv.bench.team import Team
from lpconv.bench.verdict import verdict
from lpconv.errors import InputError, LpconvError, ResourceError, UnsupportedError, UsageError
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
_COMPILED = {
    "off": "eager", "blocks": "compiled by block", "model": "compiled", "graphs": "compiled with CUDA graphs",
}  # fmt: skip
_NO_NVML = "there is no GPU, or nvidia-ml-py is not installed (pip install nvidia-ml-py)"


@dataclass(frozen=True, kw_only=True)
class BenchOptions:
    """What to measure. `model` None lets the device choose; `device` None takes the GPU where there is one.

    No `batches` or `seqs` means what suits the model and device. Several `processes` work together as `parallel` says.
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
    processes: int = 1
    parallel: str | None = None
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
        device = child.ask("look", device=options.device, processes=options.processes)
        if options.compiled == "graphs" and device["device"] == "cpu":
            raise UnsupportedError(
                "--compile graphs records CUDA graphs, and a CPU has none", hint="pass blocks or model"
            )
        cases, notes = _cases(options, device)
        for note in notes:
            told.message(note)
        run = _Run(
            options=options,
            told=told,
            on_result=on_result,
            notes=notes,
            monitor=monitor or _monitor(device),
            peaks=_peaks(child, cases[0]),
            idle=child,
        )
        for base_case, variants in _groups(cases, options).items():
            run.measure_group(base_case, variants)
        return run.result(interrupted=False)


def _cases(options: BenchOptions, device: dict[str, Any]) -> tuple[list[Case], tuple[str, ...]]:
    """Everything to measure on a device, and what to tell the user about it."""
    template, notes = choose_model(options.model, options.layers, device)
    parallel = parallel_of(options.processes, options.parallel, modes=options.modes, compiled=options.compiled)
    template = dataclasses.replace(
        template, compiled=options.compiled, threads=options.threads, seed=options.seed, device=device["device"],
        processes=options.processes, parallel=parallel,
    )  # fmt: skip
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
    if not cases:
        raise UsageError("nothing to measure", hint="name at least one format and one mode")
    return cases, notes


def compare_with_itself(case: Case, effort: Effort) -> RatioRecord:
    """Processes with the same case, two at a time and measured in turn: an honest interval contains 1."""
    launches = []
    for _ in range(effort.launches):
        with _team(case.processes) as one, _team(case.processes) as other:
            for team in (one, other):
                team.prepare(case, _MEMORY_SHARE / 2)
            for team in (one, other):
                team.receive()
            launches.append(interleave(one, other, effort.of_a_launch()))
    return ratio_of(launches)


def _team(processes: int, first: Child | None = None) -> Team:
    return Team([first or Child(), *(Child() for _ in range(processes - 1))])


def _peaks(child: Child, case: Case) -> PeakRecord:
    """Of one process with the threads that a case has, while the others do nothing."""
    found = child.ask("peaks", device=case.device, threads=case.threads, processes=case.processes)
    return from_json(PeakRecord, found)


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
    peaks: PeakRecord
    idle: Child | None
    rows: dict[tuple[Case, Case], BenchRow] = field(default_factory=dict)
    verdicts: list[VerdictRecord] = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=dict)
    start: float = field(default_factory=time.perf_counter)

    def result(self, *, interrupted: bool) -> BenchResult:
        """Everything so far."""
        settings = dataclasses.asdict(self.options)
        return BenchResult(
            rows=self._ordered(),
            peaks=self.peaks,
            verdicts=tuple(self.verdicts),
            notes=self.notes,
            options={k: v for k, v in settings.items() if k != "command"},
            versions=self.versions,
            command=self.options.command,
            seconds=time.perf_counter() - self.start,
            interrupted=interrupted,
        )

    def _ordered(self) -> tuple[BenchRow, ...]:
        """Group by group, and the baseline in front of its variants, even of those that came before it."""
        groups = list(dict.fromkeys(base for base, _ in self.rows))
        order = sorted(self.rows, key=lambda key: (groups.index(key[0]), key[1] != key[0]))
        return tuple(self.rows[key] for key in order)

    def measure_group(self, base_case: Case, variants: Sequence[Case]) -> None:
        """The baseline's row, a row for each variant, and the verdict on them."""
        group = _Group(case=base_case, name=_baseline_name(base_case))
        for number in range(1, self.options.effort.launches + 1):
            with self._team() as base:
                group.begin(base)
                again = f", launch {number}" if number > 1 else ""
                self.told.message(f"{group.title}{again}: building and compiling {group.name}")
                base.prepare(base_case, _MEMORY_SHARE / 2 if variants else _MEMORY_SHARE)
                try:
                    for case in variants:
                        self._measure_variant(group, case)
                    self._measure_alone(group)
                except (UsageError, InputError, UnsupportedError):
                    raise
                except LpconvError as e:  # there is no baseline, and so nothing is comparable
                    for case in [base_case, *variants]:
                        self._keep_error(group, case, e, _status(e))
                    break
        rows = [row for (base, _), row in self.rows.items() if base == base_case]
        found = verdict(rows, group.gemms, self.peaks)
        self.verdicts += [found] if found else []
        self.on_result(self.result(interrupted=True))

    def _team(self) -> Team:
        """Processes without a case: first the one that looked at the machine, and then new ones."""
        first, self.idle = self.idle, None
        return _team(self.options.processes, first)

    def _measure_variant(self, group: "_Group", case: Case) -> None:
        """The case's row; before that of a launch's first case, the baseline's from the same rounds."""
        row = self.rows.get((group.case, case))
        if row is not None and row.status != OK:
            return  # another launch would fail alike
        share = _MEMORY_SHARE if group.is_built else _MEMORY_SHARE / 2  # the first is built beside the baseline
        with self._team() as team:
            team.prepare(case, share)
            group.wait()
            self.told.message(f"{group.title}: {case.format} {case.method}".removesuffix(f" {PLAIN}"))
            try:
                description = team.receive()
                base_samples, samples = interleave(group.team, team, self.options.effort.of_a_launch())
                row = row or self._row(group, case, team, description)
            except UsageError:
                raise
            except LpconvError as e:
                self._keep_error(group, case, e, _status(e))
                return
            self._keep_baseline(group, base_samples)
            self._keep(group, case, row, base_samples, samples)

    def _measure_alone(self, group: "_Group") -> None:
        """The baseline by itself, where no variant has been measured beside it."""
        group.wait()
        if not group.is_measured:
            samples, _ = interleave(group.team, None, self.options.effort.of_a_launch())
            self._keep_baseline(group, samples)

    def _keep_baseline(self, group: "_Group", samples: Samples) -> None:
        if group.is_measured:
            return
        group.is_measured = True
        row = self.rows.get((group.case, group.case)) or self._row(group, group.case, group.team, group.description)
        self._keep(group, group.case, row, samples, samples)

    def _keep(self, group: "_Group", case: Case, row: BenchRow, base_samples: Samples, samples: Samples) -> None:
        """The row with the times of all launches so far."""
        pairs = group.launches.setdefault(case, [])
        pairs.append((base_samples, samples))
        timing = timing_of([own for _, own in pairs], case.device)
        self.rows[group.case, case] = dataclasses.replace(
            row,
            ratio=ratio_of(pairs),
            tokens_per_s=case.processes * case.tokens / timing.median_s,
            timing=timing,
            baseline_median_s=timing_of([base for base, _ in pairs], case.device).median_s,
            recompiles=sum(own.recompiles for _, own in pairs),
            round_medians_s=tuple(t for _, own in pairs for t in own.medians),
        )
        self.on_result(self.result(interrupted=True))

    def _keep_error(self, group: "_Group", case: Case, error: LpconvError, status: str) -> None:
        """A row that says what went wrong; one that an earlier launch measured stays."""
        if (group.case, case) in self.rows:
            self.told.message(f"{group.title}: {case.format} {case.method}: {error.message}")
            return
        self.rows[group.case, case] = self._bare_row(case, group, status, error)
        self.on_result(self.result(interrupted=True))

    def _row(self, group: "_Group", case: Case, team: Team, description: dict[str, Any]) -> BenchRow:
        """What is the same in every launch: what was built, its numerics, memory and energy."""
        self.versions = description["versions"]
        memory = from_json(MemoryRecord, team.ask("memory"))
        return dataclasses.replace(
            self._bare_row(case, group, OK, None),
            weights=description["weights"],
            layers=description["num_layers"],
            device=description["device"],
            emulated=description["emulated"],
            peak_memory=memory.peak_bytes,
            estimate_bytes=description["estimate_bytes"],
            memory=memory,
            numerics=from_json(NumericsRecord, description["numerics"]),
            energy=self._energy(case, team),
            gpu=self.monitor.state({*group.team.pids, *team.pids, os.getpid()}) if self.monitor else None,
            compile_s=description["compile_s"],
            versions=description["versions"],
        )

    def _energy(self, case: Case, team: Team) -> EnergyRecord:
        if self.monitor is None:
            return EnergyRecord(unavailable=_NO_NVML)
        if case.processes > 1:
            return EnergyRecord(unavailable="it is measured of one process on one GPU")
        return measure_energy(self.monitor, lambda seconds: int(team.ask("spin", seconds=seconds)), case.tokens)

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
            processes=case.processes,
            parallel=case.parallel,
            device=case.device,
            emulated=False,
            baseline=group.name,
            is_baseline=case == group.case,
            status=status,
            reason=None if error is None else f"{error.message} ({error.hint})" if error.hint else error.message,
            estimate_bytes=_estimate(error),
            command=self.options.command,
        )


@dataclass(kw_only=True)
class _Group:
    """Cases with one baseline: the baseline's processes of this launch, and the samples of all launches, in pairs."""

    case: Case
    name: str
    description: dict[str, Any] = field(default_factory=dict)
    launches: dict[Case, list[tuple[Samples, Samples]]] = field(default_factory=dict)
    is_built: bool = False
    is_measured: bool = False
    _team: Team | None = None

    def begin(self, team: Team) -> None:
        """A launch: new processes for the baseline."""
        self._team, self.is_built, self.is_measured = team, False, False

    @property
    def team(self) -> Team:
        """The processes of this launch."""
        assert self._team is not None
        return self._team

    @property
    def title(self) -> str:
        return f"{self.case.model}, {self.case.mode}, batch {self.case.batch} x {self.case.seq}"

    @property
    def gemms(self) -> tuple[Gemm, ...]:
        return tuple(from_json(Gemm, g) for g in self.description.get("gemms", ()))

    def wait(self) -> None:
        """Until the baseline is built; what went wrong with it is raised here."""
        if not self.is_built:
            self.description, self.is_built = self.team.receive(), True


def _baseline_name(case: Case) -> str:
    how = _COMPILED[case.compiled]
    return f"{case.format} {how}" if case.method == PLAIN else f"{case.format} {case.method} {how}"


def _status(error: LpconvError) -> str:
    if isinstance(error, ResourceError):
        return TOO_LARGE
    return SKIPPED if isinstance(error, UnsupportedError) else FAILED


def _estimate(error: LpconvError | None) -> int | None:
    found = error.details.get("estimate_bytes") if error is not None else None
    return found if isinstance(found, int) else None
