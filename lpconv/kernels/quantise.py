"""Rounding to a format in one pass: fast versions of `formats.cast` and `formats.encode`.

There are two ways to round float32 to fewer bits without leaving float32, both exact and both safe from a compiler that
fuses:

- *shift by addition*, for formats whose exponents are below float32's: adding 1.5 · 2^23 steps to x leaves no bits for
  less than one step, so the adder itself rounds to nearest even, and subtracting them again is exact. The step follows
  x's exponent and stops at the smallest normal number, which handles subnormals.
- *integers on the bit pattern*, for bf16, tf32 and fp32, whose exponents are float32's own: add half a step minus one,
  plus the last kept bit, and truncate. With random bits instead of the half step this is stochastic rounding, for every
  format once subnormals are raised by the smallest normal number.

Large tensors run compiled (one kernel for all formats, whose parameters are passed as scalars), once `CheckedKernel`
has verified that the compiler keeps the bits. Small ones run eagerly, in pieces that stay in the cache.
"""

import math
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from lpconv.errors import UsageError
from lpconv.formats import codes
from lpconv.formats.cast import Overflow, Rounding, cast, check_cast, largest_number, straight_through
from lpconv.formats.spec import FORMATS, Format
from lpconv.kernels.buffers import Buffers
from lpconv.kernels.compiled import CheckedKernel, is_compiling
from lpconv.kernels.decode import decode

_PIECE = 1 << 16  # elements; eagerly, the temporaries of a piece stay in cache
_WIDE_PIECE = 1 << 19  # two float32 buffers of this size fit the last-level cache
_FUSED_PIECE = 1 << 30  # positions are 32-bit integers
_FP32 = FORMATS["fp32"]


def fake_quantise(
    x: Tensor,
    format: str | Format,
    *,
    rounding: Rounding = "nearest",
    overflow: Overflow = "saturate",
    generator: torch.Generator | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Fast `formats.cast`: the same arguments, errors, straight-through gradient and, except for noise, the same bits.

    Stochastic rounding draws other numbers than `cast`: a hash of each element's position and of one seed taken from
    `generator`, so that the result depends on neither threads nor device. Below the smallest normal number its
    probabilities are multiples of 2^-(23 - mantissa bits). `out` (x's shape and dtype, may be x itself) is filled if
    given. float64, e8m0fnu and rounding toward zero use `cast`.
    """
    spec = check_cast(x, format, rounding, overflow)
    if out is not None and (out.shape != x.shape or out.dtype != x.dtype or out.device != x.device):
        raise UsageError(f"out is {tuple(out.shape)} of {out.dtype}, but x is {tuple(x.shape)} of {x.dtype}")
    with torch.no_grad():
        if x.dtype == torch.float64 or rounding == "toward_zero" or not spec.has_zero or not spec.has_sign:
            values = cast(x.detach(), spec, rounding=rounding, overflow=overflow, generator=generator)
            values = values if out is None else out.copy_(values)
        else:
            values = torch.empty_like(x, memory_format=torch.contiguous_format) if out is None else out
            _quantise(x.detach(), spec, rounding, overflow, generator, values)
    return straight_through(x, values)


def encode(x: Tensor, format: str | Format) -> Tensor:
    """`formats.encode` to nearest with saturation: two passes for fp8 formats, the reference for others."""
    spec = check_cast(x, format, "nearest", "saturate")
    if not _is_fp8(spec):
        return codes.encode(x, spec)
    limit = largest_number(spec, x.dtype)
    encoded = x.detach().clamp(-limit, limit).to(codes.code_dtype(spec))  # torch versions differ beyond the limit
    raw = encoded.view(torch.uint8)
    # NaN without its sign, as in `formats.encode`. Checking first is cheaper, but stalls a GPU and breaks a graph.
    unseen = raw.device.type != "cpu" or is_compiling()
    if spec.has_negative_zero and raw.numel() and (unseen or int(raw.amax()) == 0xFF):
        raw.masked_fill_(raw == 0xFF, 0x7F)
    return encoded


def _quantise(
    x: Tensor, spec: Format, rounding: str, overflow: str, generator: torch.Generator | None, out: Tensor
) -> None:
    kernel = _STOCHASTIC if rounding == "stochastic" else _WIDE if _is_wide(spec) else _NEAREST
    # Under dynamo, which warns about caches and ignores them, scalars become constants of the graph.
    make = _scalars if is_compiling() else _CACHED
    scalars = make(spec, x.dtype, kernel is _NEAREST, overflow, x.device)
    if rounding == "stochastic":
        scalars = (*scalars, _seed(generator).to(device=x.device, dtype=torch.int32))
    codes_do = _is_fp8(spec) and (rounding, overflow) == ("nearest", "saturate")
    run, size = _runner(kernel, x, _through_codes(spec) if codes_do else kernel.function)
    flat_x = x.contiguous().view(-1)
    flat_out = out.view(-1) if out.is_contiguous() else torch.empty_like(flat_x)
    for start in range(0, x.numel(), size):
        piece = slice(start, start + size)
        run(flat_x[piece], flat_out[piece], _position(start, x.device), *scalars)
    if not out.is_contiguous():
        out.copy_(flat_out.view(x.shape))


def _runner(kernel: CheckedKernel, x: Tensor, eager: Callable[..., Tensor]) -> tuple[Callable[..., Tensor], int]:
    """The function that rounds a piece of `x`, and the size of a piece."""
    if is_compiling():
        return kernel.function, _FUSED_PIECE
    if x.device.type != "cpu" or x.dtype == torch.float32:
        return (kernel, _FUSED_PIECE) if kernel.wants(x) else (eager, _PIECE)
    if kernel.wants(x, torch.float32):
        return _through_float32(kernel), _WIDE_PIECE
    return eager, _PIECE


def _through_float32(kernel: CheckedKernel) -> Callable[..., Tensor]:
    """Round 16-bit inputs in float32 copies: inductor's CPU code for 16 bits is nearly three times slower."""
    wide, rounded = _WIDE_BUFFERS.on(torch.device("cpu"))

    def run(x: Tensor, out: Tensor, *rest: Tensor) -> Tensor:
        n = x.numel()
        return out.copy_(kernel(wide[:n].copy_(x), rounded[:n], *rest))

    return run


_WIDE_BUFFERS = Buffers(
    lambda device: (torch.empty(_WIDE_PIECE, device=device), torch.empty(_WIDE_PIECE, device=device))
)


def _through_codes(spec: Format) -> Callable[..., Tensor]:
    """Round by encoding and decoding, which in eager mode takes fewer passes than the arithmetic."""
    return lambda x, out, *rest: decode(encode(x, spec), x.dtype, out=out)


def _is_fp8(spec: Format) -> bool:
    return spec.bits == 8 and spec.has_sign and spec.torch is not None


def _is_wide(spec: Format) -> bool:
    return spec.max_exponent == _FP32.max_exponent


def _seed(generator: torch.Generator | None) -> Tensor:
    device = generator.device if generator is not None else torch.device("cpu")
    return torch.randint(-(2**31), 2**31, (), dtype=torch.int64, generator=generator, device=device)


def _position(start: int, device: torch.device) -> Tensor:
    return torch.tensor((start + 2**31) % 2**32 - 2**31, dtype=torch.int32, device=device)


def _scalars(spec: Format, dtype: torch.dtype, magic: bool, overflow: str, device: torch.device) -> tuple[Tensor, ...]:
    """Parameters of `spec` for the kernels, as tensors, so that one compiled kernel serves every format."""
    limit = largest_number(spec, dtype)
    # If saturating, x is clamped to the limit. Otherwise to a number that still rounds beyond it, and that is finite if
    # the magic addition would overflow.
    clamp = limit if overflow == "saturate" else math.ldexp(1.0, spec.max_exponent + 2) if magic else math.inf
    dropped = _FP32.mantissa_bits - spec.mantissa_bits
    lift = 0.0 if _is_wide(spec) else spec.min_normal
    step = torch.tensor(1.5 * 2.0**dropped, device=device) if magic else torch.tensor(dropped, device=device).int()
    return (
        step,
        *(torch.tensor(v, device=device, dtype=torch.float32) for v in (lift, clamp, limit)),
        torch.tensor(math.inf if overflow == "inf" else math.nan, device=device),
        torch.tensor(not spec.has_negative_zero, device=device),
    )


_CACHED = cache(_scalars)


def _nearest(
    x: Tensor, out: Tensor, start: Tensor, magic: Tensor, floor: Tensor, clamp: Tensor, limit: Tensor, beyond: Tensor,
    unsigned_zero: Tensor,
) -> Tensor:  # fmt: skip
    y = x.float().clamp(-clamp, clamp)
    power = (y.view(torch.int32) & 0x7F800000).view(torch.float32)
    shift = torch.maximum(power, floor) * magic
    return out.copy_(_finish(y, (y + shift) - shift, limit, beyond, unsigned_zero))


def _wide(
    x: Tensor, out: Tensor, start: Tensor, dropped: Tensor, lift: Tensor, clamp: Tensor, limit: Tensor, beyond: Tensor,
    unsigned_zero: Tensor,
) -> Tensor:  # fmt: skip
    y = x.float().clamp(-clamp, clamp)
    bits = y.view(torch.int32)
    last = torch.bitwise_left_shift(torch.ones_like(dropped), dropped)
    carried = bits + (((last >> 1) - 1).clamp(min=0) + ((bits >> dropped) & (last >> 1).clamp(max=1)))
    rounded = _unless_nan(y, (carried & -last).view(torch.float32))
    return out.copy_(_finish(y, rounded, limit, beyond, unsigned_zero))


def _stochastic(
    x: Tensor, out: Tensor, start: Tensor, dropped: Tensor, lift: Tensor, clamp: Tensor, limit: Tensor, beyond: Tensor,
    unsigned_zero: Tensor, seed: Tensor,
) -> Tensor:  # fmt: skip
    y = x.float().clamp(-clamp, clamp)
    position = torch.arange(x.numel(), dtype=torch.int32, device=x.device) + start
    below = torch.bitwise_left_shift(torch.ones_like(dropped), dropped) - 1  # the bits below one step
    noise = _mix(_mix(position) ^ seed) & below
    lifted = y.abs() + torch.where(y.abs() < lift, lift, 0.0)  # subnormals share the step of the smallest normal
    cut = _unless_nan(y, ((lifted.view(torch.int32) + noise) & ~below).view(torch.float32))
    return out.copy_(_finish(y, cut - torch.where(y.abs() < lift, lift, 0.0), limit, beyond, unsigned_zero))


def _unless_nan(y: Tensor, rounded: Tensor) -> Tensor:
    """`rounded`, but NaN where y is, since a carry may turn a NaN's bits into a number. Inductor has no fast isnan."""
    return torch.where(y == y, rounded, y)


def _finish(y: Tensor, rounded: Tensor, limit: Tensor, beyond: Tensor, unsigned_zero: Tensor) -> Tensor:
    """Apply overflow and the sign."""
    rounded = torch.copysign(torch.where(rounded.abs() > limit, beyond, rounded), y)
    return torch.where((rounded == 0) & unsigned_zero, 0.0, rounded)


def _mix(h: Tensor) -> Tensor:
    """A 32-bit integer hash (Wellons 2018, "lowbias32"); torch's shifts keep the sign, hence the masks."""
    h = (h ^ ((h >> 16) & 0xFFFF)) * 0x7FEB352D
    h = (h ^ ((h >> 15) & 0x1FFFF)) * (0x846CA68B - 2**32)
    return h ^ ((h >> 16) & 0xFFFF)


def _example(dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Ties, subnormals, both signs, overflow and special values, around e4m3fn and bf16 alike."""
    steps = torch.arange(-512, 512, device=device).float() / 16
    special = torch.tensor([math.inf, -math.inf, math.nan, -0.0], device=device)
    # Repeated, because the compiler uses threads only for 512 or more rounds each.
    x = torch.cat([steps, steps * 2.0**-9, steps + 2.0**-9, steps * 100, special]).to(dtype).repeat(32)
    return x, torch.empty_like(x), _position(0, device)


def _nearest_example(dtype: torch.dtype, device: torch.device) -> tuple[Tensor, ...]:
    return *_example(dtype, device), *_scalars(FORMATS["e4m3fn"], dtype, True, "nan", device)


def _wide_example(dtype: torch.dtype, device: torch.device) -> tuple[Tensor, ...]:
    return *_example(dtype, device), *_scalars(FORMATS["bf16"], dtype, False, "saturate", device)


def _stochastic_example(dtype: torch.dtype, device: torch.device) -> tuple[Tensor, ...]:
    scalars = _scalars(FORMATS["e4m3fn"], dtype, False, "nan", device)
    return *_example(dtype, device), *scalars, torch.tensor(12345, dtype=torch.int32, device=device)


_NEAREST = CheckedKernel(_nearest, _nearest_example)
_WIDE = CheckedKernel(_wide, _wide_example)
_STOCHASTIC = CheckedKernel(_stochastic, _stochastic_example)
