"""The kinds of job: their settings, the options these make, and how a finished output is recognised.

The options are the same records as for the commands. Running the jobs is in `runners`, which loads models; nothing here
does.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

from annotated_types import Ge
from pydantic import Field, WithJsonSchema

from lpconv.bench.options import BenchOptions
from lpconv.bench.outcome import final_error, read_bench
from lpconv.errors import UsageError
from lpconv.options import Declared, Option, make, options_of, size_option
from lpconv.plan.options import ConvertOptions
from lpconv.plan.settings import fill_options
from lpconv.probe.options import ProbeOptions
from lpconv.report.numbers import plural
from lpconv.results import FinetuneResult, from_json
from lpconv.storage.contents import read_json
from lpconv.train.options import FinetuneOptions, check_options
from lpconv.train.outcome import gate_problem

MANIFEST_VERSION = 1
DEFAULT_KIND = "convert"  # kind of jobs that name none, as in manifests of the first lpconv versions

BENCH_FILE = "bench.json"
JobOptions = ConvertOptions | FinetuneOptions | BenchOptions | ProbeOptions


@dataclass(frozen=True, kw_only=True)
class JobKind:
    """One kind of job, with options of type `record`; `usual` are settings that a manifest may leave out.

    `check` raises UsageError for options that do not fit together; `words` summarises them in a line. A finished output
    contains the file `proof`, and `accepts` tells from that file whether the gates passed. `is_exact`: another run
    writes the same bytes, so the lock pins them.
    """

    record: type[JobOptions]
    usual: Mapping[str, Any] = field(default_factory=dict)
    check: Callable[[Any], object] = lambda options: None
    words: Callable[[Any], str]
    proof: str
    accepts: Callable[[Path], bool] = lambda proof: True
    is_exact: bool = False

    @cached_property
    def fields(self) -> dict[str, Declared]:
        """The settings that a manifest may have, by name."""
        return {name: d for name, d in options_of(self.record).items() if d.option.only in (None, "manifest")}

    def options(self, settings: Mapping[str, Any]) -> JobOptions:
        """The options that the settings of a manifest make, or UsageError."""
        options = make(self.record, {**self.usual, **settings})
        self.check(options)
        return options


def _conversion_words(o: ConvertOptions) -> str:
    bits = f"{o.budget_bits:g} bits" if o.budget_bits is not None else None
    return " ".join(filter(None, (o.scheme, o.method, o.layout, o.format, bits))) or "the default format"


KINDS: dict[str, JobKind] = {
    "convert": JobKind(
        record=ConvertOptions,
        check=fill_options,  # only for its errors; `convert` fills in the options for the checkpoint that it opens
        words=_conversion_words,
        proof="SHA256SUMS",  # an output that fails its gates is not published
        is_exact=True,
    ),
    "finetune": JobKind(
        record=FinetuneOptions,
        check=check_options,
        words=lambda options: options.arithmetic.name + (f" next to {options.twin}" if options.twin != "none" else ""),
        proof="report.json",
        accepts=lambda proof: gate_problem(from_json(FinetuneResult, read_json(proof))) is None,
    ),
    "bench": JobKind(
        record=BenchOptions,
        usual={"processes": 1},
        words=lambda options: " ".join((*options.formats, *options.methods, *options.modes)),
        proof=BENCH_FILE,
        accepts=lambda proof: not (result := read_bench(proof)).interrupted and final_error(result) is None,
    ),
    "probe": JobKind(record=ProbeOptions, words=lambda options: plural(options.steps, "step"), proof="probe.json"),
}

_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_TEXT = Annotated[str, Field(pattern=r"\S")]
_ID_TEXT = Annotated[str, WithJsonSchema({"type": "string", "pattern": f"^{_ID.pattern}$"})]


def _read_id(text: str) -> str:
    if not _ID.fullmatch(text):
        raise UsageError(f"`{text}` is not a valid id", hint="use only letters, digits, dots, dashes and underscores")
    return text


@dataclass(frozen=True, kw_only=True)
class BatchJob:
    """One job. `model` is a hub id, an alias or an absolute path.

    `needs` are ids of earlier jobs whose outputs this one requires. `cpus`, `gpus` and `memory` (bytes) are reserved
    for the job; `split` is the number of workers that share a conversion.
    """

    id: Annotated[str, Option("Name of the job, unique in the manifest", parse=_read_id, given=_ID_TEXT)]
    kind: Annotated[str, Option("Kind of the job", what="kind of job", choices=KINDS)] = DEFAULT_KIND
    model: Annotated[str, Option("Directory, hub id, alias, demo, or job:ID for the output of an earlier job")]
    output: Annotated[
        Path, Option("Folder to write, relative to the manifest", default="out/ID", parse=str, given=_TEXT)
    ]
    needs: Annotated[tuple[str, ...], Option("Earlier jobs that must succeed before this one", default="none")] = ()
    cpus: Annotated[
        int | None, Ge(1), Option("CPU cores to reserve for the job", default="an equal share; all cores for a bench")
    ] = None
    gpus: Annotated[int, Ge(0), Option("GPUs to reserve for the job")] = 0
    memory: Annotated[
        int | None, size_option("Memory to reserve for the job, such as 8GB", default="max_memory, or an equal share")
    ] = None
    split: Annotated[int, Ge(1), Option("Number of workers that share the conversion")] = 1
    options: JobOptions


COMMON_FIELDS = options_of(BatchJob)
# Settings that `defaults` may set for all kinds of job at once.
SHARED_FIELDS = {name: COMMON_FIELDS[name] for name in ("model", "cpus", "gpus", "memory")}
