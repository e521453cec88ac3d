"""Options of `lpconv batch`: how the jobs of a manifest are run. Plain Python."""

from dataclasses import dataclass

from annotated_types import Ge

from lpconv.options import option

_EXECUTORS = ("local", "ray")


@dataclass(frozen=True, kw_only=True)
class BatchOptions:
    """Which jobs run, where, and which outputs count as done."""

    only: tuple[str, ...] = option((), "Run only this job", metavar="ID")
    keep_going: bool = option(False, "Run the remaining jobs after a failure, then end with exit code 6")
    dry_run: bool = option(False, "Plan every job without writing anything")
    resume: bool = option(False, "Skip jobs that are up to date and continue interrupted ones")
    locked: bool = option(False, "Fail if anything differs from the lock file")
    junit: str | None = option(None, "File for a JUnit XML report", metavar="FILE")
    parallel: int | None = option(
        None, "Number of jobs to run at a time, within cores and memory", Ge(1), metavar="N", default="one"
    )
    executor: str = option("local", "Where to run jobs", metavar="NAME", choices=_EXECUTORS)
    address: str | None = option(
        None, "Ray cluster", default="RAY_ADDRESS, or a new one on this machine", metavar="HOST:PORT"
    )
    shard: str | None = option(
        None, "Write only this part of the conversion named by --only, such as 1/8", metavar="I/N"
    )
    finish: bool = option(False, "Combine the parts of the conversion named by --only")
