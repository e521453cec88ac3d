"""The whole of `lpconv probe`: measure a checkpoint, and publish a folder with the record and its report."""

import json
from pathlib import Path
from typing import TYPE_CHECKING

from lpconv.data.texts import check_reads_text, check_seq_len, check_text, num_positions
from lpconv.layouts.reader import open_readable
from lpconv.options import check
from lpconv.probe.options import OWN_LOOP, PROBE_FILE, ProbeOptions
from lpconv.progress import Progress
from lpconv.results import ProbeReport, to_json
from lpconv.storage.checkpoint import Openable
from lpconv.storage.partfile import write_small
from lpconv.storage.staging import Staging, check_free

if TYPE_CHECKING:
    from lpconv.probe.record import ProbeResult


def run_probe(
    model: Openable, output: Path, options: ProbeOptions, *, progress: Progress
) -> "tuple[ProbeResult, ProbeReport]":
    """Probe `model` and publish the folder `output`.

    Raises OutputExistsError if `output` exists, or if another run is writing it.
    """
    check(options)
    check_free(output, force=options.force, marker=PROBE_FILE)
    checkpoint = open_readable(model, revision=options.revision)
    checkpoint.check_apart(output)
    check_reads_text(checkpoint.config, hint=OWN_LOOP)
    check_seq_len(options.seq_len, num_positions(checkpoint.config))
    if options.data is not None:
        check_text(options.data, checkpoint.directory, checkpoint.config, options.seq_len)
    # The imports below load torch and transformers, which takes seconds.
    from lpconv.probe.advice import answer
    from lpconv.probe.checkpoint import calibrate_checkpoint, probe_checkpoint
    from lpconv.report.html import html
    from lpconv.report.probe import probe_document
    from lpconv.scaled.disk import write_factors

    with Staging(output, {"probe": checkpoint.origin.name}, force=options.force, marker=PROBE_FILE) as staging:
        result = probe_checkpoint(checkpoint, options, progress=progress)
        if options.calibrate:
            write_factors(staging.directory, calibrate_checkpoint(checkpoint, options, progress=progress))
        progress.start("writing the report", 0)
        answers = answer(result)
        write_small(staging.directory / "report.html", html(probe_document(answers)))
        text = json.dumps(to_json(result), separators=(",", ":"), allow_nan=False)  # indenting would multiply the size
        write_small(staging.directory / PROBE_FILE, text + "\n")
        staging.publish()
    return result, answers
