"""What a batch did, as plain frozen records; `lpconv.results.to_json` turns them into JSON."""

from dataclasses import dataclass, field
from typing import Any

from lpconv.results import SCHEMA_VERSION, ByteCounts, SourceRecord, VerifyResult

__all__ = [
    "CONVERTED",
    "FAILED",
    "NOT_RUN",
    "PLANNED",
    "UP_TO_DATE",
    "BatchResult",
    "Estimate",
    "JobError",
    "JobResult",
]

CONVERTED = "converted"
UP_TO_DATE = "up to date"
PLANNED = "planned"
FAILED = "failed"
NOT_RUN = "not run"


@dataclass(frozen=True, kw_only=True)
class JobError:
    """Why a job failed: the error as ``--json`` prints it. `kind` is ``bug`` and `code` 1 for errors of ours."""

    code: int
    kind: str
    message: str
    hint: str | None = None
    details: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """What a dry run expects a job to need."""

    memory_bytes: int
    disk_bytes: int
    disk_free_bytes: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class JobResult:
    """One job: its `status` (a constant of this module), and what is known after it.

    The tensors are not repeated here: the report of a finished job lies in its `output`.
    """

    id: str
    model: str
    output: str
    method: str
    format: str | None
    status: str
    seconds: float = 0.0
    source: SourceRecord | None = None
    bytes: ByteCounts | None = None
    estimate: Estimate | None = None
    verify: VerifyResult | None = None
    warnings: tuple[str, ...] = ()
    error: JobError | None = None


@dataclass(frozen=True, kw_only=True)
class BatchResult:
    """A whole batch, jobs in manifest order; those that a failure kept from running are among them."""

    schema_version: int = SCHEMA_VERSION
    kind: str = "batch"
    manifest: str
    dry_run: bool
    seconds: float
    jobs: tuple[JobResult, ...]

    @property
    def failed(self) -> tuple[JobResult, ...]:
        """The jobs that failed."""
        return tuple(job for job in self.jobs if job.status == FAILED)
