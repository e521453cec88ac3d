"""Run many jobs from one manifest, with resuming, a lock file and a JUnit report."""

from typing import TYPE_CHECKING

from lpconv.lazy import lazily

if TYPE_CHECKING:
    from lpconv.batch.kinds import BatchJob as BatchJob
    from lpconv.batch.manifest import Manifest as Manifest, load_manifest as load_manifest
    from lpconv.batch.options import BatchOptions as BatchOptions
    from lpconv.batch.placed import BatchEvents as BatchEvents
    from lpconv.batch.reading import manifest_schema as manifest_schema
    from lpconv.batch.run import JobsFailedError as JobsFailedError, run_batch as run_batch
    from lpconv.batch.runners import RUNNERS as RUNNERS, JobRunner as JobRunner

__all__ = lazily(__name__)
