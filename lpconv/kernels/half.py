"""float16 products and convolutions on a CPU, at the speed of float32."""

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass

aten = torch.ops.aten
_PRODUCTS = {
    aten.mm.default,
    aten.addmm.default,
    aten.bmm.default,
    aten.baddbmm.default,
    aten.convolution.default,
    aten.convolution_backward.default,
}


class HalfProducts(TorchDispatchMode):  # type: ignore[no-untyped-call]  # untyped in torch
    """Inside, a CPU's float16 matrix products and convolutions are computed in float32 and rounded once, as a GPU does.

    torch's own are ten and more times slower (see `kernels.matmul`). Products on other devices and in other dtypes are
    left alone, and so are tensor subclasses: a scaled tensor does this by itself, and a cast here would take away its
    scale. Covers the backward pass too, where that runs inside.
    """

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return at_half(func, *args, **(kwargs or {})) if func in _PRODUCTS else func(*args, **(kwargs or {}))


def at_half(op: Any, *args: Any, **kwargs: Any) -> Any:
    """`op` of tensors; where all are plain float16 ones on a CPU, computed in float32 and rounded once."""
    if not all(map(_is_plain_half, args)):
        return op(*args, **kwargs)
    out = op(*(a.float() if isinstance(a, Tensor) else a for a in args), **kwargs)
    return out.half() if isinstance(out, Tensor) else tuple(x if x is None else x.half() for x in out)


def _is_plain_half(x: Any) -> bool:
    if not isinstance(x, Tensor):
        return True
    return x.dtype == torch.float16 and x.device.type == "cpu" and not is_traceable_wrapper_subclass(x)
