"""Rounding with error feedback: a layer's weights are rounded so that its outputs, not its weights, change least.

GPTQ (Frantar et al. 2022, arXiv 2210.17323). For inputs X of a linear layer and H = X Xᵀ, the squared error of the
outputs is tr((W - Q) H (W - Q)ᵀ). Columns of W are rounded one after the other, and what a column loses is made up for
by the columns that are not rounded yet, along the inverse of H. With U upper triangular and UᵀU = H⁻¹ (algorithm 1):

    q_c = round(w_c),  e = (w_c - q_c) / U_cc,  w_j -= e U_cj for all later columns j

This file knows no form and no file: the grid is a format and a scale for each number, fixed before (static groups).

Departures from the paper: columns go by falling diagonal of H (`desc_act` of the authors' code). U comes from one
Cholesky factor, H = V Vᵀ with V upper triangular and U = V⁻¹, instead of an inverse between two. Columns that no input
reaches are rounded to nearest instead of becoming 0, since another text may reach them.

Letters in shapes: R rows (outputs) and C columns (inputs) of a weight, B columns of a block.
"""

import torch
from torch import Tensor

from lpconv.formats.narrow import nearest_
from lpconv.formats.spec import Format
from lpconv.plan.workers import SingleThreadedTorch

DAMPING = 0.01  # of the mean of H's diagonal, added to it: the paper's value
_BLOCK = 64  # columns that are corrected one by one; later ones are corrected once for all of them
_ROWS = 4096  # rows that are rounded together: each row is rounded alone, so this bounds memory
_SAMPLED = 1024  # rows that an output error is measured on


def round_with_feedback(
    weight_RC: Tensor, hessian_CC: Tensor, scales_RC: Tensor, element: Format, *, damping: float = DAMPING
) -> Tensor:
    """Numbers code · scale, the codes of `element`, that make the outputs of a linear layer nearest to the weight's.

    All tensors are fp32. `hessian_CC` is Σ x xᵀ over the layer's inputs, or any multiple. Raises ValueError if it is
    not finite.
    """
    order, inverse_CC = _inverse_factor(hessian_CC, damping)
    out_RC = torch.empty_like(weight_RC)
    for start in range(0, len(weight_RC), _ROWS):
        rows = slice(start, start + _ROWS)
        found_CR = _round_columns(weight_RC[rows].t()[order], inverse_CC, scales_RC[rows].t()[order], element)
        out_RC[rows, order] = found_CR.t()
    return out_RC


def round_to_nearest(weight_RC: Tensor, scales_RC: Tensor, element: Format) -> Tensor:
    """The nearest numbers code · scale, fp32: what there is without feedback."""
    return _codes(weight_RC / scales_RC, element).mul_(scales_RC)


def output_error(weight_RC: Tensor, rounded_RC: Tensor, hessian_CC: Tensor) -> float:
    """‖(W - Q)X‖² / ‖WX‖², the share of a layer's output that rounding changes, over at most 1,024 even rows."""
    step = -(-len(weight_RC) // _SAMPLED)
    weight, lost = weight_RC[::step], weight_RC[::step] - rounded_RC[::step]
    signal, noise = (float(torch.mm(x, hessian_CC).mul_(x).sum(dtype=torch.float64)) for x in (weight, lost))
    return max(noise, 0.0) / signal if signal > 0 else 0.0


def _inverse_factor(hessian_CC: Tensor, damping: float) -> tuple[Tensor, Tensor]:
    """The order of columns, and U of the columns in that order, fp32. Factors are taken in fp64."""
    diagonal = hessian_CC.diagonal()
    if not torch.isfinite(diagonal).all():
        raise ValueError("the inputs of the layer are NaN, infinite or too large to be squared")
    rising = torch.argsort(diagonal, stable=True)  # U of falling columns is L⁻¹ of rising ones, turned around
    wide = hessian_CC[rising].double()[:, rising]
    shift = damping * float(wide.diagonal().mean())
    unreached = wide.diagonal() == 0
    wide.diagonal().add_(shift)[unreached] = 1.0
    lower, info = torch.linalg.cholesky_ex(wide)
    if int(info):
        raise ValueError("the inputs of the layer have no positive definite second moment")
    del wide
    inverse = torch.linalg.solve_triangular(lower, torch.eye(len(lower), dtype=torch.float64), upper=False)
    return rising.flip(0), inverse.float().flip(0, 1)


def _round_columns(weight_CR: Tensor, inverse_CC: Tensor, scales_CR: Tensor, element: Format) -> Tensor:
    """The loop of the paper's algorithm 1, on transposed weights (overwritten), whose columns are then rows."""
    num = len(weight_CR)
    out_CR = torch.empty_like(weight_CR)
    for first in range(0, num, _BLOCK):
        last = min(first + _BLOCK, num)
        errors_BR = torch.empty_like(weight_CR[first:last])
        with SingleThreadedTorch():  # to wake other threads for one column takes longer than to round it
            for c in range(first, last):
                found = torch.mul(_codes(weight_CR[c] / scales_CR[c], element), scales_CR[c], out=out_CR[c])
                error = torch.sub(weight_CR[c], found, out=errors_BR[c - first]).div_(inverse_CC[c, c])
                weight_CR[c + 1 : last].addr_(inverse_CC[c, c + 1 : last], error, alpha=-1)
        weight_CR[last:].addmm_(inverse_CC[first:last, last:].t(), errors_BR, alpha=-1)
    return out_CR


def _codes(unit: Tensor, element: Format) -> Tensor:
    """The nearest codes of an element, in place; what lies beyond its range becomes its end."""
    if element.twos_complement:
        return unit.round_().clamp_(-element.max - 1, element.max)
    return nearest_(unit, element)
