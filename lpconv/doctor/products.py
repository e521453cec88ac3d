"""Scaled matrix products, tried: each layout of scales that torch knows, run once, and its numbers compared.

Which of them a device takes depends on its capability, on torch and on cuBLASLt together, and tables of it age; so the
doctor asks the GPU. What a kernel makes of scales is compared too: block scales without their padding gave silently
wrong numbers in one torch (PyTorch PR 166752). A CPU is not asked: lpconv decodes there, whatever torch can do.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lpconv.results.doctor import EMULATED, ERROR, NATIVE, DeviceRecord, ProductSupport

if TYPE_CHECKING:
    import torch
    from torch import Tensor

__all__ = ["LAYOUTS", "Side", "multiply", "try_products"]

_ROWS, _SUMMED = 128, 256  # of each operand
_BF16_ERROR = 2.0**-8  # of a product with float32 sums and a bfloat16 result
_FP8_CAPABILITY = (8, 9)
_DECODED = "decoded exactly to bf16"


@dataclass(frozen=True, kw_only=True)
class Side:
    """An operand (rows, summed): the format of its codes, and how many rows and columns share a scale, -1 for all.

    `recipe` is the name in torch's ScalingType, and `order` says how the grid of scales lies in memory.
    """

    format: str = "e4m3fn"
    block: tuple[int, int]
    recipe: str
    order: str = "row-major"


_TENSOR = Side(block=(-1, -1), recipe="TensorWise")
_ROW = Side(block=(1, -1), recipe="RowWise")
_FINE = Side(block=(1, 128), recipe="BlockWise1x128", order="column-major")
_MX = Side(block=(1, 32), recipe="BlockWise1x32", order="swizzled")

LAYOUTS: dict[str, tuple[Side, Side]] = {
    "fp8, scale per tensor": (_TENSOR, _TENSOR),
    "fp8, e5m2 by e4m3fn": (Side(format="e5m2", block=(-1, -1), recipe="TensorWise"), _TENSOR),
    "fp8, scale per row": (_ROW, Side(block=(1, -1), recipe="RowWise", order="turned")),
    "fp8, 1x128 by 128x128": (_FINE, Side(block=(128, 128), recipe="BlockWise128x128", order="padded, turned")),
    "fp8, 1x128 by 1x128": (_FINE, _FINE),
    "mxfp8, blocks of 32": (_MX, _MX),
}
_OURS = ("TensorWise", "RowWise")  # what `kernels.matmul` gives to tensor cores; the rest is decoded


def try_products(device: DeviceRecord) -> tuple[ProductSupport, ...]:
    """How `device` multiplies each of `LAYOUTS`; nothing of one that cannot be used."""
    if device.problem:
        return ()
    if device.kind == "cpu":
        return tuple(ProductSupport(layout=n, device=device.label, level=EMULATED, note=_DECODED) for n in LAYOUTS)
    return tuple(_try(name, *sides, device) for name, sides in LAYOUTS.items())


def _try(name: str, left: Side, right: Side, device: DeviceRecord) -> ProductSupport:
    try:
        found, exact = multiply(left, right, device.label)
        error = float((found.double().cpu() - exact).norm() / exact.norm())
        said = "" if error < _BF16_ERROR else f"wrong numbers: relative error {error:.2g}"
    except Exception as e:  # a missing kernel, a rule, a driver: all are answers here
        said = f"{type(e).__name__}: {(str(e).splitlines() or [''])[0]}"
    if left.recipe in _OURS and (device.capability or ()) >= _FP8_CAPABILITY:
        return ProductSupport(layout=name, device=device.label, level=ERROR if said else NATIVE, note=said)
    note = f"{_DECODED}; torch's own product: {said or 'runs'}"
    return ProductSupport(layout=name, device=device.label, level=EMULATED, note=note)


def multiply(left: Side, right: Side, device: "str | torch.device") -> "tuple[Tensor, Tensor]":
    """torch's product of random operands in bfloat16 on `device`, and the exact one in float64."""
    import torch
    from torch.nn.functional import ScalingType, SwizzleType

    (a, scale_a, a_exact), (b, scale_b, b_exact) = _operand(left, seed=0), _operand(right, seed=1)
    swizzle = SwizzleType.SWIZZLE_32_4_4 if left.order == "swizzled" else SwizzleType.NO_SWIZZLE
    recipes = [ScalingType.__members__[side.recipe].value for side in (left, right)]
    found: Tensor = torch.ops.aten._scaled_mm_v2.default(
        a.to(device), b.to(device).t(), [scale_a.to(device)], recipes[:1], [swizzle.value],
        [scale_b.to(device)], recipes[1:], [swizzle.value], None, torch.bfloat16,
    )  # fmt: skip
    return found, a_exact @ b_exact.t()


def _operand(side: Side, *, seed: int) -> "tuple[Tensor, Tensor, Tensor]":
    """Codes, scales as they lie, and the values in float64."""
    import torch

    from lpconv.formats.codes import code_dtype
    from lpconv.formats.scale import expand_scale

    generator = torch.Generator().manual_seed(seed)
    shape = (_ROWS, _SUMMED)
    codes = torch.randn(shape, generator=generator).to(code_dtype(side.format))
    height, width = (size if b == -1 else b for b, size in zip(side.block, shape, strict=True))
    grid = 2.0 ** torch.randint(-4, 5, (_ROWS // height, _SUMMED // width), generator=generator)
    values = codes.double() * expand_scale(grid, shape)
    return codes, _ORDERS[side.order](grid), values


def _padded(grid: "Tensor", rows: int, columns: int) -> "Tensor":
    from torch.nn.functional import pad

    return pad(grid, (0, -grid.shape[1] % columns, 0, -grid.shape[0] % rows))


def _swizzled(grid: "Tensor") -> "Tensor":
    """e8m0 scales as Blackwell's tensor cores read them: tiles of 128 x 4, of which 32 rows lie side by side."""
    import torch

    tiles = _padded(grid, 128, 4).to(torch.float8_e8m0fnu).view(torch.uint8)
    rows, columns = tiles.shape
    turned = tiles.view(rows // 128, 4, 32, columns // 4, 4).permute(0, 3, 2, 1, 4)
    return turned.flatten().view(torch.float8_e8m0fnu)


_ORDERS: "dict[str, Callable[[Tensor], Tensor]]" = {
    "row-major": lambda grid: grid,
    "turned": lambda grid: grid.t().contiguous(),
    "column-major": lambda grid: grid.t().contiguous().t(),
    "padded, turned": lambda grid: _padded(grid, 1, 4).t(),
    "swizzled": _swizzled,
}
