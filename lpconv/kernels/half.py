"""float16 products on a CPU, at the speed of float32."""

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["HalfProducts"]

aten = torch.ops.aten
_PRODUCTS = {aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default}


class HalfProducts(TorchDispatchMode):  # type: ignore[no-untyped-call]  # untyped in torch
    """Inside, a CPU's float16 matrix products are computed in float32 and rounded once, as a GPU does.

    torch's own are ten and more times slower (see `kernels.matmul`). Products on other devices, and in other dtypes,
    are left alone. Covers the backward pass too, where that runs inside.
    """

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _PRODUCTS and args[0].dtype == torch.float16 and args[0].device.type == "cpu":
            return func(*(a.float() if isinstance(a, Tensor) else a for a in args), **kwargs).half()
        return func(*args, **kwargs)
