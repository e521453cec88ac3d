"""`ScaledTensor`: value = data · scale as a tensor subclass, so that unmodified models propagate scales op by op.

Autograd works on the outside, in ordinary shapes and dtypes; every ATen op, of the forward and the backward pass alike,
reaches `__torch_dispatch__`, where the rules table computes on (data, scale). With power-of-two scales all of this is
exact in fp32. Under `torch.compile` the subclass is flattened into its data and, if it is dynamic, its scale; a static
scale is a constant of the graph.
"""

import dataclasses
import sys
from dataclasses import dataclass
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.utils._mode_utils import no_dispatch

from lpconv.errors import UnsupportedError, UsageError
from lpconv.formats.scale import pow2_floor
from lpconv.scaled.gather import copy_to_reduce, gathered_rows, rows_to_gather
from lpconv.scaled.pair import Call, Numerics, Role, Scaled, value
from lpconv.scaled.rules import RULES, functional_twin, rule_for
from lpconv.scaled.rules.own import rebalance_pair
from lpconv.scaled.scales import (
    MIN_SCALE,
    MODERATE_SCALE,
    Scale,
    clamp_scale,
    larger_scale,
    ratio,
    times,
    uninitialised_like,
)


@dataclass
class _Memory:
    """Data and scale of a tensor that has views.

    A write to any of them replaces both, never the data in place: results of other ops (a product with 2) may share the
    old data.
    """

    data: Tensor
    scale: Scale
    has_reshaped_view: bool = False


class _View(NamedTuple):
    """A view op and its arguments; `piece` is the index among several results."""

    op: OpOverload
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    piece: int | None

    def of(self, data: Tensor) -> Tensor:
        out = self.op(data, *self.args, **self.kwargs)
        return out if self.piece is None else out[self.piece]  # type: ignore[no-any-return]


class ScaledTensor(torch.Tensor):
    """A tensor subclass that stores `data` and `scale` and represents their product, `data · scale`.

    Shape, strides, dtype and device are those of the data (any floating dtype). The scale is a Python float while it is
    static, and a 0-dim fp32 tensor on the device if data set it. Create one with `scaled_tensor`.

    A view shares `_memory` with its base, and `_views` are the ops from the base to the view. `_whole` is the data of
    the memory from which the tensor's own data were taken; if the memory has other data, they are taken again.
    """

    _data: Tensor
    _scale: Scale
    _role: Role
    _numerics: Numerics
    _memory: _Memory | None = None
    _views: tuple[_View, ...] = ()
    _whole: Tensor | None = None

    @staticmethod
    def __new__(cls, data: Tensor, scale: Scale, role: Role, numerics: Numerics) -> "ScaledTensor":
        return torch.Tensor._make_wrapper_subclass(
            cls,
            data.size(),
            strides=data.stride(),
            storage_offset=data.storage_offset(),
            dtype=data.dtype,
            layout=data.layout,
            device=data.device,
            requires_grad=False,
        )

    def __init__(self, data: Tensor, scale: Scale, role: Role, numerics: Numerics) -> None:
        self._data, self._scale, self._role, self._numerics = data, scale, role, numerics

    @property
    def data(self) -> Tensor:
        """The tensor without autograd, as in torch; assigning to it is refused, which would not reach the data."""
        return self.detach()

    @data.setter
    def data(self, _: Tensor) -> None:
        raise UnsupportedError(
            "assigning to `.data` would not change a scaled tensor", hint="write into it: x.data.copy_(value)"
        )

    @property
    def data_part(self) -> Tensor:
        """The data, in the dtype of the tensor."""
        return self._pair().data

    @property
    def scale(self) -> Scale:
        """The scale: a float if static, else a 0-dim fp32 tensor."""
        return self._pair().scale

    @property
    def role(self) -> Role:
        """The purpose of the tensor."""
        return self._role

    @property
    def numerics(self) -> Numerics:
        """The settings for ops on this tensor."""
        return self._numerics

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """The value as a plain tensor, without gradient: in fp32 (fp64 for fp64 data), or cast to `dtype`."""
        out: Tensor = value(self._pair())
        return out if dtype is None else out.to(dtype)

    def tolist(self) -> Any:
        """The values as nested lists of numbers, as in torch."""
        return self.dequantize(self.dtype).tolist()

    def compute_in(self, numerics: Numerics) -> None:
        """Set the numerics of ops on this tensor and on their results."""
        self._numerics = numerics

    def rebalance_(self) -> None:
        """Rescale the data to a root mean square near 1; the value stays, and the scale becomes dynamic.

        In new memory: views that an earlier forward pass saved have the old scale.
        """
        self._data, self._scale, _ = rebalance_pair(self._pair(), "l2")

    def _pair(self) -> Scaled:
        """Data, scale and role, including writes to other views of the same memory."""
        if self._memory is not None and self._memory.data is not self._whole:
            self._whole, self._scale = self._memory.data, self._memory.scale
            self._data = _apply_views(self._whole, self._views)
        return Scaled(self._data, self._scale, self._role)

    def _keeps_scale(self) -> bool:
        """Whether this is a parameter, or was created like one and filled."""
        return self._role.is_stored and not (isinstance(self._scale, float) and self._scale == 0)

    def _share_with(self, view: "ScaledTensor", step: _View) -> None:
        """Make writes to this tensor visible in `view`, the result of a view op on it, and the other way round.

        Parameters do not need this: they keep their scale, and writes go into their storage.
        """
        if self._keeps_scale():
            return
        if self._memory is None:
            self._memory, self._whole = _Memory(self._data, self._scale), self._data
        view._memory, view._views, view._whole = self._memory, (*self._views, step), self._whole

    def _reshape(self, op: OpOverload, step: _View) -> "ScaledTensor":
        """Turn the tensor itself into a view of what it was, as `squeeze_` does."""
        may_have_views = self._memory is not None or self._keeps_scale()  # the views of the latter are not recorded
        if may_have_views and not (self._views or self._is_view()) and self.requires_grad:
            raise UnsupportedError(
                f"in-place `{op}` of a tensor whose views torch would differentiate in the new shape (reached in "
                f"{_current_module()})",
                hint="use the function without underscore: x = x.squeeze(0)",
            )
        self._data = step.of(self._pair().data)
        if self._memory is not None:
            self._memory.has_reshaped_view = True
            self._views = (*self._views, step)
        with no_dispatch():
            op(self, *step.args, **step.kwargs)
        return self

    def _write(self, result: Scaled) -> None:
        """Replace the value, and the same elements in all views. A parameter keeps its scale and its storage.

        Any other tensor takes the scale of the result, or, if it is a part of another, the larger of the two.
        """
        data, scale, _ = self._pair()
        self._refuse_write(data)
        if self._keeps_scale():
            data.copy_(times(result.data, ratio(result.scale, scale)))
            return
        whole, old_scale = (data, 0.0) if self._memory is None else (self._memory.data, self._memory.scale)
        new_scale, is_part = result.scale, data.nbytes < whole.nbytes  # a complex number is two elements
        if not self._views and not self._role.is_stored and _same_layout(result.data, data):
            new = target = result.data.detach()  # another object, even if only the scale changes: views notice it
        else:
            new = uninitialised_like(whole)
            if is_part:
                new_scale = larger_scale(old_scale, result.scale)
                is_zero = isinstance(old_scale, float) and old_scale == 0  # its data are arbitrary
                new.zero_() if is_zero else new.copy_(times(whole, ratio(old_scale, new_scale)))
            target = _apply_views(new, self._views)
            target.copy_(times(result.data, ratio(result.scale, new_scale)) if is_part else result.data)
        self._data, self._scale, self._whole = target, new_scale, new
        if self._memory is not None:
            self._memory.data, self._memory.scale = new, new_scale

    def _refuse_write(self, data: Tensor) -> None:
        """Raise `UnsupportedError` for a write that would not reach its elements, or whose gradient would be wrong."""
        target = None
        if _is_expanded(data):
            target = "an expanded tensor, whose elements share memory"
        elif self._memory is not None and self._memory.has_reshaped_view and self.requires_grad:
            target = "a tensor with a view that was reshaped in place, whose gradient torch would take in the old shape"
        elif not self._keeps_scale() and self._memory is None and self._is_view():
            target = "a view that is a copy"
        if target is not None:
            raise UnsupportedError(
                f"in-place write to {target} (reached in {_current_module()})",
                hint="write to the tensor itself, or to a copy: x = x.clone()",
            )

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: torch.Size, outer_stride: tuple[int, ...], module: nn.Module, mp_policy: Any
    ) -> tuple[tuple[Tensor, ...], None]:
        """The data that FSDP2 gathers from this rank's part of a parameter."""
        dtype = mp_policy.param_dtype or self.dtype
        own = Scaled(self._data.detach(), self._scale, self._role)
        return (rows_to_gather(own, self._numerics, module, dtype, outer_size[0], mesh.size()),), None

    def fsdp_post_all_gather(
        self, outputs: tuple[Tensor, ...], metadata: None, param_dtype: torch.dtype, *, out: Tensor | None = None
    ) -> tuple["ScaledTensor", tuple[Tensor, ...]] | None:
        """The whole parameter from gathered data, or fill `out`, which an earlier call returned."""
        (gathered,) = outputs
        data = gathered_rows(gathered, self._numerics, param_dtype)
        if out is None:
            return ScaledTensor(data, self._scale, self._role, self._numerics), () if data is gathered else (data,)
        assert isinstance(out, ScaledTensor)
        out.compute_in(self._numerics)  # a `StepGuard` may have changed it
        if data is not gathered:
            out._data.copy_(data[: len(out)])
        return None

    def __repr__(self) -> str:  # type: ignore[override]  # torch passes no contents for a subclass
        return f"ScaledTensor({self._data!r}, scale={self._scale!r}, role={self._role.value})"

    def __tensor_flatten__(self) -> tuple[list[str], tuple[float | None, Role, Numerics]]:
        _, scale, _ = self._pair()
        if isinstance(scale, Tensor):
            return ["_data", "_scale"], (None, self._role, self._numerics)
        return ["_data"], (scale, self._role, self._numerics)

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, Tensor], context: tuple[float | None, Role, Numerics], size: object, stride: object
    ) -> "ScaledTensor":
        scale, role, numerics = context
        return ScaledTensor(inner["_data"], inner["_scale"] if scale is None else scale, role, numerics)

    def _stable_hash_for_caching(self) -> str:
        """Everything that affects compilation, except the data, for the caches of `torch.compile`."""
        scale = "dynamic" if isinstance(self._scale, Tensor) else self._scale.hex()
        numerics = [getattr(self._numerics, f.name) for f in dataclasses.fields(Numerics) if f.compare]
        return repr((scale, self._role, numerics))

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, op: OpOverload, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if op not in RULES and (parts := op.decompose(*args, **kwargs)) is not NotImplemented:
            return parts  # composite ops arrive undecomposed if autograd is off: inference mode, other dispatch modes
        scaled_args: list[ScaledTensor] = []
        pairs = [_to_pair(a, scaled_args) for a in args]
        named = {k: _to_pair(v, scaled_args) for k, v in kwargs.items()}
        numerics = scaled_args[0]._numerics
        if op._schema.is_mutable and op not in RULES:
            return _in_place(op, args, pairs, named, numerics)
        is_gradient = any(t._role is Role.GRADIENT for t in scaled_args)
        out = _wrap(_run(Call(op, numerics), pairs, named), is_gradient, numerics)
        if op.is_view and op not in _COPYING:
            for index, view in enumerate(out) if isinstance(out, (list, tuple)) else ((None, out),):
                if isinstance(view, ScaledTensor):
                    scaled_args[0]._share_with(view, _View(op, args[1:], kwargs, index))
        return out


# Views in plain torch, but copies here; see `rules.layout`.
_COPYING = (torch.ops.aten._conj.default, torch.ops.aten._neg_view.default)


def data_part(x: Tensor) -> Tensor:
    """The data of a scaled tensor; any other tensor unchanged."""
    return x.data_part if isinstance(x, ScaledTensor) else x


def scaled_tensor(
    data: Tensor, scale: Scale, *, role: Role = Role.ACTIVATION, numerics: Numerics | None = None
) -> ScaledTensor:
    """Create a `ScaledTensor` with the value `data · scale`.

    A float scale must be 0 or, except for native numerics, a power of two, in [2^-126, 2^127]; 0 means "a zero of any
    scale" and requires zero data. A tensor scale must be 0-dim fp32 on the device of the data and is used unchanged.
    Raises `UsageError` otherwise.
    """
    if not data.is_floating_point():
        raise UsageError(
            f"a scaled tensor needs floating-point data, not {data.dtype}",
            hint="do not scale integer, boolean or complex tensors",
        )
    if isinstance(scale, Tensor):
        if scale.dim() or scale.dtype != torch.float32 or scale.device != data.device:
            raise UsageError(
                f"a dynamic scale must be a 0-dim fp32 tensor on {data.device}, "
                f"not {scale.dtype} of shape {tuple(scale.shape)} on {scale.device}",
                hint="use torch.tensor(s, dtype=torch.float32, device=data.device)",
            )
        return ScaledTensor(data, scale, role, numerics or Numerics())
    scale = float(scale)
    is_native = numerics is not None and numerics.native
    if scale != 0 and (
        clamp_scale(scale, Numerics().counts)[0] != scale or not (is_native or pow2_floor(scale) == scale)
    ):
        raise UsageError(
            f"a static scale must be 0 or a power of two in [2^-126, 2^127], not {scale}",
            hint="round it with lpconv.formats.scale.pow2_floor, and multiply the data by the rest",
        )
    return ScaledTensor(data, scale, role, numerics or Numerics())


def _to_pair(x: Any, scaled_args: list[ScaledTensor]) -> Any:
    if isinstance(x, ScaledTensor):
        scaled_args.append(x)
        return x._pair()
    if isinstance(x, (list, tuple)):
        return [_to_pair(v, scaled_args) for v in x]
    return x


def _run(call: Call, args: list[Any], kwargs: dict[str, Any]) -> Any:
    rule = rule_for(call.op, call.numerics.native)
    result = NotImplemented if rule is None else rule(call, *args, **kwargs)
    if result is not NotImplemented:
        return result if call.op.is_view else _in_own_memory(result, args)
    if torch._C._current_graph_task_id() >= 0 and any(isinstance(a, Scaled) and a.role is Role.GRADIENT for a in args):
        raise UnsupportedError(
            f"no rule takes gradients through `{call.op}` in the backward pass of {_node(call.numerics)}",
            hint="add a rule in lpconv/scaled/rules, or run that module in fp32 outside of `scaled`",
        )
    return _on_values(call, args, kwargs)


def _in_own_memory(result: Any, args: list[Any]) -> Any:
    """A copy if the data are those of a parameter, as in a product with 2, or expanded: writes would reach others."""
    if isinstance(result, Scaled) and any(
        isinstance(a, Scaled) and (a.role.is_stored or _is_expanded(result.data)) and _same_memory(a.data, result.data)
        for a in args
    ):
        return result.with_data(result.data.clone())
    return result


def _node(numerics: Numerics) -> str:
    """Description of the running autograd node, and of the module where its forward op had no rule either."""
    node = torch._C._current_autograd_node()
    if node is None:
        return "an unknown op"
    place = numerics.places.get(node.name().partition("Backward")[0].lower())
    return f"`{node.name()}`" + (f" (reached in {place})" if place else "")


def _on_values(call: Call, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Run the op on dequantised operands and count it, or raise an error in strict mode."""
    if call.numerics.strict:
        raise UnsupportedError(
            f"no rule propagates scales through `{call.op}` (reached in {_current_module()})",
            hint="add a rule in lpconv/scaled/rules, or run without strict=True, which dequantises there and counts it",
        )
    call.numerics.counts[f"fallback {call.op}"] += 1
    call.numerics.places.setdefault(call.op._opname.replace("_", ""), _current_module())
    return call.op(*(_plain(a) for a in args), **{k: _plain(v) for k, v in kwargs.items()})


def _plain(x: Any) -> Any:
    """The value of a pair in the dtype of its data, also inside lists."""
    if isinstance(x, Scaled):
        return value(x).to(x.data.dtype)
    return [_plain(v) for v in x] if isinstance(x, list) else x


def _wrap(result: Any, is_gradient: bool, numerics: Numerics) -> Any:
    if isinstance(result, Scaled):
        role = Role.GRADIENT if is_gradient else result.role
        least = MIN_SCALE if role is Role.GRADIENT else 1 / MODERATE_SCALE
        scale, factor = clamp_scale(result.scale, numerics.counts, least, MODERATE_SCALE)
        return ScaledTensor(times(result.data, factor), scale, role, numerics)
    if isinstance(result, (list, tuple)):
        return type(result)(_wrap(r, is_gradient, numerics) for r in result)
    return result


def _in_place(
    op: OpOverload, args: tuple[Any, ...], pairs: list[Any], kwargs: dict[str, Any], numerics: Numerics
) -> Any:
    """Write the result of the functional twin into the first argument; into `out` only if it is plain."""
    if op.namespace == "fsdp":
        copy_to_reduce(op, pairs, kwargs)
        return None
    target = kwargs.get("out", args[0])
    if isinstance(target, Tensor) and not isinstance(target, ScaledTensor):
        if op is torch.ops.aten.copy_.default:
            return target.copy_(value(pairs[1]))
        return _on_values(Call(op, numerics), pairs, kwargs)
    twin = functional_twin(op)
    if twin is not None and torch.Tag.inplace_view in op.tags and isinstance(target, ScaledTensor):
        return target._reshape(op, _View(twin, args[1:], kwargs, None))
    if twin is None or rule_for(twin) is None or not isinstance(target, ScaledTensor):
        raise UnsupportedError(
            f"in-place `{op}` would drop the scale of a tensor (reached in {_current_module()})",
            hint="train scaled parameters with lpconv.scaled.AdamW or torch.optim.SGD",
        )
    result = _run(Call(twin, numerics), pairs, kwargs)
    target._write(result if isinstance(result, Scaled) else Scaled(result, 1.0))
    return target


def _same_memory(a: Tensor, b: Tensor) -> bool:
    return bool(a.untyped_storage()._cdata == b.untyped_storage()._cdata)


def _is_expanded(data: Tensor) -> bool:
    """Whether elements share memory, as after `expand`."""
    return any(stride == 0 and size > 1 for stride, size in zip(data.stride(), data.shape, strict=True))


def _same_layout(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors have the same dtype, shape, strides and storage offset."""
    return (a.dtype, a.shape, a.stride(), a.storage_offset()) == (b.dtype, b.shape, b.stride(), b.storage_offset())


def _apply_views(data: Tensor, views: tuple[_View, ...]) -> Tensor:
    for view in views:
        data = view.of(data)
    return data


def _current_module() -> str:
    """The innermost module on the stack, by its name in the outermost one."""
    modules: list[torch.nn.Module] = []
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        owner = frame.f_locals.get("self")
        if isinstance(owner, torch.nn.Module):
            modules.append(owner)
        frame = frame.f_back
    if not modules:
        return "the backward pass or outside any module"
    inner, root = modules[0], modules[-1]
    name = next((n for n, m in root.named_modules() if m is inner), "")
    return f"module `{name or 'root'}` ({type(inner).__name__})"
