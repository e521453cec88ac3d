"""Round with error feedback (GPTQ): round a layer's weights so that its outputs, not its weights, change least.

GPTQ (Frantar et al. 2022, arXiv 2210.17323). For inputs X of a linear layer and H = X Xᵀ, the squared error of the
outputs is tr((W - Q) H (W - Q)ᵀ). Columns of W are rounded one after the other, and the error of a column is
compensated by the columns not yet rounded, along the inverse of H. With U upper triangular and UᵀU = H⁻¹ (algorithm 1):

    q_c = round(w_c),  e = (w_c - q_c) / U_cc,  w_j -= e U_cj for all later columns j

This module knows no forms and no files: the grid is a format and a fixed scale for each number (static groups).

Departures from the paper: columns are ordered by falling diagonal of H (`desc_act` of the authors' code). U comes from
a single Cholesky factor, H = V Vᵀ with V upper triangular and U = V⁻¹, instead of an inverse between two. Columns that
no input reaches are rounded to nearest instead of becoming 0, because another text may reach them.

Letters in shapes: R rows (outputs) and C columns (inputs) of a weight, B columns of a block.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from lpconv.formats.codes import nearest_code_
from lpconv.formats.spec import Format
from lpconv.workers import SingleThreadedTorch

DAMPING = 0.01  # added to H's diagonal, times its mean: the paper's value
AIM = 0.25  # share of the step towards the source's outputs
_BLOCK = 64  # columns corrected one by one; later columns are corrected once per block
_ROWS = 4096  # rows rounded together, to bound memory; rows are independent


@dataclass(frozen=True, kw_only=True, eq=False)
class InverseFactor:
    """`order` of the columns, and U for the columns in that order, fp32 [C, C]."""

    order: Tensor
    upper_CC: Tensor


def inverse_factor(hessian_CC: Tensor) -> InverseFactor:
    """U of `hessian_CC` (Σ x xᵀ over the inputs of a layer, or any multiple), computed in fp64.

    Raises ValueError if it is not finite.
    """
    diagonal = hessian_CC.diagonal()
    if not torch.isfinite(diagonal).all():
        raise ValueError("the inputs of the layer are NaN, infinite or too large to be squared")
    rising = torch.argsort(diagonal, stable=True)  # U for falling order is L⁻¹ for rising order, reversed
    wide_CC = hessian_CC[rising].double()[:, rising]
    unreached = wide_CC.diagonal() == 0
    wide_CC.diagonal().add_(DAMPING * wide_CC.diagonal().mean())[unreached] = 1.0
    lower_CC, info = torch.linalg.cholesky_ex(wide_CC)
    if int(info):
        raise ValueError("the inputs of the layer have no positive definite second moment")
    del wide_CC
    inverse_CC = torch.eye(len(lower_CC), dtype=torch.float64)
    torch.linalg.solve_triangular(lower_CC, inverse_CC, upper=False, out=inverse_CC)
    return InverseFactor(order=rising.flip(0), upper_CC=inverse_CC.float().flip(0, 1))


def step_to_source(inverse: InverseFactor, shift_CC: Tensor) -> Tensor:
    """D H⁻¹, with columns in the order of `inverse`. `shift_CC` is D = Σ (x̃ - x) xᵀ.

    The inputs of the layer are x̃ in the source and x in the rounded model.
    """
    return shift_CC[:, inverse.order] @ inverse.upper_CC.t() @ inverse.upper_CC


def aimed_at_source(weight_RC: Tensor, inverse: InverseFactor, step_CC: Tensor, *, share: float = AIM) -> Tensor:
    """The weight to round instead of `weight_RC`, because its inputs are no longer those of the source.

    `step_CC` is that of `step_to_source`. The outputs W x̃ are met best by W + W D H⁻¹ (GPTAQ, Li et al. 2025, arXiv
    2504.02692), of which `share` of the step is taken.
    """
    out_RC = torch.empty_like(weight_RC)
    out_RC[:, inverse.order] = weight_RC[:, inverse.order].addmm(weight_RC, step_CC, alpha=share)
    return out_RC


def round_with_feedback(weight_RC: Tensor, inverse: InverseFactor, scales_RC: Tensor, element: Format) -> Tensor:
    """The rounded weight (code · scale, with codes of `element`) whose layer outputs are nearest to the weight's.

    Weight and scales are fp32.
    """
    out_RC = torch.empty_like(weight_RC)
    for start in range(0, len(weight_RC), _ROWS):
        rows = slice(start, start + _ROWS)
        weight_CR, scales_CR = (x_RC[rows].t()[inverse.order] for x_RC in (weight_RC, scales_RC))
        out_RC[rows, inverse.order] = _round_columns(weight_CR, scales_CR, inverse.upper_CC, element).t()
    return out_RC


def round_to_nearest(weight_RC: Tensor, scales_RC: Tensor, element: Format) -> Tensor:
    """Round to the nearest code · scale, fp32, without feedback."""
    return nearest_code_(weight_RC / scales_RC, element).mul_(scales_RC)


def _round_columns(weight_CR: Tensor, scales_CR: Tensor, upper_CC: Tensor, element: Format) -> Tensor:
    """The loop of the paper's algorithm 1 on transposed weights (overwritten): columns are rows here."""
    num = len(weight_CR)
    out_CR = torch.empty_like(weight_CR)
    for first in range(0, num, _BLOCK):
        last = min(first + _BLOCK, num)
        errors_BR = torch.empty_like(weight_CR[first:last])
        with SingleThreadedTorch():  # waking other threads takes longer than rounding one column
            for c in range(first, last):
                rounded = torch.mul(nearest_code_(weight_CR[c] / scales_CR[c], element), scales_CR[c], out=out_CR[c])
                error = torch.sub(weight_CR[c], rounded, out=errors_BR[c - first]).div_(upper_CC[c, c])
                weight_CR[c + 1 : last].addr_(upper_CC[c, c + 1 : last], error, alpha=-1)
        weight_CR[last:].addmm_(upper_CC[first:last, last:].t(), errors_BR, alpha=-1)
    return out_CR
