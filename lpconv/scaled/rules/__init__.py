"""The propagation rules: one file per class of ATen ops, with the ops of each rule; here, a table from op to rule.

A rule's docstring gives its result as a (data, scale) pair. d_x and s_x are the data and scale of an operand x, d and s
of the only operand, g the incoming gradient, r the factor of a contraction.
"""

from typing import Any

import torch
from torch._ops import OpOverload

from lpconv.scaled.pair import Rule
from lpconv.scaled.rules import add, layout, linear, multiply, native, nonlinear, norm, own, plain

aten = torch.ops.aten

FILES = (layout, multiply, add, nonlinear, norm, linear, plain, own)
RULES: dict[Any, Rule] = {op: rule for file in FILES for rule, ops in file.OPS.items() for op in ops}
NATIVE_RULES: dict[Any, Rule] = {op: r for op, r in RULES.items() if op not in layout.SUMS} | native.RULES

# Functional twins of in-place ops, if their name differs by more than the underscore.
_TWINS: dict[Any, Any] = {
    aten.zero_.default: aten.zeros_like.default,
    aten.pow_.Scalar: aten.pow.Tensor_Scalar,
    aten.pow_.Tensor: aten.pow.Tensor_Tensor,
}


def rule_for(op: OpOverload, is_native: bool = False) -> Rule | None:
    """The rule of an op from the table, or from its class of ops; None if there is neither.

    A view only moves elements, unless it reinterprets their bits as another type. An op called `…_backward` multiplies
    a gradient by a Jacobian, and is linear in it.
    """
    rule = (NATIVE_RULES if is_native else RULES).get(op)
    if rule is not None:
        return rule
    if op.is_view and op is not aten.view.dtype:
        return layout.layout
    return linear.linear if op._opname.endswith("_backward") else None


def functional_twin(op: OpOverload) -> OpOverload | None:
    """The functional twin of an in-place op: its name without the underscore. None if there is none.

    For an op that changes the shape of a tensor in place, such as `squeeze_`, the twin is a view.
    """
    if op in _TWINS:
        return _TWINS[op]  # type: ignore[no-any-return]
    if not op._opname.endswith("_") or op.namespace != "aten":
        return None
    twin = getattr(getattr(aten, op._opname[:-1], None), op._overloadname, None)
    changes_shape = torch.Tag.inplace_view in op.tags  # the twin of `resize_` is not a view
    return twin if twin is not None and twin.is_view >= changes_shape else None
