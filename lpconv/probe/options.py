"""What a probe is asked for, and where it goes. Plain Python."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from lpconv.options import AllowMissing, Force, Option, Revision

PROBE_FILE = "probe.json"  # in an output; says whose the folder is


@dataclass(frozen=True, kw_only=True)
class ProbeOptions:
    """How to probe."""

    data: Annotated[
        Path | None,
        Option("Text file", default="plays that ship with lpconv", metavar="FILE", parse=Path, is_path=True),
    ] = None
    steps: Annotated[int, Option("Number of forward and backward passes", least=1)] = 4
    batch_size: Annotated[int, Option("Number of sequences in a batch", least=1)] = 8
    seq_len: Annotated[
        int | None, Option("Number of tokens in a sequence", default="128, or the model's maximum", least=2)
    ] = None
    every: Annotated[int, Option("Number of steps between records", least=1)] = 1
    calibrate: Annotated[bool, Option("Also write the scales that unit scaling should use (calibration.json)")] = False
    seed: Annotated[int, Option("Seed of masks and random ids", least=0)] = 0
    revision: Revision = None
    allow_missing: AllowMissing = False
    resume: bool = False
    force: Force = False
