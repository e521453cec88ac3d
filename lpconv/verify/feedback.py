"""Recompute what was recorded of the calibration text: the largest inputs, and output errors of error feedback.

A layer meets what the rounded layers before it make of the text, so one pass over the first layers, with the stored
codes, gives the inputs of all their weights again. The first layer takes seconds for any model.
"""

import dataclasses
import math
from collections.abc import Mapping, Set
from pathlib import Path
from typing import Any, Self

from torch import Tensor

from lpconv.data import text_at
from lpconv.forms.reader import StoredTensors
from lpconv.models.layer_walk import LayerWalk, Matrix, Moment, Watch, collected, matrices_of, sampled_rows
from lpconv.models.opening import model_errors
from lpconv.models.quiet import quiet_transformers
from lpconv.plan.job import Job
from lpconv.plan.memory import MOMENTS_BYTES
from lpconv.progress import Progress
from lpconv.report.numbers import plural
from lpconv.results import CalibrationRecord, FeedbackCheck, from_json
from lpconv.storage.arranged import arranged
from lpconv.storage.partfile import sha256_of
from lpconv.storage.source import read_range
from lpconv.verify.calibrate import calibrate, job_windows
from lpconv.verify.outputs import windows_together
from lpconv.verify.reader import OutputReader

_TOLERANCE = 0.02  # relative: other processors sum in another order


class _Source(StoredTensors):
    """The tensors of the source, except that those that error feedback rounded have the values of the output."""

    output: OutputReader
    rounded: Set[str] = frozenset()

    @classmethod
    def with_rounded(cls, job: Job, output: OutputReader, rounded: Set[str]) -> Self:
        source = cls.open(job.checkpoint)
        source.output, source.rounded = output, rounded
        return source

    def values(self, name: str, start: int, stop: int) -> Tensor:
        return self.output.values(name, start, stop) if name in self.rounded else super().values(name, start, stop)


def check_calibration(
    job: Job, directory: Path, output: OutputReader, provenance: Mapping[str, Any], progress: Progress
) -> FeedbackCheck | None:
    """Compare recorded figures with those on the calibration text. None if the conversion has none.

    Output errors are those of the first layer, or of all layers at the level ``logits``.
    """
    errors = {n: r.rounding.output_error for n, r in output.records.items() if r.rounding is not None}
    recorded = {n: error for n, error in errors.items() if error is not None}
    num_scales = job.plan.num_calibrated
    if not errors and not num_scales:
        return None
    trained = plural(len(errors) - len(recorded), "tensor")
    skipped = [f"the codes of {trained}, which were trained, are only bounded"] * (len(errors) > len(recorded))
    if not recorded and not num_scales:
        return FeedbackCheck(skipped=skipped[0])
    calibration = from_json(CalibrationRecord, provenance.get("calibration"))
    asked = str(job.plan.options.calibrate)
    text = next((p for p in (text_at(asked), directory.parent / asked) if p.is_file()), None)
    if text is None or sha256_of(text) != calibration.sha256:
        is_other = "is not here" if text is None else "is another file"
        what = " and ".join(["output errors"] * bool(recorded) + ["scales of inputs"] * bool(num_scales))
        skipped.append(f"{what}: not checked, because the calibration text `{calibration.text}` {is_other}")
        return FeedbackCheck(skipped="; ".join(skipped))
    options = dataclasses.replace(job.plan.options, calibrate=str(text))
    job = dataclasses.replace(job, plan=dataclasses.replace(job.plan, options=options))
    found = calibrate(job, progress).absmax if num_scales else {}
    num_layers, again = _output_errors(job, output, recorded, progress) if recorded else (0, {})
    before = calibration.absmax | recorded
    wrong = [
        f"`{n}`: the {'output error' if n in again else 'largest value'} is {x:.3g}, not {before[n]:.3g} as recorded"
        for n, x in (found | again).items()
        if not math.isclose(x, before[n], rel_tol=_TOLERANCE, abs_tol=1e-9)
    ]
    compared = {"num_layers": num_layers, "num_tensors": len(again), "num_scales": num_scales}
    return FeedbackCheck(**compared, wrong=tuple(wrong), skipped="; ".join(skipped) or None)


def _output_errors(
    job: Job, output: OutputReader, recorded: Mapping[str, float], progress: Progress
) -> tuple[int, dict[str, float]]:
    """(number of layers, output errors of their tensors by name)."""
    config, tokens, length = job_windows(job)
    found: dict[str, float] = {}
    with (
        _Source.with_rounded(job, output, recorded.keys()) as source,
        model_errors("the model cannot be run layer by layer", hint="use --level hash"),
        quiet_transformers(),
    ):
        at_once = windows_together(config, length)
        walk = LayerWalk.from_files(job.plain, source, tokens.windows, at_once=at_once)
        layers = walk.layers if job.plan.options.verify == "logits" else walk.layers[:1]
        progress.start("recomputing output errors", len(layers), unit="steps")
        for index, layer in enumerate(layers):
            wanted = {m for m in matrices_of(layer) if m.name in recorded}
            found |= _errors(job, source, walk, index, wanted)
            if index + 1 < len(layers):
                walk.advance(index)
            progress.advance(1)
    return len(layers), found


def _errors(job: Job, source: _Source, walk: LayerWalk, index: int, wanted: set[Matrix]) -> dict[str, float]:
    """The output errors of a layer's tensors, by name."""
    sums: dict[str, list[float]] = {}
    orders: Mapping[str, str] = {} if job.plan.gguf is None else job.plan.gguf.orders
    while moments := collected(walk, index, Watch(wanted, MOMENTS_BYTES)) if wanted else {}:
        wanted -= moments.keys()
        for matrix, moment in moments.items():
            size = source.forms[matrix.name].num_elements // matrix.count
            place = matrix.name, matrix.index * size, (matrix.index + 1) * size
            stored = source.values(*place)
            if order := orders.get(matrix.name):  # that of the file, in which rows were sampled
                stored = arranged(stored.view(source.forms[matrix.name].shape), order).reshape(-1)
            was, now = (_sample(x, source, matrix, moment) for x in (read_range(job.source, *place), stored))
            sums.setdefault(matrix.name, [0.0, 0.0])[0] += moment.squared_outputs(was)
            sums[matrix.name][1] += moment.squared_outputs(was - now)
    return {name: noise / (signal or 1.0) for name, (signal, noise) in sums.items()}


def _sample(numbers: Tensor, source: _Source, matrix: Matrix, moment: Moment) -> Tensor:
    """The sampled rows of a matrix, fp32."""
    return sampled_rows(moment.oriented(numbers.float().view(source.forms[matrix.name].shape[-2:])))
