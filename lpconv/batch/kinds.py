"""The kinds of job: the settings that each takes, the options they make, and how a finished output is recognised.

The options are the records that the commands themselves use. How the jobs are run is in `runners`, since that loads
models; nothing here does.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lpconv.batch.fields import Field
from lpconv.batch.settings import BENCH_FIELDS, CONVERT_FIELDS, FINETUNE_FIELDS, PROBE_FIELDS
from lpconv.bench.interleave import Effort
from lpconv.bench.options import BenchOptions
from lpconv.bench.outcome import problem
from lpconv.bench.saved import read_bench
from lpconv.checkpoint.contents import read_json
from lpconv.convert.options import ConvertOptions, with_defaults
from lpconv.probe.options import ProbeOptions
from lpconv.results import FinetuneResult, from_json
from lpconv.train.gates import gate_problem
from lpconv.train.options import FinetuneOptions, check_options
from lpconv.train.recipes import arithmetic

__all__ = ["BENCH_FILE", "KINDS", "BenchSettings", "JobOptions", "Kind", "ProbeSettings"]

BENCH_FILE = "bench.json"
_ARITHMETIC = ("recipe", "precision", "method", "optimizer", "rounding", "loss_scale", "loss_scale_floor")
# What `lpconv bench` calls them, and what its options do.
_BENCH_NAMES = {"format": "formats", "method": "methods", "mode": "modes", "optimizer": "optimizers",
                "batch": "batches", "seq": "seqs", "compile": "compiled"}  # fmt: skip
_EFFORT = {"min_iters": "min_iterations", "min_time": "min_seconds", "rounds": "rounds", "launches": "launches"}


@dataclass(frozen=True, kw_only=True)
class BenchSettings(BenchOptions):
    """A bench, and what it is held against: gates, and the rows of an older result."""

    compare: str | None = None
    gates: tuple[str, ...] = ()
    resume: bool = False
    force: bool = False


@dataclass(frozen=True, kw_only=True)
class ProbeSettings(ProbeOptions):
    """A probe, and whether it also writes scales."""

    calibrate: bool = False
    resume: bool = False
    force: bool = False


JobOptions = ConvertOptions | FinetuneOptions | BenchSettings | ProbeSettings


@dataclass(frozen=True, kw_only=True)
class Kind:
    """One kind of job.

    `options` makes its options of the settings in a manifest, or raises UsageError; `words` are the settings that
    matter most. A finished output holds the file `proof`, and `accepts` says whether that met its gates. `is_exact`
    says that another run writes the same bytes, so that the lock pins them.
    """

    fields: Mapping[str, Field]
    options: Callable[[dict[str, Any]], JobOptions]
    words: Callable[[Any], str]
    proof: str
    accepts: Callable[[Path], bool]
    is_exact: bool = False


def _convert_options(settings: dict[str, Any]) -> ConvertOptions:
    return with_defaults(ConvertOptions(**settings))[0]


def _finetune_options(settings: dict[str, Any]) -> FinetuneOptions:
    parts = {name: settings[name] for name in _ARITHMETIC if name in settings}
    rest = {name: value for name, value in settings.items() if name not in _ARITHMETIC}
    options = FinetuneOptions(arithmetic=arithmetic(**parts), **rest)
    check_options(options)
    return options


def _bench_options(settings: dict[str, Any]) -> BenchSettings:
    effort = Effort(**{_EFFORT[name]: value for name, value in settings.items() if name in _EFFORT})
    rest = {_BENCH_NAMES.get(name, name): value for name, value in settings.items() if name not in _EFFORT}
    return BenchSettings(effort=effort, **rest)


def _probe_options(settings: dict[str, Any]) -> ProbeSettings:
    data = settings.get("data")
    return ProbeSettings(**settings | {"data": Path(data) if data else None})


def _finetune_words(options: FinetuneOptions) -> str:
    return options.arithmetic.name + (f" beside {options.twin}" if options.twin != "none" else "")


def _bench_words(options: BenchSettings) -> str:
    return " ".join((*options.formats, *options.methods, *options.modes))


KINDS: dict[str, Kind] = {
    "convert": Kind(
        fields=CONVERT_FIELDS,
        options=_convert_options,
        words=lambda options: f"{options.method} {options.format}",
        proof="SHA256SUMS",
        accepts=lambda proof: True,  # what failed its gates was never published
        is_exact=True,
    ),
    "finetune": Kind(
        fields=FINETUNE_FIELDS,
        options=_finetune_options,
        words=_finetune_words,
        proof="report.json",
        accepts=lambda proof: gate_problem(from_json(FinetuneResult, read_json(proof))) is None,
    ),
    "bench": Kind(
        fields=BENCH_FIELDS,
        options=_bench_options,
        words=_bench_words,
        proof=BENCH_FILE,
        accepts=lambda proof: not (result := read_bench(proof)).interrupted and problem(result) is None,
    ),
    "probe": Kind(
        fields=PROBE_FIELDS,
        options=_probe_options,
        words=lambda options: f"{options.steps} steps",
        proof="probe.json",
        accepts=lambda proof: True,
    ),
}
