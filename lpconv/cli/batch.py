"""`lpconv batch`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lpconv.batch.options import BatchOptions
from lpconv.cli.command import Json, print_result
from lpconv.cli.progress import QUIET, progress_for
from lpconv.errors import UsageError
from lpconv.options import check

if TYPE_CHECKING:
    from lpconv.batch.manifest import Manifest
    from lpconv.batch.task import Executor
    from lpconv.progress import Progress
    from lpconv.results import BatchResult


def _show(result: "BatchResult", junit: str | None, *, json: bool) -> None:
    """Write the JUnit file and print the table, also if jobs failed."""
    from lpconv.report.batch import batch_document, junit_xml
    from lpconv.storage.partfile import write_small

    if junit is not None:
        write_small(Path(junit), junit_xml(result))
    if not json:  # with --json one document is printed at the end, for the result or an error
        print_result(result, batch_document, json=False)


def _print_schema(wanted: bool) -> None:
    if not wanted:
        return
    from json import dumps

    from lpconv.batch.reading import manifest_schema

    print(dumps(manifest_schema(), indent=2, ensure_ascii=False))
    raise typer.Exit


def batch(
    manifest: Annotated[str, typer.Argument(help="A YAML, TOML or JSON manifest.", metavar="FILE")],
    options: BatchOptions,
    schema: Annotated[
        bool,
        typer.Option(
            "--schema",
            callback=_print_schema,
            is_eager=True,
            help="Print the JSON Schema of manifests, for completion and checks in editors, and exit.",
        ),
    ] = False,
    json: Json = False,
) -> None:
    """Run the conversions, fine-tunings, benches and probes in a manifest.

    [bold]Examples[/bold]
      lpconv batch jobs.yaml --dry-run
      lpconv batch jobs.yaml --keep-going --resume --junit batch.xml
      lpconv batch jobs.yaml --parallel 4
    """
    from lpconv.batch.manifest import load_manifest
    from lpconv.storage.partfile import check_file

    check(options)
    if options.junit is not None:
        check_file(Path(options.junit))
    loaded = load_manifest(Path(manifest))
    if options.shard is not None or options.finish:
        _check_alone(loaded, options)
    from lpconv.batch.run import run_batch
    from lpconv.batch.runners import FINISHING, RUNNERS

    with progress_for() as progress:
        if options.shard is not None:
            _write_part(loaded, options, options.shard, progress, json=json)
            return
        result = run_batch(
            loaded,
            FINISHING if options.finish else RUNNERS,
            options,
            progress=progress,
            on_result=lambda result: _show(result, options.junit, json=json),
            executor=None if options.dry_run else _executor(loaded, options, progress),
        )
    if json:
        from lpconv.report.batch import batch_document

        print_result(result, batch_document, json=True)


def _write_part(manifest: "Manifest", options: BatchOptions, shard: str, progress: "Progress", *, json: bool) -> None:
    from lpconv.batch.lock import Lock, read_lock
    from lpconv.batch.run import select_jobs
    from lpconv.batch.runners import write_part
    from lpconv.convert.parts import Part
    from lpconv.report.convert import part_document

    (job,) = select_jobs(manifest, options.only)
    entry = (read_lock(manifest.lock_path) or Lock()).get(job.id) if options.locked else None
    part = write_part(job, Part.parse(shard), entry=entry, resume=options.resume, progress=progress)
    print_result(part, part_document, json=json)


def _check_alone(manifest: "Manifest", options: BatchOptions) -> None:
    """Raise UsageError unless --shard and --finish are used for exactly one conversion."""
    from lpconv.convert.parts import Part

    if options.shard is not None:
        Part.parse(options.shard)
    kinds = [job.kind for job in manifest.jobs if job.id in options.only]  # unknown ids are rejected by name later
    if (options.shard is not None and options.finish) or len(options.only) != 1 or kinds not in ([], ["convert"]):
        raise UsageError("--shard and --finish need exactly one conversion", hint="select it with --only")


def _executor(manifest: "Manifest", options: BatchOptions, progress: "Progress") -> "Executor | None":
    """The executor for the jobs; None for this process. Raises UsageError for --address without --executor ray."""
    name, address, parallel = options.executor, options.address, options.parallel
    if name == "local" and address is not None:
        raise UsageError("--address only applies to a Ray cluster", hint="add --executor ray")
    if name == "ray":
        from lpconv.batch.ray import RayExecutor

        return RayExecutor(manifest.path, address=address, parallel=parallel, quiet=QUIET.get())
    if parallel in (None, 1):
        return None
    from lpconv.batch.task import LocalExecutor

    return LocalExecutor(parallel or 1, progress.message, wants_gpus=any(job.gpus for job in manifest.jobs))
