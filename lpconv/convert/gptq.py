"""Round with error feedback (GPTQ): round a layer's weights so that its outputs, not its weights, change least.

GPTQ (Frantar et al. 2022, arXiv 2210.17323). For inputs X of a linear layer and H = X Xᵀ, the squared error of the
outputs is tr((W - Q) H (W - Q)ᵀ). Columns of W are rounded one after the other, and the error of a column is
compensated by the columns not yet rounded. With H = V Vᵀ and V upper triangular, ‖(W - Q) V‖² is that error, whose
column c depends on the columns of Q up to c only, so it is smallest for

    q_c = round(w_c + s_c / V_cc),  s_c = Σ (w_j - q_j) V_jc over all earlier columns j

This is the paper's algorithm 1, which uses V⁻¹ and changes later columns instead (LDLQ, Chee et al. 2023, arXiv
2307.13304, theorem 6). Here, V needs no inverse, and weights no copy.

This module knows no forms and no files: the grid is a format and a fixed scale for each number (static groups).

Departures from the paper: columns are ordered by falling diagonal of H (`desc_act` of the authors' code). The factor is
computed in fp32, and in fp64 only if that fails. Columns that no input reaches are rounded to nearest instead of
becoming 0, because another text may reach them.

Letters in shapes: N inputs, R rows (outputs) and C columns (inputs) of a weight, B columns of a block. Columns are
stored by rising diagonal, and rounded from the last to the first: `lower_CC` is V with both axes reversed.
"""

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from lpconv.formats.codes import nearest_code_
from lpconv.formats.spec import Format
from lpconv.workers import SingleThreadedTorch

DAMPING = 0.01  # added to H's diagonal, times its mean: the paper's value
AIM = 0.25  # share of the step towards the source's outputs
_BLOCK = 32  # columns corrected one by one; all earlier blocks correct a block at once
_SQUARE = 1024  # columns of a part of H: parts above the diagonal follow from those below


@dataclass(frozen=True, kw_only=True, eq=False)
class Factor:
    """`order` of the columns by rising diagonal, and L of H + diag(`added_C`) = L Lᵀ in that order, fp32 [C, C].

    With `aim_CC`, D L⁻ᵀ, weights are aimed at the outputs of the source. `squares_C` is the diagonal of H, in the
    weights' order of columns; `is_transposed` weights are stored as [inputs, outputs].
    """

    order: Tensor
    lower_CC: Tensor
    added_C: Tensor
    squares_C: Tensor
    num_inputs: int
    is_transposed: bool = False
    aim_CC: Tensor | None = None

    def oriented(self, stored: Tensor) -> Tensor:
        """A stored matrix as [outputs, inputs], or the other way round."""
        return stored.t() if self.is_transposed else stored

    def column_errors(self) -> Tensor:
        """The diagonal of L in the weights' order [C]: the error of the outputs for an error of 1 in each column.

        Later columns compensate what they can. Columns that no input reaches count like the geometric mean.
        """
        errors_C = torch.empty_like(self.squares_C)
        errors_C[self.order] = self.lower_CC.diagonal()
        is_reached = self.squares_C > 0
        return errors_C.where(is_reached, errors_C[is_reached].log().mean().nan_to_num(0.0).exp())

    def squared_outputs(self, weight_RC: Tensor) -> float:
        """‖W X‖², the squared size of a weight's outputs."""
        ordered_RC = weight_RC[:, self.order]
        damped = torch.mm(ordered_RC, self.lower_CC).square_().sum(dtype=torch.float64)
        return max(float(damped - ordered_RC.square_().sum(0, dtype=torch.float64) @ self.added_C.double()), 0.0)


@dataclass(kw_only=True, eq=False)
class Moment:
    """Sums over the inputs x of a weight: Σ x xᵀ, of which only parts on and below the diagonal, and Σ (x̃ - x) xᵀ.

    x̃ are the inputs in the source. `is_transposed` weights are stored as [inputs, outputs].
    """

    hessian_CC: Tensor
    shift_CC: Tensor | None = None
    num_inputs: int = 0
    is_transposed: bool = False

    @classmethod
    def zero(cls, cols: int, *, is_transposed: bool = False) -> Self:
        return cls(hessian_CC=torch.zeros(cols, cols), is_transposed=is_transposed)

    def add(self, x: Tensor, source_x: Tensor | None = None) -> None:
        x_NC = x.reshape(-1, x.shape[-1])
        for start in range(0, x_NC.shape[1], _SQUARE):
            part = slice(start, start + _SQUARE)
            self.hessian_CC[start:, part].addmm_(x_NC[:, start:].t(), x_NC[:, part])
        self.num_inputs += len(x_NC)
        if source_x is not None:
            if self.shift_CC is None:
                self.shift_CC = torch.zeros_like(self.hessian_CC)
            self.shift_CC.addmm_((source_x.reshape(x_NC.shape) - x_NC).t(), x_NC)

    def factor(self, dtype: torch.dtype = torch.float32) -> Factor:
        """The factor of Σ x xᵀ, computed in `dtype`. In fp32 it overwrites the sums, which are gone in any case.

        Raises ValueError if the sums are not finite, ArithmeticError if they are not positive definite in `dtype`.
        """
        lower_CC, aim_CC = self.hessian_CC, self.shift_CC
        self.hessian_CC, self.shift_CC = torch.empty(0), None
        diagonal = lower_CC.diagonal().clone()
        if not torch.isfinite(diagonal).all():
            raise ValueError("the inputs of the layer are NaN, infinite or too large to be squared")
        order = torch.argsort(diagonal, stable=True)
        added_C = (DAMPING * diagonal.mean()).expand(len(order)).clone()
        added_C[diagonal[order] == 0] = 1.0
        for start in range(0, len(order), _SQUARE):
            stop = start + _SQUARE
            lower_CC[start:stop, stop:] = lower_CC[stop:, start:stop].t()
        _reorder_(lower_CC, order)
        _reorder_(lower_CC.t(), order)
        matrix_CC = lower_CC.to(dtype)
        matrix_CC.diagonal().add_(added_C)
        lower_CC, info = matrix_CC.mT, torch.empty((), dtype=torch.int32)  # in place: H is symmetric
        torch.linalg.cholesky_ex(lower_CC, out=(lower_CC, info))
        if info:
            raise ArithmeticError("the inputs of the layer have no positive definite second moment")
        lower_CC = lower_CC.float()
        if aim_CC is not None:
            _reorder_(aim_CC, order)
            torch.linalg.solve_triangular(lower_CC.mT, aim_CC, upper=True, left=False, out=aim_CC)
        return Factor(
            order=order, lower_CC=lower_CC, added_C=added_C, squares_C=diagonal, num_inputs=self.num_inputs,
            is_transposed=self.is_transposed, aim_CC=aim_CC,
        )  # fmt: skip


def _reorder_(x_RC: Tensor, order: Tensor) -> None:
    """Put columns in `order`, in place."""
    for rows in torch.split(x_RC, _SQUARE):
        rows.copy_(rows[:, order])


def round_with_feedback(weight_RC: Tensor, factor: Factor, scales_RC: Tensor, element: Format) -> Tensor:
    """The rounded weight (code · scale, with codes of `element`) whose layer outputs are nearest to the weight's.

    Weight and scales are fp32. With `factor.aim_CC`, the outputs are those of the source, W x̃, which W + W D H⁻¹ meets
    best (GPTAQ, Li et al. 2025, arXiv 2504.02692). A share of `AIM` of that step is taken.
    """
    order = factor.order
    weight_CR, scales_CR = weight_RC.t()[order], scales_RC.t()[order]
    aim_CR = None if factor.aim_CC is None else torch.mm(weight_RC, factor.aim_CC).mul_(AIM).t()
    out_RC = torch.empty_like(weight_RC)
    out_RC[:, order] = _round_columns(weight_CR, scales_CR, factor.lower_CC, aim_CR, element).t()
    return out_RC


def round_to_nearest(weight_RC: Tensor, scales_RC: Tensor, element: Format) -> Tensor:
    """Round to the nearest code · scale, fp32, without feedback."""
    return nearest_code_(weight_RC / scales_RC, element).mul_(scales_RC)


def _round_columns(
    weight_CR: Tensor, scales_CR: Tensor, lower_CC: Tensor, aim_CR: Tensor | None, element: Format
) -> Tensor:
    """Round transposed weights, which become errors W - Q: columns are rows here, and rounded from the last one."""
    out_CR = torch.empty_like(weight_CR)
    for last in range(len(weight_CR), 0, -_BLOCK):
        first = max(last - _BLOCK, 0)
        sums_BR = torch.mm(lower_CC[last:, first:last].t(), weight_CR[last:])
        if aim_CR is not None:
            sums_BR += aim_CR[first:last]
        block = slice(first, last)
        weights, scales, rounded = (x_CR[block].unbind() for x_CR in (weight_CR, scales_CR, out_CR))
        sums, lower_BB = sums_BR.unbind(), lower_CC[block, block]
        factors = lower_BB.diagonal().reciprocal().tolist()
        with SingleThreadedTorch():  # waking other threads takes longer than rounding one column
            for c in range(last - first - 1, -1, -1):
                target = torch.add(weights[c], sums[c], alpha=factors[c]).div_(scales[c])
                torch.mul(nearest_code_(target, element), scales[c], out=rounded[c])
                sums_BR[:c].addr_(lower_BB[c, :c], weights[c].sub_(rounded[c]))
    return out_CR
