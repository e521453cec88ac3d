"""A prepared conversion: source, plan, and the resources that it needs."""

import dataclasses
import hashlib
import importlib.metadata
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from lpconv.data import SELF, text_at
from lpconv.data.texts import check_text
from lpconv.errors import ResourceError, UnsupportedError
from lpconv.forms import Headers
from lpconv.gates import CONVERT_GATES, Gate
from lpconv.gguf import GGUF, check_package
from lpconv.gguf.arranged import ArrangedSource
from lpconv.layouts.headers import check_readable
from lpconv.layouts.reader import is_coded, open_readable, open_values
from lpconv.models.ties import find_ties
from lpconv.models.whole import Fit, check_complete, linears_of
from lpconv.plan.files import output_config, plain_config
from lpconv.plan.memory import Memory, plan_memory
from lpconv.plan.options import NEAREST, ConvertOptions, FilledOptions
from lpconv.plan.plan import Plan, make_plan
from lpconv.plan.policy import check_family, check_stacks, form_type
from lpconv.report.numbers import size_text
from lpconv.results import ByteCounts, RoundingForecast, SourceRecord
from lpconv.storage.checkpoint import RESIDUAL_FOLDER, Checkpoint, Openable, Watch
from lpconv.storage.place import sha256_of
from lpconv.storage.remote import check_url, is_url
from lpconv.storage.remote_output import working_folder
from lpconv.storage.source import Source
from lpconv.storage.staging import folder_next_to
from lpconv.version import __version__

# Seconds independent of size, on two cores: torch, pages and records; transformers and two small models.
_REPORTING_S, _RUNNING_S = 0.8, 4.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """A conversion that is prepared but not started. As a context manager, it closes `source` at the end.

    `fit` compares the source with the model of its config. `checkpoint` is the source as stored, `plain` the same
    with the config of its decoded values; `promised` are the hub's hashes of its files, already checked. `output` is
    the directory to write; for a remote output it is the local working folder, and `url` is set.
    """

    output: Path
    url: str | None
    checkpoint: Checkpoint
    plain: Checkpoint
    promised: Mapping[str, str]
    watch: Watch
    source: Source
    plan: Plan
    gates: tuple[Gate, ...]
    fit: Fit
    memory: Memory

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.source.close()

    @property
    def source_record(self) -> SourceRecord:
        """The source with the sizes of its weight files, and their hashes if a hub promised and lpconv checked them."""
        return self.checkpoint.record(self.promised.get)

    @property
    def bytes(self) -> ByteCounts:
        """The size of the weights before and after; of a quantised source, the size of its files with residuals."""
        read = 0
        if is_coded(self.checkpoint):
            residuals = (self.checkpoint.directory / RESIDUAL_FOLDER).glob("*.safetensors")
            read = sum([*(f.size_bytes for f in self.source_record.files), *(p.stat().st_size for p in residuals)])
        return ByteCounts(read=read or self.plan.bytes_in, written=self.plan.bytes_out)


def open_model(model: Openable, output: Path | str, options: ConvertOptions) -> Checkpoint:
    """Open the source of a conversion without torch. Raises every error that names, headers and texts reveal."""
    checkpoint = open_readable(model, revision=options.revision)
    if options.calibrate not in (None, SELF):
        check_text(
            text_at(options.calibrate),
            checkpoint.directory,
            checkpoint.config,
            hint="pass more text, or --calibrate demo",
        )
    checkpoint.check_apart(output)
    return checkpoint


def prepare(checkpoint: Checkpoint, output: Path | str, options: FilledOptions, *, headers_only: bool = False) -> Job:
    """Plan the conversion of a checkpoint from `open_model`, with filled options, and open its tensors.

    With `headers_only` the weights are not compared with the hub's hashes. Raises every error that can be found without
    reading the weights.
    """
    gates = tuple(map(CONVERT_GATES.parse, options.gates))
    checkpoint = checkpoint.local_copy() if options.cache else checkpoint
    promised = {} if headers_only else checkpoint.check_promised()
    watched = checkpoint.watch()
    url = check_url(output) if isinstance(output, str) and is_url(output) else None
    output = working_folder(url) if url is not None else Path(output)
    source, plain = open_values(checkpoint), checkpoint
    if is_coded(checkpoint):
        plain = dataclasses.replace(checkpoint, config=plain_config(checkpoint))
    try:
        infos = {n: e.info for n, e in source.entries.items()}
        shapes = {n: info.shape for n, info in infos.items()}
        check_readable(Headers.of(plain.config, infos))
        plan: Plan
        if options.layout == GGUF:
            check_package(f"--layout {GGUF}")
            from lpconv.gguf.plan import plan_gguf  # imports gguf

            source, plan = plan_gguf(plain, source, options)
        else:
            if form_type(options).of_linears:
                check_family(plain.config, options)  # before transformers is asked for the model's modules
                check_stacks(infos, options)
            plan = make_plan(
                {n: (e.info, e.file) for n, e in source.entries.items()},
                options,
                ties=find_ties(source, plain),
                linears=linears_of(plain, shapes) if form_type(options).of_linears else None,
            )
            source = ArrangedSource(source, plan.orders, ()) if plan.orders else source
        if options.rounding != NEAREST and not any(t.can_be_rounded for t in plan.tensors):
            raise UnsupportedError(
                "no weight of a linear layer would get codes of at most 8 bits",
                hint="use --rounding nearest, whose --dry-run shows why",
            )
        output_config(plain, plan)  # raises its errors now
        memory = plan_memory(plan, plain, gates, output=output, uploads=url is not None)
        fit = check_complete(plain, shapes, allow_missing=options.allow_missing)
    except BaseException:
        source.close()
        raise
    return Job(
        output=output,
        url=url,
        checkpoint=checkpoint,
        plain=plain,
        promised=promised,
        watch=watched,
        source=source,
        plan=plan,
        gates=gates,
        fit=fit,
        memory=memory,
    )


def disk_bytes(job: Job) -> int:
    """Bytes of disk that the output needs."""
    side = sum((job.checkpoint.directory / n).stat().st_size for n in job.checkpoint.side_files)
    return job.plan.bytes_out + side + 4 * 2**20  # the last term is for reports, card and provenance


def free_bytes(output: Path) -> int:
    """Free bytes on the file system of `output`."""
    folder = output.absolute().parent
    while not os.path.exists(folder):  # Path.exists raises for names that are too long
        folder = folder.parent
    return shutil.disk_usage(folder).free


def check_disk(output: Path, needed: int) -> None:
    """Raise ResourceError unless `needed` bytes fit on disk. An interrupted run's partial output counts as free."""
    partial = folder_next_to(output, ".partial")
    reusable = sum(p.stat().st_size for p in partial.rglob("*") if p.is_file()) if os.path.isdir(partial) else 0
    free = free_bytes(output) + reusable
    if needed > free:
        raise ResourceError(
            f"the output needs {size_text(needed)} of disk space, but {size_text(free)} are free",
            hint="free some space or choose another --output",
            details={"needed_bytes": needed, "free_bytes": free},
        )


def identity(job: Job) -> dict[str, Any]:
    """The facts that must be equal for a resumed run."""
    directory = job.checkpoint.directory
    stats = [(f, (directory / f).stat()) for f in job.checkpoint.weight_files]
    text = job.plan.options.calibrate
    return {
        **({} if text is None else {"calibration text": sha256_of(text_at(text))}),
        "lpconv version": __version__,
        **{f"{name} version": importlib.metadata.version(name) for name in ("torch", "pcodec")},
        "options": job.plan.fingerprint,
        "source files": [[f, s.st_size, s.st_mtime_ns] for f, s in stats],
        "source config": hashlib.sha256((directory / "config.json").read_bytes()).hexdigest(),
    }


def estimate_seconds(job: Job, measured: RoundingForecast | None = None) -> float | None:
    """Estimated seconds of the run without lpconv's own start, for a fast disk. None for a rounding not `measured`.

    The machine is assumed to be like the one on which `Form.encoded_per_second` was measured.
    """
    fixed = _REPORTING_S + (_RUNNING_S if job.memory.no_logits is None else 0.0)
    forms = [t.form for t in job.plan.tensors if t.action != "tie"]
    if job.plan.options.rounding == NEAREST:
        return fixed + sum(form.seconds_at(form.encoded_per_second) for form in forms) / job.memory.workers
    if measured is None:
        return None
    copying = sum(form.num_elements / form.encoded_per_second for form in forms)  # scales are known by then
    return fixed + copying / job.memory.workers + measured.opening_seconds + sum(measured.layer_seconds)
