"""The kinds of job: the settings that each takes, the options they make, and how a finished output is recognised.

The options are the records that the commands themselves use. How the jobs are run is in `runners`, since that loads
models; nothing here does.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lpconv.bench.options import BenchOptions
from lpconv.bench.outcome import problem, read_bench
from lpconv.checkpoint.contents import read_json
from lpconv.convert.options import ConvertOptions, settings_of
from lpconv.options import Declared, make, options_of
from lpconv.probe.options import ProbeOptions
from lpconv.results import FinetuneResult, from_json
from lpconv.train.gates import gate_problem
from lpconv.train.options import FinetuneOptions, check_options

__all__ = ["BENCH_FILE", "KINDS", "JobOptions", "Kind"]

BENCH_FILE = "bench.json"
JobOptions = ConvertOptions | FinetuneOptions | BenchOptions | ProbeOptions


@dataclass(frozen=True, kw_only=True)
class Kind:
    """One kind of job.

    `options` makes its options of the settings in a manifest, or raises UsageError; `words` are the settings that
    matter most. A finished output holds the file `proof`, and `accepts` says whether that met its gates. `is_exact`
    says that another run writes the same bytes, so that the lock pins them.
    """

    fields: Mapping[str, Declared]
    options: Callable[[dict[str, Any]], JobOptions]
    words: Callable[[Any], str]
    proof: str
    accepts: Callable[[Path], bool]
    is_exact: bool = False


def _fields(record: type[Any]) -> dict[str, Declared]:
    return {name: d for name, d in options_of(record).items() if d.option.only != "command"}


def _convert_options(settings: dict[str, Any]) -> ConvertOptions:
    return settings_of(make(ConvertOptions, settings)).options


def _finetune_options(settings: dict[str, Any]) -> FinetuneOptions:
    options = make(FinetuneOptions, settings)
    check_options(options)
    return options


def _bench_options(settings: dict[str, Any]) -> BenchOptions:
    return make(BenchOptions, {"processes": 1} | settings)


def _probe_options(settings: dict[str, Any]) -> ProbeOptions:
    return make(ProbeOptions, settings)


def _finetune_words(options: FinetuneOptions) -> str:
    return options.arithmetic.name + (f" beside {options.twin}" if options.twin != "none" else "")


def _bench_words(options: BenchOptions) -> str:
    return " ".join((*options.formats, *options.methods, *options.modes))


KINDS: dict[str, Kind] = {
    "convert": Kind(
        fields=_fields(ConvertOptions),
        options=_convert_options,
        words=lambda options: f"{options.method} {options.format}",
        proof="SHA256SUMS",
        accepts=lambda proof: True,  # what failed its gates was never published
        is_exact=True,
    ),
    "finetune": Kind(
        fields=_fields(FinetuneOptions),
        options=_finetune_options,
        words=_finetune_words,
        proof="report.json",
        accepts=lambda proof: gate_problem(from_json(FinetuneResult, read_json(proof))) is None,
    ),
    "bench": Kind(
        fields=_fields(BenchOptions),
        options=_bench_options,
        words=_bench_words,
        proof=BENCH_FILE,
        accepts=lambda proof: not (result := read_bench(proof)).interrupted and problem(result) is None,
    ),
    "probe": Kind(
        fields=_fields(ProbeOptions),
        options=_probe_options,
        words=lambda options: f"{options.steps} steps",
        proof="probe.json",
        accepts=lambda proof: True,
    ),
}
