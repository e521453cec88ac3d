"""A whole bench: options become cases, cases are grouped by baseline, and each group is measured."""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from lpconv.bench.cases import PLAIN, Case, baseline_of, check_seq, expand, parallel_of
from lpconv.bench.nvml import GpuMonitor, find_monitor
from lpconv.bench.options import BenchOptions
from lpconv.bench.rows import BenchRun
from lpconv.bench.team import Child
from lpconv.data import num_positions
from lpconv.errors import UnsupportedError, UsageError
from lpconv.forms.reader import open_readable
from lpconv.machine import may_have_gpu
from lpconv.models.presets import PRESETS
from lpconv.models.whole import check_complete
from lpconv.options import check
from lpconv.progress import Progress, Silent
from lpconv.results import BenchResult, PeakRecord, from_json

# Model to measure if none is named, its number of layers, and the reason.
_ON_GPU = ("bert-large", None, "it fits any GPU, and its small shapes are the hardest for fp8")
_ON_CPU = ("bert-base", 2, "2 of its 12 layers take a CPU only a moment")
# (batch, sequence length) by default.
_GPU_SIZE, _CPU_SIZE, _DEMO_SIZE = (8, 512), (1, 128), (4, 128)


def choose_model(
    model: str | None, layers: int | None, device: dict[str, Any], positions: int | None = None
) -> tuple[Case, tuple[str, ...]]:
    """A template case, and notes for the user about automatic choices.

    `device` is the child's description of the machine: ``device`` (torch's name) and ``name``. `positions` is the
    largest number of tokens that the model takes, if known.
    """
    is_cpu = device["device"] == "cpu"
    notes: tuple[str, ...] = ()
    if model is None:
        model, usual_layers, why = _ON_CPU if is_cpu else _ON_GPU
        layers = layers or usual_layers
        notes = (f"no model was given, so {model} is measured on {device['name']}: {why}",)
    batch, seq = _DEMO_SIZE if model == "demo" else _CPU_SIZE if is_cpu else _GPU_SIZE
    case = Case(
        model=model, layers=layers, format="bf16", method=PLAIN, mode="infer", optimizer=None, batch=batch,
        seq=min(seq, positions or seq), compiled="blocks", device=device["device"],
    )  # fmt: skip
    return case, notes


def bench(
    options: BenchOptions,
    *,
    progress: Progress | None = None,
    on_result: Callable[[BenchResult], object] = lambda result: None,
) -> BenchResult:
    """Measure every case of `options`. `on_result` gets the result so far after every row, marked as interrupted.

    A case that does not fit in memory, lacks a library or fails becomes a row with that status, and the others
    continue. Raises UsageError and InputError for a request that no case can meet, UnsupportedError for a missing
    device.
    """
    check(options)
    if (options.device or "").startswith("cuda") and not may_have_gpu():
        raise UnsupportedError(f"--device {options.device}: this machine has no GPU", hint="pass --device cpu")
    progress = progress or Silent()
    positions = None
    if options.model is not None and (options.model not in PRESETS or Path(options.model).is_dir()):
        checkpoint = open_readable(options.model)
        check_complete(checkpoint, allow_missing=options.allow_missing)
        checkpoint.check_promised()
        positions = num_positions(checkpoint.config.get("text_config") or checkpoint.config)
        for seq in options.seqs:
            check_seq(seq, positions)
    # Finds unknown names before any process starts.
    _groups(_cases(options, {"device": "cpu", "name": ""})[0], options)
    with Child() as child:
        device = child.ask("look", device=options.device, processes=options.num_processes)
        if options.compiled == "graphs" and device["device"] == "cpu":
            raise UnsupportedError(
                "--compile graphs needs a GPU, because it records CUDA graphs",
                hint="pass --compile blocks or --compile model",
            )
        cases, notes = _cases(options, device, positions)
        for note in notes:
            progress.message(note)
        run = BenchRun(
            options=options,
            progress=progress,
            on_result=on_result,
            notes=notes,
            monitor=_monitor(device),
            peaks=_peaks(child, cases[0]),
            idle=child,
        )
        for base_case, variants in _groups(cases, options).items():
            run.measure_group(base_case, variants)
        return run.result(interrupted=False)


def _cases(
    options: BenchOptions, device: dict[str, Any], positions: int | None = None
) -> tuple[list[Case], tuple[str, ...]]:
    """All cases to measure on a device, and notes for the user."""
    template, notes = choose_model(options.model, options.layers, device, positions)
    parallel = parallel_of(options.num_processes, options.parallel, modes=options.modes, compiled=options.compiled)
    template = dataclasses.replace(
        template, compiled=options.compiled, threads=options.threads, seed=options.seed, device=device["device"],
        processes=options.num_processes, parallel=parallel,
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
        raise UsageError("there is nothing to measure", hint="pass at least one --format and one --mode")
    return cases, notes


def _peaks(child: Child, case: Case) -> PeakRecord:
    """Peak FLOP/s and bytes/s of one process, with the threads of a case and the other processes idle."""
    peaks = child.ask("peaks", device=case.device, threads=case.threads, processes=case.processes)
    return from_json(PeakRecord, peaks)


def _monitor(device: dict[str, Any]) -> GpuMonitor | None:
    return find_monitor(device["index"]) if device["device"] != "cpu" else None


def _groups(cases: Sequence[Case], options: BenchOptions) -> dict[Case, list[Case]]:
    """Cases grouped by their baseline, without the baseline itself."""
    groups: dict[Case, list[Case]] = {}
    for case in cases:
        base = baseline_of(case, options.baseline, compiled=options.compiled)
        groups.setdefault(base, []).extend([case] if case != base else [])
    return groups
