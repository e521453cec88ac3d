"""One tensor that is rounded with error feedback: its scales, and its codes matrix by matrix."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Self

import torch
from torch import Tensor

from lpconv.convert.gptq import DAMPING, InverseFactor, aimed_at_source, round_to_nearest, round_with_feedback
from lpconv.forms.facts import Measurement, block_ranges
from lpconv.forms.rounded import digest_of
from lpconv.forms.scaled import ScaledCodes
from lpconv.models.moments import Matrix, Moment, sampled_rows
from lpconv.plan.plan import PlannedTensor
from lpconv.plan.workers import SingleThreadedTorch, Workers
from lpconv.results import RoundingRecord
from lpconv.storage.dtypes import TORCH_DTYPES
from lpconv.storage.header import DTYPE_BITS


class TensorRounding:
    """The stored components of a tensor in `parts`, by name. Matrices that are never rounded here keep nearest codes.

    The scales are those of rounding to nearest; if they are searched, columns count by the size of their inputs.
    """

    def __init__(self, t: PlannedTensor, workers: Workers, measured: Measurement, count: int) -> None:
        assert isinstance(t.form, ScaledCodes)
        (data,) = t.form.data
        self.form, self._workers, self._measured = t.form, workers, measured
        self._codes = torch.empty(data.num_bytes, dtype=torch.uint8)
        codes = self._codes.view(TORCH_DTYPES.get(data.dtype, torch.uint8)).view(data.shape)
        self.parts = {**{c.name: measured.side[c.name] for c in t.form.side}, data.name: codes}
        self._size, self._count = t.info.num_elements // count, count
        self._signal = self._noise = self._nearest = self._max_steps = 0.0
        self._num_inputs = self._num_rounded = 0

    @classmethod
    def begin(cls, t: PlannedTensor, workers: Workers, moments: Mapping[Matrix, Moment]) -> Self | None:
        """Choose the scales of a tensor, given the moments of its matrices. None if it has NaN or Inf."""
        own = {m: moment for m, moment in moments.items() if m.name == t.name}
        count = next(iter(own)).count
        form = t.form
        if not any(moment.is_transposed for moment in own.values()):  # otherwise a row has one input
            form = form.with_importance(_importance(own, count, t.info.shape[-1]).squeeze(0))
        with SingleThreadedTorch():
            measured = workers.measure(replace(t, form=form))
        if not measured.stats.is_finite:
            return None
        rounding = cls(t, workers, measured, count)
        if count > 1:
            for index in range(count):
                rounding._round_to_nearest(index)
        return rounding

    def round(self, matrix: Matrix, inverse: InverseFactor, moment: Moment, step_CC: Tensor | None) -> None:
        """Round one matrix with error feedback, aimed at the outputs of the source if `step_CC` leads there."""
        weight_RC, scales_RC = map(moment.oriented, self._weight_and_scales(matrix.index))
        assert self.form.format is not None
        aim_RC = weight_RC if step_CC is None else aimed_at_source(weight_RC, inverse, step_CC)
        rounded_RC = round_with_feedback(aim_RC, inverse, scales_RC, self.form.format)
        self._store(matrix.index, moment.oriented(rounded_RC))
        sample, scales = sampled_rows(weight_RC), sampled_rows(scales_RC)
        self._signal += moment.squared_outputs(sample)
        self._noise += moment.squared_outputs(sample - sampled_rows(rounded_RC))
        self._nearest += moment.squared_outputs(sample - round_to_nearest(sample, scales, self.form.format))
        self._num_inputs += moment.num_inputs
        self._num_rounded += 1
        self._note_distance(rounded_RC, weight_RC, scales_RC)

    def record(self) -> RoundingRecord:
        """The record of the rounding of all matrices."""
        signal = self._signal or 1.0
        return RoundingRecord(
            output_error=self._noise / signal,
            nearest_error=self._nearest / signal,
            num_inputs=self._num_inputs,
            max_steps=self._max_steps,
            sha256=digest_of(self.parts),
            num_nearest=self._count - self._num_rounded,
        )

    def _round_to_nearest(self, index: int) -> None:
        weight, scales = self._weight_and_scales(index)
        assert self.form.format is not None
        rounded = round_to_nearest(weight, scales, self.form.format)
        self._store(index, rounded)
        self._note_distance(rounded, weight, scales)

    def _weight_and_scales(self, index: int) -> tuple[Tensor, Tensor]:
        """A matrix of the source and the scale of each of its numbers, fp32, as stored."""
        start, shape = index * self._size, self.form.shape[-2:]
        weight = self._workers.read_numbers(self.form.name, start, start + self._size).float()
        scales = self.form.scale_of_each(self._measured.side, start, start + self._size)
        return weight.view(shape), scales.view(shape)

    def _note_distance(self, rounded: Tensor, weight: Tensor, scales: Tensor) -> None:
        """Note the largest distance of a number; overwrites `rounded`."""
        self._max_steps = max(self._max_steps, float(rounded.sub_(weight).div_(scales).abs_().amax()))

    def _store(self, index: int, rounded: Tensor) -> None:
        """Store the codes of a matrix of numbers on the form's grid."""
        values, form, measured = rounded.reshape(-1), self.form, self._measured
        (component,) = form.data
        for first, last in block_ranges(len(values), form.cols):
            start, stop = (index * self._size + n for n in (first, last))
            with self._workers.borrow() as work:
                codes = form.encode(values[first:last], start, measured, work).data
                assert torch.equal(form.decode(codes, start, stop, measured.side), values[first:last]), form.name
                at, end = (n * DTYPE_BITS[component.dtype] // 8 for n in form.place(start, stop, measured.side))
                self._codes[at:end] = codes[0].view(torch.uint8)


def _importance(moments: Mapping[Matrix, Moment], count: int, columns: int) -> Tensor:
    """How much the error of each column matters, fp32 [count, columns]; equally for matrices without a moment."""
    importance = torch.ones(count, columns)
    for matrix, moment in moments.items():
        diagonal = moment.hessian_CC.diagonal()
        importance[matrix.index] = diagonal + DAMPING * diagonal.mean()
    return importance
