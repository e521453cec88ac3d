"""Collage AdamW in the paper's own arithmetic: every operation in bf16, rounded (arXiv 2405.03637, Algorithm 2).

For fidelity and comparison. The fused step is more accurate, because it rounds the first moment and the update once
instead of at every operation. Weight decay is part of the update ("compact" in the released code): applied to the
weight before or after, as torch does, it would round away in bf16, where 1 - 1e-5 is 1.

A bf16 operation is one fp32 operation on bf16 numbers and one rounding, as PyTorch computes it. Written out that way
the step can be compiled and checked like any other, and is bitwise equal to `mcf.expansion` in eager mode.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from lpconv.mcf.expansion import expand_scalar
from lpconv.mcf.pairs import Rounding
from lpconv.optim.rules import Coefficients, unit_adamw
from lpconv.optim.storage import Parts, Step, Storage

Pair: TypeAlias = tuple[Tensor, Tensor]  # fp32 tensors of bf16 numbers


def paper_coefficients(group: Mapping[str, Any], step: int) -> Coefficients:
    """Scalars of one step, in fp64 on the host; only beta2's two parts are rounded."""
    (lr, eps, weight_decay), (beta1, beta2) = unit_adamw(group), group["betas"]
    return (
        -1.0 if group["maximize"] else 1.0,
        beta1,
        1 - beta1,
        beta2,
        *expand_scalar(beta2),
        1 - beta2,
        math.sqrt(1 - beta2**step),
        eps,
        -lr / (1 - beta1**step),
        lr * weight_decay,
    )


def build_paper_step(storages: Sequence[Storage], nearest: Rounding) -> Step:
    """Build the step for parts (theta, d_theta), (m,), and (v,) for light or (v, d_v) for plus."""

    def fl(x: Tensor) -> Tensor:
        return nearest(x).float()

    def fast_two_sum(a: Tensor, b: Tensor) -> Pair:
        s = fl(a + b)
        return s, fl(b - fl(s - a))

    def grow(x: Pair, a: Tensor) -> Pair:
        s, e = fast_two_sum(x[0], a)
        return fast_two_sum(s, fl(x[1] + e))

    def multiply(x: Pair, y: Pair) -> Pair:
        p = fl(x[0] * y[0])
        e = fl(x[0] * y[0] - p)  # exact: a product of two bf16 numbers fits fp32
        return fast_two_sum(p, fl(e + fl(fl(x[0] * y[1]) + fl(x[1] * y[0]))))

    def step(parts: Parts, gradient: Tensor, coefficients: tuple[Tensor, ...], random: Tensor | None) -> None:
        sign, beta1, rest1, beta2, beta2_hi, beta2_lo, rest2, root, eps, step_size, decay = coefficients
        (theta, m, v), lows = [p[0].float() for p in parts], [p[1].float() for p in parts if len(p) == 2]
        g = fl(gradient.float()) * sign
        m = fl(fl(m * beta1) + g * rest1)
        if len(lows) == 1:
            v = fl(fl(v * beta2) + rest2 * g * g)
            v_parts: tuple[Tensor, ...] = (v,)
        else:
            v, d_v = grow(multiply((v, lows[1]), (beta2_hi, beta2_lo)), fl(rest2 * g * g))
            v_parts = (v, d_v)
        denominator = fl(fl(fl(torch.sqrt(v)) / root) + eps)
        update = fl(fl(fl(m / denominator) * step_size) - theta * decay)
        for targets, values in zip(parts, (grow((theta, lows[0]), update), (m,), v_parts), strict=True):
            for target, value in zip(targets, values, strict=True):
                target.copy_(value.to(torch.bfloat16))

    return step
