"""Recompute the recorded output errors of error feedback, with the calibration text, from source and stored codes.

A layer meets what the rounded layers before it make of the text, so one pass over the first layers, with the stored
codes, gives the inputs of all their weights again. The first layer takes seconds for any model.
"""

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
from lpconv.results import CalibrationRecord, FeedbackCheck, from_json
from lpconv.storage.arranged import arranged
from lpconv.storage.partfile import sha256_of
from lpconv.storage.source import read_range
from lpconv.verify.outputs import calibration_windows, windows_together
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


def check_output_errors(
    job: Job, directory: Path, output: OutputReader, provenance: Mapping[str, Any], progress: Progress
) -> FeedbackCheck | None:
    """Compare recorded with recomputed output errors: of the first layer, or of all layers at the level ``logits``.

    None if error feedback rounded no tensor.
    """
    errors = ((n, r.rounding.output_error) for n, r in output.records.items() if r.rounding is not None)
    recorded = {n: error for n, error in errors if error is not None}  # trained codes have none
    if not recorded:
        return None
    calibration = from_json(CalibrationRecord, provenance.get("calibration"))
    asked = str(job.plan.options.calibrate)
    text = next((p for p in (text_at(asked), directory.parent / asked) if p.is_file()), None)
    if text is None or sha256_of(text) != calibration.sha256:
        is_other = "is not here" if text is None else "is another file"
        return FeedbackCheck(skipped=f"not checked: calibration text `{calibration.text}` {is_other}")
    config, tokens, length = calibration_windows(job.plain, job.plan.options, text)
    wrong, seen = [], 0
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
            for name, error in _errors(job, source, walk, index, wanted).items():
                seen += 1
                if not math.isclose(error, recorded[name], rel_tol=_TOLERANCE, abs_tol=1e-9):
                    wrong.append(f"`{name}`: the output error is {error:.3g}, not {recorded[name]:.3g} as recorded")
            if index + 1 < len(layers):
                walk.advance(index)
            progress.advance(1)
    return FeedbackCheck(num_layers=len(layers), num_tensors=seen, wrong=tuple(wrong))


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
