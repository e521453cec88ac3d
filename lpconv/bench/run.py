"""A whole bench: options become cases, cases are grouped by baseline, and each group is measured."""

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from lpconv.bench.nvml import find_monitor
from lpconv.bench.options import BENCH_FORMATS, CODES, LAYER_KEYS, PLAIN, SCALED, BenchOptions, Case, check_layers
from lpconv.bench.rows import BenchRun
from lpconv.bench.team import Child
from lpconv.data.texts import check_reads_text, check_seq_len, num_positions
from lpconv.errors import UnsupportedError, UsageError
from lpconv.layouts.reader import open_readable
from lpconv.machine import may_have_gpu
from lpconv.models.presets import PRESETS
from lpconv.models.whole import check_complete
from lpconv.options import PARALLEL, check, with_keywords
from lpconv.progress import Progress, Silent
from lpconv.results import BenchResult
from lpconv.storage.checkpoint import Checkpoint
from lpconv.storage.header import quantization_method

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


@with_keywords(BenchOptions)
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
    checkpoint, positions = None, None
    if options.model is not None and (options.model not in PRESETS or Path(options.model).is_dir()):
        checkpoint = open_readable(options.model, revision=options.revision)
        check_reads_text(checkpoint.config, hint=f"choose a preset of similar size: {', '.join(PRESETS)}")
        check_complete(checkpoint, allow_missing=options.allow_missing)
        checkpoint.check_promised()
        positions = num_positions(checkpoint.config)
        for seq in options.seqs:
            check_seq_len(seq, positions)
    preset = PRESETS.get(options.model or _ON_GPU[0])
    sizes = checkpoint.config if checkpoint is not None else preset.settings if preset else {}
    check_layers(options.layers, next((n for key in LAYER_KEYS if isinstance(n := sizes.get(key), int)), None))
    cases, _ = cases_of(options, {"device": "cpu", "name": ""})  # refuses options that do not fit
    missing = [case.lacks_peer() for case in cases]
    if all(missing) and missing[0] is not None:
        raise missing[0]
    if CODES in options.formats:
        _check_codes(options, checkpoint)
    with Child() as child:
        device = child.ask("look", device=options.device, processes=options.num_processes)
        if options.compiled == "graphs" and device["device"] == "cpu":
            raise UnsupportedError(
                "--compile graphs needs a GPU, because it records CUDA graphs",
                hint="pass --compile blocks or --compile model",
            )
        cases, notes = cases_of(options, device, positions)
        for note in notes:
            progress.message(note)
        run = BenchRun(
            options=options,
            progress=progress,
            on_result=on_result,
            notes=notes,
            monitor=find_monitor(device["index"]) if device["device"] != "cpu" else None,
            # Of one process, with the threads of a case and the other processes idle.
            peaks=child.ask("peaks", device=cases[0].device, threads=options.threads, processes=options.num_processes),
            idle=child,
        )
        groups = _groups(cases, options)
        num_measured = options.effort.launches * sum(max(len(variants), 1) for variants in groups.values())
        progress.start("measuring", num_measured, unit="cases")
        for base_case, variants in groups.items():
            run.measure_group(base_case, variants)
        return run.result(interrupted=False)


def cases_of(
    options: BenchOptions, device: dict[str, Any], positions: int | None = None
) -> tuple[list[Case], tuple[str, ...]]:
    """All cases to measure on a device, those that share a baseline together, and notes for the user.

    A format that no asked method applies to runs as its default. Raises UsageError for options that do not fit together
    and if there is no case.
    """
    template, notes = choose_model(options.model, options.layers, device, positions)
    template = dataclasses.replace(
        template, compiled=options.compiled, threads=options.threads, seed=options.seed, device=device["device"],
        processes=options.num_processes, parallel=parallel_of(options),
        revision=options.revision,
    )  # fmt: skip
    for method in options.methods:
        able = [name for name, methods in BENCH_FORMATS.items() if method in methods]
        if not {*able} & {*options.formats}:
            raise UsageError(
                f"--method {method} does not apply to format {', '.join(options.formats)}",
                hint=f"it is for --format {' or '.join(able)}",
            )
    batches, seqs = options.batches or (template.batch,), options.seqs or (template.seq,)
    runs = [(name, m) for name in dict.fromkeys(options.formats) for m in _methods_of(name, options.methods)]
    cases = [
        dataclasses.replace(
            template, format=name, method=method, mode=mode, optimizer=optimizer, batch=batch, seq=seq,
            compiled=_compiled(template, name, method),
        )
        for mode, batch, seq in itertools.product(options.modes, batches, seqs)
        for name, method in runs
        for optimizer in (options.optimizers if mode == "train" else (None,))
    ]  # fmt: skip
    if not cases:
        raise UsageError("there is nothing to measure", hint="pass at least one --format and one --mode")
    return cases, notes


def _check_codes(options: BenchOptions, checkpoint: Checkpoint | None) -> None:
    """Raise UnsupportedError if codes are to be trained, or if the model stores none."""
    if "train" in options.modes:
        raise UnsupportedError(
            "weights that are kept as codes cannot be trained", hint="measure them with --mode infer"
        )
    if checkpoint is None or quantization_method(checkpoint.config) is None:
        name = f"`{options.model}`" if options.model else "the default model"
        raise UnsupportedError(
            f"{name} stores no codes",
            hint="convert it first: `lpconv convert MODEL --method unit --format e4m3fn`",
        )


def _compiled(template: Case, format_name: str, method: str) -> str:
    """Scaled tensors cross the border of a compiled block in neither direction, and compiling a whole model of them
    takes a CPU minutes; codes are not compiled."""
    if format_name == CODES:
        return "off"
    if method not in SCALED or template.compiled == "off":
        return template.compiled
    return "off" if template.device == "cpu" else "model"


def _methods_of(name: str, asked: Sequence[str]) -> list[str]:
    possible = BENCH_FORMATS[name]
    default = next(iter(possible))
    chosen = [m for m in dict.fromkeys(asked) if m in possible]
    if default == PLAIN:
        return [PLAIN, *(m for m in chosen if m != PLAIN)]
    return chosen or [default]


def parallel_of(options: BenchOptions) -> str | None:
    """How the processes work together: as asked, else by DDP; None for one process.

    Raises UsageError for combinations that do not work.
    """
    if options.num_processes == 1:
        if options.parallel is not None:
            raise UsageError(
                f"--parallel {options.parallel} needs more than one process",
                hint="add --processes 2, or start with torchrun",
            )
        return None
    if options.compiled == "graphs":
        raise UsageError("CUDA graphs cannot be measured with several processes", hint="pass --compile blocks")
    if options.parallel == "fsdp2" and "infer" in options.modes:
        raise UsageError(
            "--parallel fsdp2 shards trained weights, not codes for inference",
            hint="pass --mode train, or --parallel ddp to run independent copies",
        )
    return options.parallel or PARALLEL[0]


def _groups(cases: Sequence[Case], options: BenchOptions) -> dict[Case, list[Case]]:
    """Cases grouped by their baseline, without the baseline itself."""
    groups: dict[Case, list[Case]] = {}
    for case in cases:
        base = baseline_of(case, options.baseline, compiled=options.compiled)
        groups.setdefault(base, []).extend([case] if case != base else [])
    return groups


def baseline_of(case: Case, name: str, *, compiled: str) -> Case:
    """The case that `case` is compared with: a 16- or 32-bit format `name`, with ``+compile`` where it is compiled.

    It is compiled as `compiled` says, and by block where that is "off".
    """
    format_name, _, wants_compile = name.partition("+")
    how = "off" if not wants_compile else compiled if compiled != "off" else "blocks"
    optimizer = "adamw" if case.mode == "train" else None
    return dataclasses.replace(case, format=format_name, method=PLAIN, optimizer=optimizer, compiled=how)
