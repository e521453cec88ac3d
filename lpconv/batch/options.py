"""Options of `lpconv batch`: how the jobs of a manifest are run. Plain Python."""

from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge

from lpconv.options import Option

_EXECUTORS = ("local", "ray")


@dataclass(frozen=True, kw_only=True)
class BatchOptions:
    """Which jobs run, where, and which outputs count as done."""

    only: Annotated[tuple[str, ...], Option("Run only this job", metavar="ID")] = ()
    keep_going: Annotated[bool, Option("Run the remaining jobs after a failure, then end with exit code 6")] = False
    dry_run: Annotated[bool, Option("Plan every job without writing anything")] = False
    resume: Annotated[bool, Option("Skip jobs that are up to date and continue interrupted ones")] = False
    locked: Annotated[bool, Option("Fail if anything differs from the lock file")] = False
    junit: Annotated[str | None, Option("File for a JUnit XML report", metavar="FILE")] = None
    parallel: Annotated[
        int | None,
        Ge(1),
        Option("Number of jobs to run at a time, within cores and memory", metavar="N", default="one"),
    ] = None
    executor: Annotated[str, Option("Where to run jobs", metavar="NAME", choices=_EXECUTORS)] = "local"
    address: Annotated[
        str | None, Option("Ray cluster", default="RAY_ADDRESS, or a new one on this machine", metavar="HOST:PORT")
    ] = None
    shard: Annotated[
        str | None, Option("Write only this part of the conversion named by --only, such as 1/8", metavar="I/N")
    ] = None
    finish: Annotated[bool, Option("Combine the parts of the conversion named by --only")] = False
