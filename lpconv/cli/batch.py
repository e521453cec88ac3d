"""`lpconv batch`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lpconv.cli.command import Json, Quiet, print_result
from lpconv.cli.progress import progress_for

if TYPE_CHECKING:
    from lpconv.batch.manifest import BatchJob
    from lpconv.progress import Progress
    from lpconv.results import BatchResult, JobResult

__all__ = ["batch"]


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
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Convert, fine-tune, bench and probe as a manifest says, for CI.

    [bold]Examples[/bold]

      lpconv batch jobs.yaml --dry-run

      lpconv batch jobs.yaml --keep-going --resume --junit batch.xml
    """
    from lpconv.batch.manifest import load_manifest
    from lpconv.batch.run import run_batch
    from lpconv.batch.runners import RUNNERS
    from lpconv.checkpoint.partfile import check_file

    if junit is not None:
        check_file(Path(junit))
    loaded = load_manifest(Path(manifest))
    with progress_for(quiet=quiet) as progress:
        run_batch(
            loaded,
            RUNNERS,
            only=tuple(only or ()),
            keep_going=keep_going,
            dry_run=dry_run,
            resume=resume,
            locked=locked,
            progress=progress,
            events=_Events(progress, junit, json),
        )
