"""Collage AdamW in the paper's own arithmetic: every operation in bf16, rounded (arXiv 2405.03637, Algorithm 2).

For fidelity and comparison. The fused step is faster and about twice as accurate, because the first moment and the
update are rounded once there and at every operation here. The weight decay is inside the update ("compact" in the
released code): applied to the weight before or after, as torch does, it rounds away in bf16, 1 - 1e-5 being 1.

Eager only: `Grow` and `Mul` need each rounding to happen (`mcf.transforms`). Blocks keep the temporaries in the cache.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lpconv.mcf.expansion import Pair, expand_scalar, grow, mul_scalar

__all__ = ["paper_step"]

_BLOCK = 2**18  # elements


def paper_step(parts: tuple[tuple[Tensor, ...], ...], gradient: Tensor, group: Mapping[str, Any], step: int) -> None:
    """One step in place: parts are (theta, d_theta), (m,), and (v,) for light or (v, d_v) for plus; all 1-D bf16.

    Scalars stay in fp64 on the host and enter as Python numbers, which PyTorch does not round to bf16. The gradient is
    rounded to bf16 first. `group` holds the options of `CollageAdamW`.
    """
    for start in range(0, len(gradient), _BLOCK):
        block = slice(start, start + _BLOCK)
        _step_block(tuple(tuple(t[block] for t in tensors) for tensors in parts), gradient[block], group, step)


def _step_block(parts: tuple[tuple[Tensor, ...], ...], gradient: Tensor, group: Mapping[str, Any], step: int) -> None:
    (theta, d_theta), (m,), v_parts = parts
    lr, (beta1, beta2) = float(group["lr"]), group["betas"]
    g = gradient.to(torch.bfloat16)
    if group["maximize"]:
        g = -g
    m.mul_(beta1).add_(g, alpha=1 - beta1)
    _decay_and_add_square(v_parts, g, beta2)
    denominator = v_parts[0].sqrt().div_(math.sqrt(1 - beta2**step)).add_(group["eps"])
    update = (m / denominator).mul_(-lr / (1 - beta1**step)).sub_(theta, alpha=lr * group["weight_decay"])
    _write((theta, d_theta), grow((theta, d_theta), update))


def _decay_and_add_square(v_parts: tuple[Tensor, ...], g: Tensor, beta2: float) -> None:
    """v = beta2 v + (1 - beta2) g^2: rounded in light, and with beta2 and v as pairs in plus."""
    if len(v_parts) == 1:
        v_parts[0].mul_(beta2).addcmul_(g, g, value=1 - beta2)
        return
    v, d_v = v_parts
    square = torch.zeros_like(g).addcmul_(g, g, value=1 - beta2)
    _write((v, d_v), grow(mul_scalar((v, d_v), expand_scalar(beta2)), square))


def _write(target: Pair, value: Pair) -> None:
    target[0].copy_(value[0])
    target[1].copy_(value[1])
