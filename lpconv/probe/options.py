"""Options of a probe, and the name of its result file. Plain Python."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from annotated_types import Ge

from lpconv.options import AllowMissing, Force, Option, ResumedByBatch, Revision

# Hint for models that a probe does not run.
OWN_LOOP = "track a training step of your own: `with lpconv.track(model, every=1) as t:`, then `print(t.table())`"
PROBE_FILE = "probe.json"  # in an output; marks the folder as a probe's


@dataclass(frozen=True, kw_only=True)
class ProbeOptions:
    """Options of `lpconv probe`."""

    data: Annotated[
        Path | None,
        Option("Text file", default="the sample text", metavar="FILE", parse=Path, is_path=True),
    ] = None
    steps: Annotated[int, Ge(1), Option("Number of forward and backward passes")] = 4
    batch_size: Annotated[int, Ge(1), Option("Number of sequences per batch")] = 8
    seq_len: Annotated[
        int | None, Ge(2), Option("Number of tokens per sequence", default="128, or the model's maximum")
    ] = None
    every: Annotated[int, Ge(1), Option("Record every Nth step")] = 1
    calibrate: Annotated[bool, Option("Also write scales for unit scaling, as calibration.json")] = False
    noise: Annotated[
        bool, Option("Also measure the rounding noise of gradients in mxfp8 and the recipes of four bits")
    ] = False
    seed: Annotated[int, Ge(0), Option("Seed of token masks, random token ids and stochastic rounding")] = 0
    revision: Revision = None
    allow_missing: AllowMissing = False
    resume: ResumedByBatch = False
    force: Force = False
