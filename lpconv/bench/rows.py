"""The rows of a bench: a baseline and its variants, by launch, with two cases in memory at a time."""

import dataclasses
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from lpconv.bench.interleave import Samples, interleave, ratio_over_launches, timing_of
from lpconv.bench.nvml import Nvml, measure_energy
from lpconv.bench.options import PLAIN, BenchOptions, Case
from lpconv.bench.roofline import Gemm, roofline_verdict
from lpconv.bench.team import Child, Team
from lpconv.errors import InputError, LpconvError, ResourceError, UnsupportedError, UsageError
from lpconv.machine import load_average, usable_cores
from lpconv.options import fields_of_run
from lpconv.progress import Progress
from lpconv.report.numbers import name_list, plural
from lpconv.results import BenchResult, BenchRow, EnergyRecord, PeakRecord, VerdictRecord
from lpconv.results.bench import BenchCase
from lpconv.results.documents import fields_from

OK, SKIPPED, TOO_LARGE, FAILED = "ok", "skipped", "too large", "failed"
_BUSY = 0.25  # share of the cores that other programs may use unmentioned
MEMORY_SHARE = 0.9  # share of free memory; two cases built at once get half of it each
_COMPILED = {
    "off": "eager", "blocks": "compiled by block", "model": "compiled", "graphs": "compiled with CUDA graphs",
}  # fmt: skip
_NO_NVML = "there is no GPU, or nvidia-ml-py is not installed (pip install nvidia-ml-py)"


@dataclass(kw_only=True)
class BenchRun:
    """The rows so far, by (baseline, case), and the tools to measure more."""

    options: BenchOptions
    progress: Progress
    on_result: Callable[[BenchResult], object]
    notes: tuple[str, ...]
    monitor: Nvml | None
    peaks: PeakRecord
    idle: Child | None
    rows: dict[tuple[Case, Case], BenchRow] = field(default_factory=dict)
    verdicts: list[VerdictRecord] = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=dict)
    start: float = field(default_factory=time.perf_counter)
    load: float = field(default_factory=load_average)

    def result(self, *, interrupted: bool) -> BenchResult:
        """The result so far."""
        settings = dataclasses.asdict(self.options)
        return BenchResult(
            rows=self._ordered(),
            peaks=self.peaks,
            verdicts=tuple(self.verdicts),
            notes=(*self.notes, *self._load_notes(), *self._launch_notes()),
            options={k: v for k, v in settings.items() if k not in fields_of_run(BenchOptions)},
            versions=self.versions,
            command=self.options.command,
            seconds=time.perf_counter() - self.start,
            interrupted=interrupted,
        )

    def _load_notes(self) -> Iterator[str]:
        """A note if other programs were running at the start, or more than this bench needs at the end."""
        before, after, cores = self.load, load_average(), len(usable_cores())
        if before > _BUSY * cores or after > (1 + _BUSY) * cores:
            loads = f"load average {before:.1f} at the start and {after:.1f} at the end, on {plural(cores, 'core')}"
            yield f"the machine was busy ({loads}), so times are too long and vary"

    def _launch_notes(self) -> Iterator[str]:
        """Notes about intervals that are very wide, or that lack the differences between launches."""
        wanted = self.options.effort.launches
        if wanted == 2:
            yield "intervals over two launches reach 12.7 standard errors to both sides; use --launches 3 or more"
        fewer = [f"{r.name}, {r.place}" for r in self._ordered() if r.timing and r.timing.num_launches < wanted]
        if fewer:
            yield f"measured in fewer than {wanted} launches, so with too narrow intervals: {name_list(fewer)}"

    def _ordered(self) -> tuple[BenchRow, ...]:
        """The rows by group, with the baseline before its variants even if it was measured later."""
        groups = list(dict.fromkeys(base for base, _ in self.rows))
        order = sorted(self.rows, key=lambda key: (groups.index(key[0]), key[1] != key[0]))
        return tuple(self.rows[key] for key in order)

    def measure_group(self, base_case: Case, variants: Sequence[Case]) -> None:
        """Measure a baseline and its variants, add their rows, and add the verdict on them."""
        group = _Group(case=base_case)
        for number in range(1, self.options.effort.launches + 1):
            with self._team() as base:
                group.team, group.is_built, group.is_measured = base, False, False
                again = f", launch {number}" if number > 1 else ""
                work = "building" if base_case.compiled == "off" else "building and compiling"
                self.progress.message(f"{group.title}{again}: {work} {group.name}")
                base.prepare(base_case, MEMORY_SHARE / 2 if variants else MEMORY_SHARE)
                try:
                    for case in variants:
                        self._measure_variant(group, case)
                        self.progress.advance(1)
                    self._measure_alone(group)
                except (UsageError, InputError, UnsupportedError):
                    raise
                except LpconvError as e:  # without a baseline no row can be compared
                    for case in [base_case, *variants]:
                        self._keep_error(group, case, e)
                    break
        rows = [row for (base, _), row in self.rows.items() if base == base_case]
        conclusion = roofline_verdict(rows, group.gemms, self.peaks)
        self.verdicts += [conclusion] if conclusion else []
        self.on_result(self.result(interrupted=True))

    def _team(self) -> Team:
        """Processes without a case: the one that examined the machine for the first team, new ones afterwards."""
        first, self.idle = self.idle or Child(), None
        return Team([first, *(Child() for _ in range(self.options.num_processes - 1))])

    def _measure_variant(self, group: "_Group", case: Case) -> None:
        """Measure the case and update its row. The first case of a launch also updates the baseline's row."""
        row = self.rows.get((group.case, case))
        if row is not None and row.status != OK:
            return  # it would fail again
        share = MEMORY_SHARE if group.is_built else MEMORY_SHARE / 2  # the first is built with the baseline
        with self._team() as team:
            team.prepare(case, share)
            group.wait()
            self.progress.message(f"{group.title}: {case.format} {case.method}".removesuffix(f" {PLAIN}"))
            try:
                _, facts = team.receive()
                base_samples, samples = interleave(group.team, team, self.options.effort.of_a_launch())
                row = row or self._row(group, case, team, facts)
            except (UsageError, InputError):  # these affect all rows
                raise
            except LpconvError as e:
                self._keep_error(group, case, e)
                return
            self._keep_baseline(group, base_samples)
            self._keep(group, case, row, base_samples, samples)

    def _measure_alone(self, group: "_Group") -> None:
        """Measure the baseline alone if it was not measured with any variant."""
        group.wait()
        if not group.is_measured:
            samples, _ = interleave(group.team, None, self.options.effort.of_a_launch())
            self._keep_baseline(group, samples)

    def _keep_baseline(self, group: "_Group", samples: Samples) -> None:
        if group.is_measured:
            return
        group.is_measured = True
        row = self.rows.get((group.case, group.case)) or self._row(group, group.case, group.team, group.facts)
        self._keep(group, group.case, row, samples, samples)

    def _keep(self, group: "_Group", case: Case, row: BenchRow, base_samples: Samples, samples: Samples) -> None:
        """Update the row with the times of all launches so far."""
        pairs = group.launches.setdefault(case, [])
        pairs.append((base_samples, samples))
        timing = timing_of([own for _, own in pairs], case.device)
        self.rows[group.case, case] = dataclasses.replace(
            row,
            ratio=ratio_over_launches([(base.medians, own.medians) for base, own in pairs]),
            tokens_per_s=case.processes * case.tokens / timing.median_s,
            timing=timing,
            baseline_median_s=timing_of([base for base, _ in pairs], case.device).median_s,
            recompiles=sum(own.recompiles for _, own in pairs),
            round_medians_s=tuple(t for _, own in pairs for t in own.medians),
        )
        self.on_result(self.result(interrupted=True))

    def _keep_error(self, group: "_Group", case: Case, error: LpconvError) -> None:
        """Add a row with the error, unless an earlier launch measured the case."""
        if (group.case, case) in self.rows:
            self.progress.message(f"{group.title}: {case.format} {case.method}: {error.message}")
            return
        self.rows[group.case, case] = self._bare_row(case, group, error)
        self.on_result(self.result(interrupted=True))

    def _row(self, group: "_Group", case: Case, team: Team, facts: dict[str, Any]) -> BenchRow:
        """A row with the values that are equal in every launch: `facts` of the model, memory and energy."""
        self.versions = facts["versions"]
        memory = team.ask("memory")
        return dataclasses.replace(
            self._bare_row(case, group),
            **facts,
            peak_memory=memory.peak_bytes,
            memory=memory,
            energy=self._energy(case, team),
            gpu=self.monitor.state({*group.team.pids, *team.pids, os.getpid()}) if self.monitor else None,
        )

    def _energy(self, case: Case, team: Team) -> EnergyRecord:
        if self.monitor is None:
            return EnergyRecord(unavailable=_NO_NVML)
        if case.processes > 1:
            return EnergyRecord(unavailable="it is only measured with one process on one GPU")
        return measure_energy(self.monitor, lambda seconds: int(team.ask("spin", seconds=seconds)), case.tokens)

    def _bare_row(self, case: Case, group: "_Group", error: LpconvError | None = None) -> BenchRow:
        return BenchRow(
            **fields_from(BenchCase, case) | {"layers": case.layers or 0},
            weights="",
            emulated=False,
            baseline=group.name,
            is_baseline=case == group.case,
            status=OK if error is None else _status(error),
            reason=None if error is None else f"{error.message} ({error.hint})" if error.hint else error.message,
            estimate_bytes=_estimate(error),
            command=self.options.command,
        )


@dataclass(kw_only=True)
class _Group:
    """Cases with a common baseline: the baseline's processes in this launch, and paired samples of all launches."""

    case: Case
    team: Team = field(init=False)
    gemms: tuple[Gemm, ...] = ()
    facts: dict[str, Any] = field(default_factory=dict)
    launches: dict[Case, list[tuple[Samples, Samples]]] = field(default_factory=dict)
    is_built: bool = False
    is_measured: bool = False

    @property
    def name(self) -> str:
        method = "" if self.case.method == PLAIN else f"{self.case.method} "
        return f"{self.case.format} {method}{_COMPILED[self.case.compiled]}"

    @property
    def title(self) -> str:
        return f"{self.case.model}, {self.case.mode}, batch {self.case.batch} x {self.case.seq}"

    def wait(self) -> None:
        """Wait until the baseline is built. Raises the error if that failed."""
        if not self.is_built:
            (self.gemms, self.facts), self.is_built = self.team.receive(), True


def _status(error: LpconvError) -> str:
    if isinstance(error, ResourceError):
        return TOO_LARGE
    return SKIPPED if isinstance(error, UnsupportedError) else FAILED


def _estimate(error: LpconvError | None) -> int | None:
    estimate = error.details.get("estimate_bytes") if error is not None else None
    return estimate if isinstance(estimate, int) else None
