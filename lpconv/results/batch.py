"""Records of `lpconv batch`."""

from dataclasses import dataclass, field
from typing import Any

from lpconv.results.checkpoint import ByteCounts, FileRecord, JobEstimate, SourceRecord
from lpconv.results.documents import Result
from lpconv.results.verify import VerifyResult

# Status of a job; a finished job has the status of its kind.
DONE = {"convert": "converted", "finetune": "trained", "bench": "measured", "probe": "probed"}
UP_TO_DATE = "up to date"
PLANNED = "planned"
FAILED = "failed"
NOT_RUN = "not run"


@dataclass(frozen=True, kw_only=True)
class JobError:
    """Why a job failed, as ``--json`` prints errors. Bugs in lpconv have the `kind` ``bug`` and the `code` 1."""

    code: int
    kind: str
    message: str
    hint: str | None = None
    details: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class JobFindings:
    """Results of a job that has run or been planned.

    Plans have an `estimate` if this kind of job can be estimated. `figures` are the metrics of a measurement by name.
    """

    source: SourceRecord | None = None
    bytes: ByteCounts | None = None
    estimate: JobEstimate | None = None
    verify: VerifyResult | None = None
    figures: dict[str, float] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class JobOutcome(JobFindings):
    """Outcome of running or planning a job, with the facts for the lock file.

    These are hashes of a conversion's weight files, and versions of the libraries.
    """

    files: tuple[FileRecord, ...] = ()
    versions: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class JobResult(JobFindings):
    """One job of a batch: its `status` (a constant of this module, or the status of a finished job) and its outcome.

    `what` summarises its settings. Tensors and steps are not repeated here: the report of a finished job is in its
    `output`.
    """

    id: str
    kind: str
    model: str
    output: str
    what: str
    status: str
    seconds: float = 0.0
    error: JobError | None = None


@dataclass(frozen=True, kw_only=True)
class BatchResult(Result):
    """Result of `lpconv batch`: all jobs in manifest order, including those that a failure kept from running."""

    kind: str = "batch"
    manifest: str
    dry_run: bool
    seconds: float
    jobs: tuple[JobResult, ...]

    @property
    def failed(self) -> tuple[JobResult, ...]:
        """The jobs that failed."""
        return tuple(job for job in self.jobs if job.status == FAILED)
