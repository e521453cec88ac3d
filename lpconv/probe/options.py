"""Options of a probe, and the name of its result file. Plain Python."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from annotated_types import Ge

from lpconv.options import AllowMissing, Force, Option, ResumedByBatch, Revision

PROBE_FILE = "probe.json"  # in an output; marks the folder as a probe's


@dataclass(frozen=True, kw_only=True)
class ProbeOptions:
    """Options of `lpconv probe`."""

    data: Annotated[
        Path | None,
        Option("Text file", default="plays that ship with lpconv", metavar="FILE", parse=Path, is_path=True),
    ] = None
    steps: Annotated[int, Ge(1), Option("Number of forward and backward passes")] = 4
    batch_size: Annotated[int, Ge(1), Option("Number of sequences in a batch")] = 8
    seq_len: Annotated[
        int | None, Ge(2), Option("Number of tokens in a sequence", default="128, or the model's maximum")
    ] = None
    every: Annotated[int, Ge(1), Option("Number of steps between records")] = 1
    calibrate: Annotated[bool, Option("Also write the scales that unit scaling should use (calibration.json)")] = False
    seed: Annotated[int, Ge(0), Option("Seed of masks and random ids")] = 0
    revision: Revision = None
    allow_missing: AllowMissing = False
    resume: ResumedByBatch = False
    force: Force = False
