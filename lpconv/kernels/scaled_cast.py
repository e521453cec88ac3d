"""The two passes of a cast whose scale comes from the data: largest magnitudes, then codes of the scaled values.

On a CPU both process pieces in memory that stays in the cache: a pass over the whole tensor writes fresh memory, which
costs more than the computation. Among torch's reductions amin and amax read a 16-bit float at a quarter of the speed of
an integer, and aminmax along a dimension at a fiftieth; so magnitudes are compared as integers. Without signs, float
bit patterns have the order of their values, with Inf above numbers and NaN above Inf. On other devices, and under a
compiler, which fuse, the plain expressions are used.
"""

import functools
from collections.abc import Iterator

import torch
from torch import Tensor

from lpconv.formats.codes import code_dtype
from lpconv.formats.spec import Format
from lpconv.kernels.buffers import Buffers, operand_like
from lpconv.kernels.compiled import is_compiling
from lpconv.kernels.fused import fused_codes, fused_largest, fused_product_, fused_values

_PIECE = 1 << 18  # elements: half a megabyte in 16 bits, and twice that in float32
_BITS = {torch.bfloat16: torch.int16, torch.float16: torch.int16, torch.float32: torch.int32}
_BUFFERS = Buffers(lambda device: (torch.empty(_PIECE, device=device), torch.empty(_PIECE, device=device)))


def largest_magnitude(x: Tensor, axis: int | None = None) -> Tensor:
    """The largest |x| in float32: 0-dim, or along `axis` with size 1; NaN if there is one, 0 without elements.

    `axis` is None, -1 or -2.
    """
    x = x.detach()
    if not x.numel():
        return x.float().sum() if axis is None else x.float().sum(axis, keepdim=True)
    if is_compiling():  # one reduction; the magnitudes are never stored
        return (x.abs().amax() if axis is None else x.abs().amax(axis, True)).float()
    if not _goes_by_pieces(x):
        high, low = (x.amax(), x.amin()) if axis is None else (x.amax(axis, True), x.amin(axis, True))
        return torch.maximum(high, -low).float()
    if axis is not None and _is_turned(x):
        return largest_magnitude(x.mT, -3 - axis).mT
    if (largest := fused_largest(x, axis or -1)) is not None:
        return largest.amax().float() if axis is None else largest.float().unsqueeze(axis)
    bits = x.contiguous().view(_BITS[x.dtype])
    if axis is None:
        of_pieces = [_magnitudes(b).amax() for b in torch.split(bits.view(-1), _PIECE)]
        return torch.stack(of_pieces).amax().view(x.dtype).float()
    bits = bits.view(-1, *bits.shape[-2:])
    shape = (*bits.shape[:2], 1) if axis == -1 else (bits.shape[0], 1, bits.shape[2])
    largest = bits.new_zeros(shape)
    for piece in _pieces(bits.shape):
        here = largest[piece] if axis == -1 else largest[piece[0]]
        torch.maximum(here, _magnitudes(bits[piece]).amax(axis, keepdim=True), out=here)
    return largest.view(x.dtype).float().view(*x.shape[:-2], *shape[1:])


def scaled_codes(x: Tensor, inverse: Tensor | None, spec: Format, *, saturate: bool) -> Tensor:
    """Codes of x · `inverse` in an 8-bit format, to nearest even, with the shape and layout of `x`; NaN is kept.

    `inverse` is 0-dim, or has the shape of `x` with size 1 along the last axis or the last but one; the product is
    computed in the wider dtype of the two. With `saturate`, too large values become the format's largest number, and
    values that are not finite become NaN, so that an overflow remains visible; without it, no value may be too large by
    half a step.
    """
    x = x.detach()
    if not _goes_by_pieces(x) or (inverse is not None and inverse.dim() and inverse.dim() != x.dim()):
        values = x if inverse is None else x.to(torch.promote_types(x.dtype, inverse.dtype)) * inverse
        return (_saturate(values, spec) if saturate else values).to(code_dtype(spec))
    if _is_turned(x):
        turned = inverse.mT if inverse is not None and inverse.dim() else inverse
        return scaled_codes(x.mT, turned, spec, saturate=saturate).mT
    if not saturate and inverse is not None and (done := fused_codes(x, inverse, spec)) is not None:
        return done
    x = x.contiguous()
    codes = torch.empty_like(x, dtype=code_dtype(spec))
    for piece, factor, out in _with_factors(x, inverse, codes):
        values = piece
        if factor is not None:
            dtype = torch.promote_types(piece.dtype, factor.dtype)
            values = torch.mul(piece, factor, out=_scratch(piece.shape, dtype, 0))
        if saturate:
            values = _saturate(values, spec, out=_scratch(values.shape, values.dtype, 1))
        out.copy_(values)
    return codes


def scaled_values(x: Tensor, inverse: Tensor, spec: Format, into: str) -> Tensor | None:
    """The decoded values of `scaled_codes` without saturation, in the bfloat16 buffer called `into`.

    None if the matrix has no compiled kernel (`kernels.fused`), because encoding and decoding is as fast then.
    """
    x = x.detach()
    if x.dtype != torch.bfloat16 or x.device.type != "cpu" or is_compiling():
        return None
    if _is_turned(x):
        values = scaled_values(x.mT, inverse.mT if inverse.dim() else inverse, spec, into)
        return None if values is None else values.mT
    return fused_values(x, inverse, spec, operand_like(into, x, x.dtype))


def scale_product_(out: Tensor, *scales: Tensor | float | None) -> Tensor:
    """`out` (…, M, N) times each scale (a number, (…, M, 1) or (…, 1, N), float32), in place; rounded once at most."""
    found = [torch.as_tensor(s, dtype=torch.float32, device=out.device) for s in scales if s is not None]
    if not found or out.itemsize >= 4:
        for scale in found:
            out.mul_(scale)
        return out
    if len(found) == 1 and not found[0].dim() and out.device.type == "cpu":
        return out.mul_(found[0])  # torch multiplies by a number in float32, on a CPU
    if not _goes_by_pieces(out) or not out.is_contiguous():
        return out.copy_(functools.reduce(torch.mul, found, out.float()))
    if len(found) == 2 and (done := fused_product_(out, *found)) is not None:
        return done
    flat = out.view(-1, *out.shape[-2:])
    factors = [s.reshape(-1, *s.shape[-2:]) if s.dim() else s for s in found]
    for piece in _pieces(flat.shape):
        wide = _scratch(flat[piece].shape, torch.float32, 0).copy_(flat[piece])
        for factor in factors:
            wide.mul_(_part(factor, piece))
        flat[piece].copy_(wide)
    return out


def _part(factor: Tensor, piece: tuple[slice, slice]) -> Tensor:
    """The factors of one piece of a tensor."""
    if not factor.dim():
        return factor
    return factor[piece[0] if len(factor) > 1 else slice(None), piece[1] if factor.shape[1] > 1 else slice(None)]


def _goes_by_pieces(x: Tensor) -> bool:
    return x.device.type == "cpu" and x.dtype in _BITS and x.numel() > 0 and not is_compiling()


def _is_turned(x: Tensor) -> bool:
    return x.dim() >= 2 and not x.is_contiguous() and x.mT.is_contiguous()


def _magnitudes(bits: Tensor) -> Tensor:
    mask = torch.iinfo(bits.dtype).max
    return torch.bitwise_and(bits, mask, out=_scratch(bits.shape, bits.dtype, 0))


def _saturate(values: Tensor, spec: Format, out: Tensor | None = None) -> Tensor:
    """Clamp to the format's largest numbers; Inf becomes NaN by adding 0 · Inf."""
    if is_compiling():  # on a GPU, a compiled clamp may spoil transposed stores of codes: triton#11111
        below = torch.where(values > spec.max, spec.max, values)
        return torch.where(below < -spec.max, -spec.max, below).add(values, alpha=0)
    return torch.clamp(values, -spec.max, spec.max, out=out).add_(values, alpha=0)


def _scratch(shape: torch.Size, dtype: torch.dtype, which: int) -> Tensor:
    """Reused scratch memory, or fresh memory if a single row does not fit."""
    room = _BUFFERS.on(torch.device("cpu"))[which].view(dtype)
    size = shape.numel()
    return torch.empty(shape, dtype=dtype) if size > room.numel() else room[:size].view(shape)


def _pieces(shape: torch.Size) -> Iterator[tuple[slice, slice]]:
    """Slices of the batch and of the rows of (B, R, C) with about `_PIECE` elements each."""
    batch, rows, columns = shape
    rows_at_once = max(1, _PIECE // columns)
    at_once = max(1, rows_at_once // rows)
    for b in range(0, batch, at_once):
        for r in range(0, rows, rows_at_once):
            yield slice(b, b + at_once), slice(r, r + rows_at_once)


def _with_factors(x: Tensor, inverse: Tensor | None, codes: Tensor) -> Iterator[tuple[Tensor, Tensor | None, Tensor]]:
    """Yield pieces of contiguous `x`, their factors, and the output for their codes."""
    if inverse is None or not inverse.dim():
        factor = None if inverse is None else inverse.view(1)  # 1-D, so that its dtype takes part in promotion
        flat = zip(torch.split(x.view(-1), _PIECE), torch.split(codes.view(-1), _PIECE), strict=True)
        yield from ((piece, factor, out) for piece, out in flat)
        return
    x, codes = (t.view(-1, *t.shape[-2:]) for t in (x, codes))
    factors = inverse.reshape(-1, *inverse.shape[-2:])
    for piece in _pieces(x.shape):
        yield x[piece], _part(factors, piece), codes[piece]
