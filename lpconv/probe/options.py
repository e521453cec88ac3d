"""Options of a probe, and the name of its result file. Plain Python."""

from dataclasses import dataclass
from pathlib import Path

from annotated_types import Ge

from lpconv.options import AllowMissing, Force, ResumedByBatch, Revision, option

# Hint for models that a probe does not run.
OWN_LOOP = "track a training step of your own: `with lpconv.track(model, every=1) as t:`, then `print(t.table())`"
PROBE_FILE = "probe.json"  # in an output; marks the folder as a probe's


@dataclass(frozen=True, kw_only=True)
class ProbeOptions:
    """Options of `lpconv probe`."""

    data: Path | None = option(None, "Text file", default="the sample text", metavar="FILE", parse=Path, is_path=True)
    steps: int = option(4, "Number of forward and backward passes", Ge(1))
    batch_size: int = option(8, "Number of sequences per batch", Ge(1))
    seq_len: int | None = option(None, "Number of tokens per sequence", Ge(2), default="128, or the model's maximum")
    every: int = option(1, "Record every Nth step", Ge(1))
    calibrate: bool = option(False, "Also write scales for unit scaling, as calibration.json")
    noise: bool = option(False, "Also measure the rounding noise of gradients in mxfp8 and the recipes of four bits")
    seed: int = option(0, "Seed of token masks, random token ids and stochastic rounding", Ge(0))
    revision: Revision = None
    allow_missing: AllowMissing = False
    resume: ResumedByBatch = False
    force: Force = False
