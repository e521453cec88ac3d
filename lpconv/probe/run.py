"""`lpconv probe` as one call: measure a checkpoint, and publish the folder with the record and its page."""

import json
from collections.abc import Mapping
from pathlib import Path

from lpconv.checkpoint.partfile import write_small
from lpconv.checkpoint.staging import Staging
from lpconv.probe.advice import answer
from lpconv.probe.checkpoint import calibrate_checkpoint, probe_checkpoint
from lpconv.probe.options import PROBE_FILE, ProbeOptions
from lpconv.probe.record import ProbeResult
from lpconv.progress import Progress
from lpconv.report.plot import FormatRange
from lpconv.report.probe.html import html_probe
from lpconv.results import ProbeReport, to_json
from lpconv.scaled.disk import write_factors


def run_probe(
    model: str, output: Path, options: ProbeOptions, ranges: Mapping[str, FormatRange], *, progress: Progress
) -> tuple[ProbeResult, ProbeReport]:
    """Probe the model called `model` into the folder `output`; the page shows the `ranges` of number formats.

    Raises OutputExistsError if `output` is taken, or another run writes it.
    """
    with (
        Staging(output, {"probe": model}, force=options.force, marker=PROBE_FILE) as staging,
        staging.discarded_on_failure(),
    ):
        result = probe_checkpoint(model, options, progress=progress)
        if options.calibrate:
            write_factors(staging.directory, calibrate_checkpoint(model, options, progress=progress))
        answers = answer(result)
        write_small(staging.directory / "report.html", html_probe(answers, ranges))
        text = json.dumps(to_json(result), separators=(",", ":"), allow_nan=False)  # indented, it is all white space
        write_small(staging.directory / PROBE_FILE, text + "\n")
        staging.publish()
    return result, answers
