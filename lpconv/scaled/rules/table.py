"""The one table of rules: ATen op to rule, and the class each op belongs to."""

from typing import Any

import torch

from lpconv.scaled.pair import Rule
from lpconv.scaled.rules import add, layout, linear, multiply, native, nonlinear, norm, own, plain

__all__ = ["CLASSES", "IN_PLACE", "NATIVE_RULES", "RULES"]

aten = torch.ops.aten

CLASSES: dict[str, dict[Any, Rule]] = {
    "layout": layout.RULES,
    "multiply": multiply.RULES,
    "add": add.RULES,
    "non-linear": nonlinear.RULES,
    "norm": norm.RULES,
    "linear in the gradient": linear.RULES,
    "plain": plain.RULES,
    "own": own.RULES,
}

RULES: dict[Any, Rule] = {op: rule for rules in CLASSES.values() for op, rule in rules.items()}

NATIVE_RULES: dict[Any, Rule] = RULES | native.RULES

# An in-place op on a scaled tensor computes as its functional twin and writes the result back.
IN_PLACE: dict[Any, Any] = {
    aten.add_.Tensor: aten.add.Tensor,
    aten.sub_.Tensor: aten.sub.Tensor,
    aten.mul_.Tensor: aten.mul.Tensor,
    aten.mul_.Scalar: aten.mul.Scalar,
    aten.div_.Tensor: aten.div.Tensor,
    aten.div_.Scalar: aten.div.Scalar,
    aten.index_put_.default: aten.index_put.default,
    aten.index_add_.default: aten.index_add.default,
    aten.scatter_.src: aten.scatter.src,
    aten.scatter_add_.default: aten.scatter_add.default,
    aten.neg_.default: aten.neg.default,
    aten.zero_.default: aten.zeros_like.default,
    aten.masked_fill_.Scalar: aten.masked_fill.Scalar,
    aten.masked_fill_.Tensor: aten.masked_fill.Tensor,
    aten.clamp_.default: aten.clamp.default,
    aten.relu_.default: aten.relu.default,
    aten.silu_.default: aten.silu.default,
}
