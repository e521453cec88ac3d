"""A linear layer in fp8, with recipes that differ only in the origin of their scales.

    y_MN = x_MK @ w_NKᵀ        dx_MK = g_MN @ w_NK        dw_NK = g_MNᵀ @ x_MK

| recipe | one scale per | from | work in addition to the cast |
|---|---|---|---|
| static | tensor | a calibration before the run; a constant from then on | none |
| tensorwise | tensor | amax of the tensor | a pass over it before the cast |
| delayed | tensor | the largest amax of the last calls | amax in the pass of the cast |
| rowwise | row along the summed axis | amax of the row | amax, and a second cast for the other product |
| mx | 32 elements along the summed axis | amax of the block (OCP MX 1.0 §6.3, a power of two) | the same |

A scale may not vary along the axis that a product sums over, so rowwise and mx quantise x and w twice: along K for the
output and along M or N for the gradients. The others cast once. For the backward pass x is saved as codes of one byte
per element; on CUDA already transposed, since tensor cores need both operands row-major along the summed axis and a
compiler can write the transpose in the pass of the cast. The weight exists anyway, so it is cast again.

Several layers that read one tensor (query, key, value) each cast it and each save codes in eager mode. A compiler
merges these casts if the layers share their scale; see `calibrate`.

Formats: e4m3fn for x and w; gradients in e5m2 with one scale per tensor, in e4m3fn with finer scales (like torchao's
and TransformerEngine's recipes of the same names).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lpconv.errors import UsageError
from lpconv.formats.scale import pow2_nearest
from lpconv.formats.spec import Format, get_format
from lpconv.kernels.buffers import operand_like
from lpconv.kernels.decode import decode, decode_operand
from lpconv.kernels.matmul import matmul
from lpconv.kernels.scaled_cast import largest_magnitude, scaled_codes, scaled_values
from lpconv.layers import linears
from lpconv.lookup import find

_HISTORY = 16  # calls in the history of delayed scaling; TransformerEngine's default is 1024
_MX_BLOCK = 32
_SMALLEST_AMAX = 1e-12  # below, 1 / scale overflows float32 for rows of zeros (pytorch/ao issue 3356)


@dataclass(frozen=True, kw_only=True)
class Fp8Recipe:
    """The origin of scales (`source`), their `granularity`, and the format of gradients."""

    name: str
    granularity: Literal["tensor", "row", "block"]
    source: Literal["static", "dynamic", "delayed"]
    gradient: str


FP8_RECIPES: dict[str, Fp8Recipe] = {
    r.name: r
    for r in (
        Fp8Recipe(name="static", granularity="tensor", source="static", gradient="e5m2"),
        Fp8Recipe(name="tensorwise", granularity="tensor", source="dynamic", gradient="e5m2"),
        Fp8Recipe(name="delayed", granularity="tensor", source="delayed", gradient="e5m2"),
        Fp8Recipe(name="rowwise", granularity="row", source="dynamic", gradient="e4m3fn"),
        Fp8Recipe(name="mx", granularity="block", source="dynamic", gradient="e4m3fn"),
    )
}
_FORWARD = get_format("e4m3fn")


class _Operand(NamedTuple):
    """Codes (R, C) to be multiplied along C; the scale is one number, (R, 1), or (R, C/32).

    On a CPU, operands that are used for one product only may hold the codes' bfloat16 values instead.
    """

    codes: Tensor
    scale: Tensor


class Fp8Linear(nn.Module):
    """`nn.Linear` whose products run in fp8; weight (N, K), bias (N,) or None, results in x's dtype.

    The scales of "static" and the histories of "delayed" are ordinary buffers. `freeze` replaces the weight by its
    codes, for inference.
    """

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None, recipe: str | Fp8Recipe) -> None:
        super().__init__()
        self.recipe = recipe if isinstance(recipe, Fp8Recipe) else find("recipe", recipe, FP8_RECIPES)
        self.weight, self.bias = weight, bias
        self.out_features, self.in_features = weight.shape
        self.gradient_format = get_format(self.recipe.gradient)
        self._frozen: _Operand | None = None
        size = (_HISTORY,) if self.recipe.source == "delayed" else ()
        for name in ("input_state", "weight_state", "gradient_state"):
            self.register_buffer(name, torch.ones(size, dtype=torch.float32, device=weight.device))
        if self.recipe.source == "static":
            self.weight_state.fill_(_unit_scale(weight.detach()))

    input_state: Tensor
    weight_state: Tensor
    gradient_state: Tensor

    def forward(self, x: Tensor) -> Tensor:
        """Map x (..., K) to (..., N)."""
        if self._frozen is not None:
            x_MK = _quantise(x.reshape(-1, x.shape[-1]), _FORWARD, self.recipe, self.input_state, into="left")
            y_MN = _multiply(x_MK, self._frozen, x.dtype)
            y_MN = y_MN if self.bias is None else y_MN + self.bias
            return y_MN.view(*x.shape[:-1], self.out_features)
        y: Tensor = _Product.apply(x, self.weight, self)  # type: ignore[no-untyped-call]  # torch leaves apply untyped
        return y if self.bias is None else y + self.bias

    @torch.no_grad()
    def freeze(self) -> None:
        """Quantise the weight once and drop its high-precision values. Cannot be undone, and ends training."""
        weight = self.weight.detach()
        self._frozen = _quantise(weight, _FORWARD, self.recipe, self.weight_state)
        self.weight = nn.Parameter(weight.new_empty(0), requires_grad=False)
        self.register_buffer("weight_codes", self._frozen.codes)
        self.register_buffer("weight_scale", self._frozen.scale)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, layer: Fp8Linear) -> Tensor:
        recipe = layer.recipe
        flat_MK = x.reshape(-1, x.shape[-1])
        once = recipe.granularity == "tensor"  # its codes serve both products
        x_MK = _quantise(flat_MK, _FORWARD, recipe, layer.input_state, into=None if once else "left")
        x_KM = _other_way(x_MK, flat_MK, _FORWARD, recipe, layer.input_state)
        w_NK = _quantise(weight, _FORWARD, recipe, layer.weight_state, into="right")
        ctx.save_for_backward(*x_KM, weight, w_NK.scale)
        ctx.layer = layer
        return _multiply(x_MK, w_NK, x.dtype).view(*x.shape[:-1], weight.shape[0])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x_codes, x_scale, weight, w_scale = ctx.saved_tensors
        layer = ctx.layer
        flat_MN = grad.reshape(-1, grad.shape[-1])
        how = layer.gradient_format, layer.recipe, layer.gradient_state
        g_MN = _quantise(flat_MN, *how, into="left")
        dx = dw = None
        if ctx.needs_input_grad[0]:
            w_KN = _transposed(weight, _FORWARD, layer.recipe, w_scale)
            dx = _multiply(g_MN, w_KN, grad.dtype).view(*grad.shape[:-1], weight.shape[1])
        if ctx.needs_input_grad[1]:
            g_NM = _other_way(g_MN, flat_MN, *how, into="left")
            dw = _multiply(g_NM, _Operand(x_codes, x_scale), weight.dtype)
        return dx, dw, None


def _other_way(
    along: _Operand, x: Tensor, spec: Format, recipe: Fp8Recipe, state: Tensor, *, into: str | None = None
) -> _Operand:
    """The transpose (C, R) of `x` quantised along R; `along` is `x` (R, C) quantised along C."""
    if recipe.granularity == "tensor":
        return _Operand(_laid_out(along.codes.t()), along.scale)
    return _quantise(x.t(), spec, recipe, state, into=into)


def _transposed(x: Tensor, spec: Format, recipe: Fp8Recipe, scale: Tensor) -> _Operand:
    """`_other_way` of a weight, computed from the tensor itself, with the first scale if that serves both products.

    Transposed before the cast: a compiler that sees the same cast twice would store the codes in between.
    """
    if recipe.granularity == "tensor":
        return _Operand(_laid_out(_cast_at(x.t(), scale, spec, recipe, into="right")), scale)
    return _quantise(x.t(), spec, recipe, scale, into="right")


def _laid_out(codes: Tensor) -> Tensor:
    """Codes in the device's layout: row-major for tensor cores; unchanged on a CPU, which decodes them anyway."""
    return codes.contiguous() if codes.is_cuda else codes


def _quantise(x: Tensor, spec: Format, recipe: Fp8Recipe, state: Tensor, *, into: str | None = None) -> _Operand:
    if recipe.granularity == "block":
        return _quantise_blocks(x, spec)
    if recipe.source == "static":
        return _Operand(_cast_at(x, state, spec, recipe, into=into), state)
    amax = largest_magnitude(x, -1 if recipe.granularity == "row" else None)
    if recipe.source == "delayed":
        amax = _delayed(amax, state)
    scale = amax.clamp(min=_SMALLEST_AMAX) / spec.max
    return _Operand(_cast_at(x, scale, spec, recipe, into=into), scale)


def _cast_at(x: Tensor, scale: Tensor, spec: Format, recipe: Fp8Recipe, *, into: str | None = None) -> Tensor:
    """`x` / `scale` in codes, or on a CPU their values in memory named `into` if they are used once.

    Static scales are powers of two, exact in x's dtype; with dynamic ones nothing clips.
    """
    inverse = (1 / scale).to(x.dtype if recipe.source == "static" else torch.float32)
    saturate = recipe.source != "dynamic"
    if into is None or x.dtype != torch.bfloat16 or x.device.type != "cpu" or torch.compiler.is_compiling():
        return scaled_codes(x, inverse, spec, saturate=saturate)
    return scaled_values(x, inverse, spec, saturate=saturate, out=operand_like(into, x, x.dtype))


def _delayed(amax: Tensor, history: Tensor) -> Tensor:
    """Return the largest amax of the previous calls, and replace the oldest by the current one."""
    before = history.amax()
    history.copy_(torch.cat([amax.view(1), history[:-1]]))
    return before


def _quantise_blocks(x: Tensor, spec: Format) -> _Operand:
    x = F.pad(x, (0, -x.shape[1] % _MX_BLOCK))
    blocks = x.float().reshape(x.shape[0], -1, _MX_BLOCK)
    largest = blocks.abs().amax(-1)
    power = (largest.view(torch.int32) & 0x7F800000).view(torch.float32)  # 2^floor(log2 amax)
    scale = (power * 2.0**-spec.max_exponent).clamp(min=2.0**-126)
    return _Operand(scaled_codes(blocks, (1 / scale).unsqueeze(-1), spec, saturate=True).view(x.shape), scale)


def _multiply(a: _Operand, b: _Operand, dtype: torch.dtype) -> Tensor:
    """a (R, C) times the transpose of b (S, C): (R, S) in `dtype`."""
    if a.scale.ndim == 2 and a.scale.shape[1] > 1:
        # No tensor core below compute capability 10 has block scales; in bfloat16 the values are exact.
        return torch.mm(_block_values(a), _block_values(b).t()).to(dtype)
    scale_b = b.scale.t() if b.scale.ndim == 2 else b.scale
    left, right = a.codes, b.codes
    if left.dtype != right.dtype and torch.bfloat16 in (left.dtype, right.dtype):
        left = left if left.dtype == torch.bfloat16 else decode_operand(left, torch.bfloat16, "left")
        right = right if right.dtype == torch.bfloat16 else decode_operand(right, torch.bfloat16, "right")
    return matmul(left, right.t(), scale_a=a.scale, scale_b=scale_b, out_dtype=dtype)


def _block_values(x: _Operand) -> Tensor:
    values = decode(x.codes, torch.bfloat16).view(*x.scale.shape, _MX_BLOCK)
    return (values * x.scale.to(torch.bfloat16).unsqueeze(-1)).view(x.codes.shape)


def convert_linears(
    model: nn.Module, recipe: str, *, keep: Callable[[str, nn.Module], bool] = lambda name, module: False
) -> list[str]:
    """Replace the linear layers of `model` (and GPT-2's Conv1D) by `Fp8Linear`, in place; returns their names.

    Layers for which `keep(name, module)` is true stay unchanged. Parameters stay the same objects, except for Conv1D,
    whose (K, N) weight is transposed into a new one.
    """
    layers = [x for x in linears(model) if x.is_replaceable and not keep(x.name, x.module)]
    for layer in layers:
        old: Any = layer.module
        weight_NK = old.weight if layer.kind == "Linear" else nn.Parameter(old.weight.detach().t().contiguous())
        parent, _, child = layer.name.rpartition(".")
        setattr(model.get_submodule(parent), child, Fp8Linear(weight_NK, old.bias, recipe))
    return [layer.name for layer in layers]


def calibrate(model: nn.Module, step: Callable[[], object]) -> None:
    """Set the static scales of "static" layers in `model` from one run of `step`, forward and optionally backward.

    Each scale is the power of two nearest to the root mean square: elements are then around 1, where every format is
    densest. Layers that read the same tensor share an input scale, so that a compiler casts it once.
    """
    layers = [m for m in model.modules() if isinstance(m, Fp8Linear) and m.recipe.source == "static"]
    last: list[tuple[Tensor, Fp8Linear]] = []

    def before(layer: nn.Module, args: tuple[Tensor, ...]) -> None:
        assert isinstance(layer, Fp8Linear)
        if last and last[0][0] is args[0]:
            layer.input_state = last[0][1].input_state
            return
        layer.input_state.fill_(_unit_scale(args[0].detach()))
        last[:] = [(args[0], layer)]

    def after(layer: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        assert isinstance(layer, Fp8Linear)
        state = layer.gradient_state

        def see(grad: Tensor) -> None:
            state.fill_(_unit_scale(grad))

        if output.requires_grad:
            output.register_hook(see)  # type: ignore[no-untyped-call]

    handles = [h for m in layers for h in (m.register_forward_pre_hook(before), m.register_forward_hook(after))]
    try:
        step()
    finally:
        for handle in handles:
            handle.remove()


def _unit_scale(x: Tensor) -> float:
    rms = float(x.float().square().mean().sqrt()) if x.numel() else 0.0
    if not rms < float("inf"):
        raise UsageError("cannot scale a tensor that is not finite", hint="look for the step that broke it")
    return max(pow2_nearest(rms), 2.0**-60) if rms > 0 else 1.0
