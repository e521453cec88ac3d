"""One conversion from a name to a published directory: resolve, plan, check, apply, verify, report, publish."""

import dataclasses
import hashlib
import importlib.metadata
import os
import platform
import resource
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import torch

import lpconv
from lpconv.checkpoint.contents import Contents, read_contents
from lpconv.checkpoint.partfile import write_small
from lpconv.checkpoint.resolve import Resolved, resolve
from lpconv.checkpoint.source import Source, open_source
from lpconv.checkpoint.staging import Staging, beside, check_apart
from lpconv.convert.apply import Engine, SingleThreadedTorch, buffer_bytes
from lpconv.convert.encode import BLOCK_ELEMENTS, Workspace, block_stats, encode_pair, encode_scaled
from lpconv.convert.files import (
    check_convertible,
    copy_side_files,
    write_metadata,
    write_provenance,
    write_sums,
)
from lpconv.convert.gates import Gate, check_gates, needs_logits, parse_gate
from lpconv.convert.options import ConvertOptions, command_line, with_defaults
from lpconv.convert.plan import Plan, make_plan
from lpconv.convert.ranges import format_ranges
from lpconv.convert.reader import OutputReader
from lpconv.convert.records import planned_record
from lpconv.convert.tied import find_ties
from lpconv.convert.verify import check_samples
from lpconv.errors import LpconvError, ResourceError, UnsupportedError, VerificationError
from lpconv.formats.spec import FORMATS
from lpconv.mcf.split import RESIDUALS
from lpconv.progress import Progress, Silent
from lpconv.report.card import model_card
from lpconv.report.document import json_text
from lpconv.report.html import html_report
from lpconv.report.printable import printable
from lpconv.results import (
    ByteCounts,
    ConvertResult,
    FileRecord,
    LogitsCheck,
    PlanResult,
    SourceRecord,
    TensorRecord,
    VerifyResult,
    WeightsCheck,
    from_json,
    to_json,
)

__all__ = ["convert", "default_output", "plan"]

# Up to this many weight bytes `--verify auto` also runs both models.
_AUTO_LOGITS_BYTES = 2 * 10**9
_MAX_WORKERS = 8
# Headers, tensor records and Python's own growth beside the block buffers.
_OVERHEAD_BYTES = 64 * 2**20


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Job:
    """A conversion that is understood but not begun."""

    name: str
    output: Path
    resolved: Resolved
    contents: Contents
    source: Source
    plan: Plan
    gates: tuple[Gate, ...]
    workers: int
    memory_bytes: int


def default_output(model: str, options: ConvertOptions) -> Path:
    """`NAME-METHOD-FORMAT` in the current directory."""
    filled, method = with_defaults(options)
    base = Path(model).name if model not in (".", "..") else Path(model).resolve().name
    return Path(f"{base}-{method.name}-{filled.format}")


def plan(model: str, output: Path, options: ConvertOptions) -> PlanResult:
    """What `convert` would do with the same arguments, from headers alone; nothing is written."""
    job = _prepare(model, output, options)
    try:
        return PlanResult(
            method=job.plan.method.name,
            format=job.plan.options.format or "",
            output=str(output),
            source=_source_record(job),
            tensors=tuple(planned_record(job.plan, t) for t in job.plan.tensors),
            bytes=ByteCounts(read=job.plan.bytes_in, written=job.plan.bytes_out),
            shards=tuple(FileRecord(name=f.name, size_bytes=f.size_bytes) for f in job.plan.files),
            side_files=job.contents.side_files,
            memory_bytes=job.memory_bytes,
            disk_bytes=_disk_bytes(job),
            disk_free_bytes=_free_bytes(output),
            seconds=_estimate_seconds(job.plan, job.workers),
            workers=job.workers,
            warnings=_plan_warnings(job.plan),
        )
    finally:
        job.source.close()


def convert(
    model: str, output: Path, options: ConvertOptions, *, progress: Progress | None = None, command: str | None = None
) -> ConvertResult:
    """Convert a checkpoint into the directory `output`, which appears only when everything has passed.

    `model` is a directory, an alias, a hub id or ``demo``. Raises an `LpconvError` for every failure that is not a bug:
    see the exit codes in `lpconv.errors`.
    """
    started = time.perf_counter()
    progress = progress or Silent()
    job = _prepare(model, output, options)
    if job.resolved.revision is not None:
        progress.message(f"{model} is {job.resolved.resolved} at {job.resolved.revision}")
    try:
        _check_disk(job)
        with Staging(output, _identity(job), resume=options.resume, force=options.force) as staging:
            result = _carry_out(job, staging, progress, command, started)
            failures = [f"gate `{g.expression}` met {g.value}" for g in result.verify.gates if not g.passed]
            if not result.verify.passed:
                kept = staging.set_aside()
                raise VerificationError(
                    "verification failed: " + "; ".join([*result.verify.problems, *failures]),
                    hint=f"the rejected output is in `{kept}`",
                    details=to_json(result.verify),
                )
            staging.publish()
        return result
    finally:
        job.source.close()


def _prepare(model: str, output: Path, options: ConvertOptions) -> _Job:
    options, method = with_defaults(options)
    gates = tuple(parse_gate(g) for g in options.gates)
    resolved = resolve(model, revision=options.revision)
    contents = read_contents(resolved.directory)
    check_convertible(contents)
    check_apart(resolved.directory, output)
    workers, memory = _workers_and_memory(options)
    source = open_source(contents)
    try:
        made = make_plan(
            {n: (e.info, e.file) for n, e in source.entries.items()},
            method,
            options,
            ties=find_ties(source, contents.config),
            metadata={"lpconv": lpconv.__version__, "method": method.name},
        )
    except BaseException:
        source.close()
        raise
    return _Job(
        name=model,
        output=output,
        resolved=resolved,
        contents=contents,
        source=source,
        plan=made,
        gates=gates,
        workers=workers,
        memory_bytes=memory,
    )


def _workers_and_memory(options: ConvertOptions) -> tuple[int, int]:
    """Worker threads, and the bytes of memory that the run will take with them."""
    base = psutil.Process().memory_info().rss + _OVERHEAD_BYTES
    available = base + psutil.virtual_memory().available
    budget = min(options.max_memory or available, available)
    workers = options.workers or min(len(os.sched_getaffinity(0)), _MAX_WORKERS)
    while workers > 1 and base + buffer_bytes(workers) > budget:
        workers -= 1
    needed = base + buffer_bytes(workers)
    if needed > budget:
        raise ResourceError(
            f"the conversion needs {needed / 1e6:.0f} MB of memory, {budget / 1e6:.0f} MB are allowed",
            hint="raise --max-memory" if options.max_memory else "free some memory",
            details={"needed_bytes": needed, "budget_bytes": budget},
        )
    return workers, needed


def _disk_bytes(job: _Job) -> int:
    side = sum((job.contents.directory / n).stat().st_size for n in job.contents.side_files)
    return job.plan.bytes_out + side + 4 * 2**20  # reports, card and provenance


def _free_bytes(output: Path) -> int:
    folder = output.absolute().parent
    while not os.path.exists(folder):  # Path.exists raises for names that are too long
        folder = folder.parent
    return shutil.disk_usage(folder).free


def _check_disk(job: _Job) -> None:
    partial = beside(job.output, ".partial")
    reusable = sum(p.stat().st_size for p in partial.rglob("*") if p.is_file()) if os.path.isdir(partial) else 0
    needed, free = _disk_bytes(job), _free_bytes(job.output) + reusable
    if needed > free:
        raise ResourceError(
            f"the output needs {needed / 1e9:.2f} GB of disk, {free / 1e9:.2f} GB are free",
            hint="free some space or choose another --output",
            details={"needed_bytes": needed, "free_bytes": free},
        )


def _identity(job: _Job) -> dict[str, Any]:
    """What must be unchanged for a resume."""
    stats = [(f, (job.contents.directory / f).stat()) for f in job.contents.weight_files]
    return {
        "lpconv version": lpconv.__version__,
        "torch version": torch.__version__,
        "options": job.plan.fingerprint,
        "source files": [[f, s.st_size, s.st_mtime_ns] for f, s in stats],
        "source config": hashlib.sha256((job.contents.directory / "config.json").read_bytes()).hexdigest(),
    }


def _carry_out(job: _Job, staging: Staging, progress: Progress, command: str | None, started: float) -> ConvertResult:
    before = time.perf_counter()
    files, tensors = _write_weights(job, staging, progress)
    weights_seconds = time.perf_counter() - before
    write_metadata(staging.directory, job.contents, job.plan, files)
    side_files = copy_side_files(
        staging.directory, job.contents, job.contents.side_files, renamed={"README.md": "README.source.md"}
    )
    verify = _verify(job, staging.directory, tensors, progress)
    result = ConvertResult(
        method=job.plan.method.name,
        format=job.plan.options.format or "",
        residual=job.plan.options.residual,
        output=str(job.output),
        source=_source_record(job),
        architecture=next(iter(job.contents.config.get("architectures") or ()), None),
        tensors=tensors,
        files=files,
        side_files=side_files,
        bytes=ByteCounts(read=job.plan.bytes_in, written=job.plan.bytes_out),
        seconds=time.perf_counter() - started,
        weights_seconds=weights_seconds,
        peak_rss_bytes=_peak_rss_bytes(),
        verify=verify,
        options=_shaping_options(job.plan.options),
        versions=_versions(),
        command=command,
        warnings=(*_plan_warnings(job.plan), *_tensor_warnings(tensors)),
    )
    public = _public(result.source)
    published = dataclasses.replace(
        result, source=public, command=command and command_line(public.name, job.plan.options)
    )
    write_small(staging.directory / "README.md", model_card(published))
    write_provenance(staging.directory, published, job.contents, job.plan)
    write_sums(staging.directory, files)
    write_small(staging.directory / "report.html", html_report(result, format_ranges()))
    write_small(staging.directory / "report.json", json_text(result))
    return result


def _write_weights(
    job: _Job, staging: Staging, progress: Progress
) -> tuple[tuple[FileRecord, ...], tuple[TensorRecord, ...]]:
    done = {line["shard"]: line for line in staging.done}
    passes = 2 if job.plan.method.encoder == "scaled" else 1
    progress.start("converting", sum(_shard_bytes(job, s.root.name, passes) for s in job.plan.shards))
    with SingleThreadedTorch():
        engine = Engine(job.source, workers=job.workers, progress=progress)
        try:
            for shard in job.plan.shards:
                name = shard.root.name
                if name in done:
                    progress.advance(_shard_bytes(job, name, passes))
                    continue
                files, tensors = engine.write_shard(job.plan, shard, staging.directory)
                done[name] = {"shard": name, "files": to_json(files), "tensors": to_json(tensors)}
                staging.append(done[name])
        finally:
            engine.close()
    lines = [done[s.root.name] for s in job.plan.shards]
    records = {t["name"]: from_json(TensorRecord, t) for line in lines for t in line["tensors"]}
    ordered = (records.get(t.name) or planned_record(job.plan, t) for t in job.plan.tensors)
    return tuple(from_json(FileRecord, f) for line in lines for f in line["files"]), tuple(ordered)


def _shard_bytes(job: _Job, name: str, passes: int) -> int:
    shard = next(s for s in job.plan.shards if s.root.name == name)
    once = sum(t.info.num_bytes for t in shard.tensors)
    return once + (passes - 1) * sum(t.info.num_bytes for t in shard.scaled)


def _verify(job: _Job, directory: Path, tensors: Sequence[TensorRecord], progress: Progress) -> VerifyResult:
    level = job.plan.options.verify
    if level == "none" and not job.gates:
        return VerifyResult(level="none", passed=True)
    progress.start("verifying", 0)
    with OutputReader(directory, tensors) as output, SingleThreadedTorch():  # the pieces are too small to share
        count, mismatched = check_samples(job.source, output)
    weights = _weights_check(tensors, count, mismatched)
    problems = [f"tensor `{n}` does not decode to what it should" for n in mismatched]
    logits = _logits(job, directory, level) if level in ("logits", "auto") or needs_logits(job.gates) else None
    if logits is not None and logits.bit_equal is False and _is_exact(tensors):
        problems.append(f"the weights are exact, yet outputs differ by {logits.max_abs_diff:g}")
    ran = logits is not None and logits.skipped is None
    result = VerifyResult(
        level="logits" if ran else "weights",
        passed=not problems,
        weights=weights,
        logits=logits,
        problems=tuple(problems),
    )
    gates = check_gates(job.gates, result)
    return dataclasses.replace(result, gates=gates, passed=result.passed and all(g.passed for g in gates))


def _is_exact(tensors: Sequence[TensorRecord]) -> bool:
    return all(t.max_rel_error == 0 for t in tensors if t.action == "convert")


def _weights_check(tensors: Sequence[TensorRecord], count: int, mismatched: tuple[str, ...]) -> WeightsCheck:
    converted = [t for t in tensors if t.action == "convert"]
    worst = min(converted, key=lambda t: t.sqnr_db if t.sqnr_db is not None else float("inf"), default=None)
    sqnr = worst.sqnr_db if worst is not None and worst.sqnr_db is not None else float("inf")
    return WeightsCheck(
        max_rel_error=max((t.max_rel_error or 0.0 for t in converted), default=0.0),
        min_sqnr_db=sqnr,
        worst=worst.name if worst is not None and sqnr != float("inf") else None,
        num_tensors=len(converted),
        num_elements_checked=count,
        mismatched=mismatched,
    )


def _logits(job: _Job, directory: Path, level: str) -> LogitsCheck:
    """Run both models, or say why not. What was asked for explicitly must run; `auto` may skip."""
    automatic = level == "auto" and not needs_logits(job.gates)
    skip = _reason_to_skip(job) if automatic else None
    if skip is not None:
        return LogitsCheck(skipped=skip)
    from lpconv.convert.logits import check_logits  # transformers takes seconds to import

    try:
        return check_logits(
            job.resolved.directory,
            directory,
            job.contents.config,
            trust_remote_code=job.plan.options.trust_remote_code,
        )
    except UnsupportedError as e:
        if not automatic:
            raise
        return LogitsCheck(skipped=e.message)
    except LpconvError:
        raise
    except Exception as e:  # transformers raises anything at all for checkpoints it does not know
        text = f"{type(e).__name__}: {str(e).splitlines()[0] if str(e) else ''}"
        if not automatic:
            raise UnsupportedError(f"the model could not be run: {text}", hint="use --verify weights") from e
        return LogitsCheck(skipped=f"the model could not be run: {text}")


def _reason_to_skip(job: _Job) -> str | None:
    if job.plan.bytes_in > _AUTO_LOGITS_BYTES:
        return f"{job.plan.bytes_in / 1e9:.1f} GB of weights are more than `--verify auto` runs; use --verify logits"
    if "auto_map" in job.contents.config and not job.plan.options.trust_remote_code:
        return "the checkpoint brings its own code, which needs --trust-remote-code"
    if "model_type" not in job.contents.config:
        return "config.json names no model_type"
    return None


def _source_record(job: _Job) -> SourceRecord:
    files = (
        FileRecord(name=f, size_bytes=(job.contents.directory / f).stat().st_size) for f in job.contents.weight_files
    )
    return SourceRecord(
        name=job.name, resolved=job.resolved.resolved, revision=job.resolved.revision, files=tuple(files)
    )


def _public(source: SourceRecord) -> SourceRecord:
    """The source as a published file may name it: hub ids stay, local directories lose their path."""
    if source.revision is not None:
        return source
    directory = Path(source.resolved).name
    name = source.name if Path(source.name).name == source.name else directory
    # File names may hold bytes that no text file can.
    return dataclasses.replace(source, name=printable(name), resolved=printable(directory))


def _shaping_options(options: ConvertOptions) -> dict[str, Any]:
    names = ("method", "format", "residual", "scale", "include", "exclude", "rules", "max_shard_size")
    return {n: to_json(getattr(options, n)) for n in names}


def _versions() -> dict[str, str]:
    names = ("torch", "transformers", "safetensors", "numpy")
    return {
        "lpconv": lpconv.__version__,
        "python": platform.python_version(),
        **{n: importlib.metadata.version(n) for n in names},
    }


def _plan_warnings(plan: Plan) -> tuple[str, ...]:
    warnings = []
    if not any(t.format for t in plan.tensors):
        warnings.append("no tensor is converted: the output is a copy")
    wide = sum(t.format is not None and t.info.dtype == "F64" for t in plan.tensors)
    if wide:
        warnings.append(f"{wide} tensors are F64 and are rounded to fp32 first; errors are measured from there")
    if plan.method.encoder == "pair" and not any(s.residual for s in plan.shards):
        warnings.append(f"the source is {plan.options.format} already: nothing is lost, and there is no residual")
    return tuple(warnings)


def _tensor_warnings(tensors: Sequence[TensorRecord]) -> tuple[str, ...]:
    found = []
    for t in tensors:
        if t.num_nan or t.num_inf:
            kept = "they are kept" if not t.num_inf or FORMATS[t.format].has_inf else "Inf becomes NaN in this format"
            found.append(f"`{t.name}` has {t.num_nan} NaN and {t.num_inf} Inf elements in the source; {kept}")
        if t.num_saturated:
            found.append(f"`{t.name}`: {t.num_saturated} elements are beyond {t.format}'s range and became Inf")
    return tuple(found)


def _peak_rss_bytes() -> int:
    """Peak resident memory of this process: kibibytes on Linux, bytes on macOS."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _estimate_seconds(plan: Plan, workers: int) -> float:
    """Processor time of the plan at the speed measured on one block now, divided by the workers; no disk in it."""
    work, fmt = Workspace(), FORMATS[plan.options.format or ""]
    x = torch.randn(BLOCK_ELEMENTS)
    with SingleThreadedTorch():
        started = time.perf_counter()
        block_stats(x, work)
        if plan.method.encoder == "pair":
            form = RESIDUALS[plan.options.residual or ""]
            high, low = torch.empty(x.numel(), dtype=form.hi_dtype), torch.empty(x.numel(), dtype=form.dtype)
            encode_pair(x, form, high, low, work)
        else:
            high = torch.empty(x.numel(), dtype=getattr(torch, fmt.torch or ""))
            encode_scaled(x, 1.0, fmt, high, work, finite=True)
        hashlib.sha256(high.view(torch.uint8).numpy().data).digest()
        per_element = (time.perf_counter() - started) / x.numel()
    return per_element * sum(t.info.num_elements for t in plan.tensors) / workers
