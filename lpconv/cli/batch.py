"""`lpconv batch`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lpconv.cli.command import Json, Quiet, print_result
from lpconv.cli.progress import progress_for
from lpconv.errors import UsageError

if TYPE_CHECKING:
    from lpconv.batch.manifest import BatchJob, Manifest
    from lpconv.batch.task import Executor
    from lpconv.progress import Progress
    from lpconv.results import BatchResult, JobResult

__all__ = ["batch"]

_EXECUTORS = ("local", "ray", "slurm")


class _Events:
    """Says on stderr which job runs; writes JUnit and the table whether jobs failed or not."""

    def __init__(self, progress: "Progress", junit: str | None, as_json: bool) -> None:
        self._progress, self._junit, self._json = progress, junit, as_json

    def job_started(self, job: "BatchJob", index: int, total: int) -> None:
        self._progress.message(f"[{index + 1}/{total}] {job.id}")

    def job_finished(self, result: "JobResult", index: int, total: int) -> None:
        self._progress.message(f"[{index + 1}/{total}] {result.id}: {result.status}")

    def batch_finished(self, result: "BatchResult") -> None:
        from lpconv.checkpoint.partfile import write_small
        from lpconv.report.batch import junit_xml, render_batch

        if self._junit is not None:
            write_small(Path(self._junit), junit_xml(result))
        if not (self._json and result.failed):  # whose document stands inside the error
            print_result(result, render_batch, json=self._json)


def _print_schema(wanted: bool) -> None:
    if not wanted:
        return
    from json import dumps

    from lpconv.batch.reading import manifest_schema

    print(dumps(manifest_schema(), indent=2, ensure_ascii=False))
    raise typer.Exit


def batch(
    manifest: Annotated[str, typer.Argument(help="A YAML, TOML or JSON manifest.", metavar="FILE")],
    only: Annotated[
        list[str] | None, typer.Option("--only", help="Run this job only. Repeatable.", metavar="ID")
    ] = None,
    keep_going: Annotated[bool, typer.Option("--keep-going", help="Go on after a failed job; exit code 6.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Plan every job and write nothing.")] = False,
    resume: Annotated[
        bool, typer.Option("--resume", help="Skip what is up to date, continue what was interrupted.")
    ] = False,
    locked: Annotated[bool, typer.Option("--locked", help="Fail where anything differs from the lock file.")] = False,
    junit: Annotated[str | None, typer.Option("--junit", help="Write JUnit XML.", metavar="FILE")] = None,
    schema: Annotated[
        bool,
        typer.Option(
            "--schema",
            callback=_print_schema,
            is_eager=True,
            help="Print the JSON Schema of manifests, by which editors complete and check them, and exit.",
        ),
    ] = False,
    parallel: Annotated[
        int | None,
        typer.Option("--parallel", min=1, help="Run as many jobs at a time, within cores and memory.", metavar="N"),
    ] = None,
    executor: Annotated[
        str, typer.Option("--executor", help="What places jobs: local, ray or slurm.", metavar="NAME")
    ] = "local",
    address: Annotated[
        str | None,
        typer.Option(
            "--address", help="The Ray cluster (default: RAY_ADDRESS, else one on this machine).", metavar="HOST:PORT"
        ),
    ] = None,
    shard: Annotated[
        str | None,
        typer.Option("--shard", help="Write part i of n of the conversion that --only names.", metavar="I/N"),
    ] = None,
    finish: Annotated[
        bool, typer.Option("--finish", help="Put together the parts of the conversion that --only names.")
    ] = False,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Convert, fine-tune, bench and probe as a manifest says, for CI.

    [bold]Examples[/bold]

      lpconv batch jobs.yaml --dry-run

      lpconv batch jobs.yaml --keep-going --resume --junit batch.xml

      lpconv batch jobs.yaml --parallel 4
    """
    from lpconv.batch.manifest import load_manifest
    from lpconv.checkpoint.partfile import check_file

    if junit is not None:
        check_file(Path(junit))
    loaded = load_manifest(Path(manifest))
    if shard is not None or finish:
        _check_alone(loaded, only or [], shard, finish)
    from lpconv.batch.lock import Lock, read_lock
    from lpconv.batch.run import run_batch, selected
    from lpconv.batch.runners import FINISHING, RUNNERS, write_part
    from lpconv.convert.shares import Part
    from lpconv.report.convert.terminal import render_part

    with progress_for(quiet=quiet) as progress:
        if shard is not None:
            (job,) = selected(loaded, only or [])
            entry = (read_lock(loaded.lock_path) or Lock()).get(job.id) if locked else None
            part = write_part(job, Part.parse(shard), entry=entry, resume=resume, progress=progress)
            print_result(part, render_part, json=json)
            return
        run_batch(
            loaded,
            FINISHING if finish else RUNNERS,
            only=tuple(only or ()),
            keep_going=keep_going,
            dry_run=dry_run,
            resume=resume,
            locked=locked,
            progress=progress,
            events=_Events(progress, junit, json),
            executor=None
            if dry_run
            else _executor(loaded, executor, parallel, address, progress=progress, quiet=quiet),
        )


def _check_alone(manifest: "Manifest", only: list[str], shard: str | None, finish: bool) -> None:
    """Parts are of one conversion."""
    from lpconv.convert.shares import Part

    if shard is not None:
        Part.parse(shard)
    kinds = [job.kind for job in manifest.jobs if job.id in only]
    if (
        (shard is not None and finish) or len(only) != 1 or kinds not in ([], ["convert"])
    ):  # an unknown id is refused by name
        raise UsageError("--shard and --finish are for one conversion", hint="name it with --only")


def _executor(
    manifest: "Manifest", name: str, parallel: int | None, address: str | None, *, progress: "Progress", quiet: bool
) -> "Executor | None":
    """Where jobs run, None for this process. Raises UsageError for an executor that is not known."""
    from lpconv.lookup import find

    name = find("executor", name, {known: known for known in _EXECUTORS})
    if name == "local" and address is not None:
        raise UsageError("--address is that of a cluster", hint="add --executor ray")
    if name == "ray":
        from lpconv.batch.on_ray import RayExecutor

        return RayExecutor(manifest.path, address=address, parallel=parallel, quiet=quiet)
    if name == "slurm":
        from lpconv.batch.on_slurm import SlurmExecutor

        folder = manifest.path.with_name(f"{manifest.path.stem}.slurm")
        return SlurmExecutor(folder, cluster=address or "slurm", parallel=parallel, say=progress.message)
    if parallel in (None, 1):
        return None
    from lpconv.batch.local import LocalExecutor

    return LocalExecutor(parallel or 1, progress.message, wants_gpus=any(job.gpus for job in manifest.jobs))
