"""Options of `lpconv batch`: how the jobs of a manifest are run. Plain Python."""

from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge

from lpconv.options import Option

_EXECUTORS = ("local", "ray")


@dataclass(frozen=True, kw_only=True)
class BatchOptions:
    """Which jobs run, where, and which outputs count as done."""

    only: Annotated[tuple[str, ...], Option("Job to run; the others are left out", metavar="ID")] = ()
    keep_going: Annotated[bool, Option("Go on after a failed job; exit code 6")] = False
    dry_run: Annotated[bool, Option("Plan every job and write nothing")] = False
    resume: Annotated[bool, Option("Skip what is up to date, continue what was interrupted")] = False
    locked: Annotated[bool, Option("Fail where anything differs from the lock file")] = False
    junit: Annotated[str | None, Option("File for a report in JUnit's XML", metavar="FILE")] = None
    parallel: Annotated[
        int | None, Ge(1), Option("Number of jobs at a time, within cores and memory", metavar="N", default="one")
    ] = None
    executor: Annotated[str, Option("Where to run jobs", metavar="NAME", choices=_EXECUTORS)] = "local"
    address: Annotated[
        str | None, Option("Ray cluster", default="RAY_ADDRESS, else one on this machine", metavar="HOST:PORT")
    ] = None
    shard: Annotated[
        str | None, Option("Part of the conversion that --only names to write, such as 1/8", metavar="I/N")
    ] = None
    finish: Annotated[bool, Option("Put together the parts of the conversion that --only names")] = False
