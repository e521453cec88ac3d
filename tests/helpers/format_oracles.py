"""Third-party implementations of the formats, and comparisons."""

import math
from functools import cache

import ml_dtypes
import numpy as np
import torch
from gfloat import RoundMode, formats, round_ndarray

from lpconv.formats.spec import FORMATS

INTEGERS = {f"int{bits}": 2 ** (bits - 1) - 1 for bits in (*range(2, 9), 16)}
ML_DTYPES = {
    "fp32": np.float32,
    "bf16": ml_dtypes.bfloat16,
    "fp16": np.float16,
    "e5m2": ml_dtypes.float8_e5m2,
    "e4m3fn": ml_dtypes.float8_e4m3fn,
    "e5m2fnuz": ml_dtypes.float8_e5m2fnuz,
    "e4m3fnuz": ml_dtypes.float8_e4m3fnuz,
    "e8m0fnu": ml_dtypes.float8_e8m0fnu,
    "e3m2": ml_dtypes.float6_e3m2fn,
    "e2m3": ml_dtypes.float6_e2m3fn,
    "e2m1": ml_dtypes.float4_e2m1fn,
    **dict.fromkeys(INTEGERS, np.int8),
    "int16": np.int16,
    "int4": ml_dtypes.int4,
    "int2": ml_dtypes.int2,
}
GFLOAT = {
    "bf16": formats.format_info_bfloat16,
    "fp16": formats.format_info_binary16,
    "e5m2": formats.format_info_ocp_e5m2,
    "e4m3fn": formats.format_info_ocp_e4m3,
    "e3m2": formats.format_info_ocp_e3m2,
    "e2m3": formats.format_info_ocp_e2m3,
    "e2m1": formats.format_info_ocp_e2m1,
}


def ml_dtypes_round(x: torch.Tensor, name: str) -> torch.Tensor:
    """`x` through ml_dtypes' type and back to x's dtype; overflow goes to Inf, else to NaN, else to the largest.

    Integer types truncate and wrap, so numpy rounds and clips for them.
    """
    wide = x.to(torch.float32).numpy()
    if name in INTEGERS:
        wide = np.clip(np.rint(wide), -INTEGERS[name], INTEGERS[name])
    with np.errstate(all="ignore"):
        there = wide.astype(ML_DTYPES[name])
        return torch.from_numpy(there.astype(np.float32)).to(x.dtype)


def gfloat_round(x: torch.Tensor, name: str, *, toward_zero: bool = False) -> torch.Tensor:
    """`x` rounded by gfloat with saturation."""
    mode = RoundMode.TowardZero if toward_zero else RoundMode.TiesToEven
    return torch.from_numpy(round_ndarray(GFLOAT[name], x.double().numpy(), mode, sat=True)).to(x.dtype)


def every_code(name: str, bits: int) -> torch.Tensor:
    """The number of each code of at most 8 bits, in float64."""
    raw = np.arange(2**bits, dtype=np.uint8)
    if name in INTEGERS:  # the sign bit moves to the top and back
        raw = ((raw << (8 - bits)).view(np.int8) >> (8 - bits)).view(np.uint8)
    with np.errstate(all="ignore"):
        return torch.from_numpy(raw.view(np.int8 if name in INTEGERS else ML_DTYPES[name]).astype(np.float64))


@cache
def every_value(name: str) -> torch.Tensor:
    """Every finite number of a format of at most 16 bits, ascending, in float64."""
    if np.dtype(ML_DTYPES[name]).itemsize == 2:
        with np.errstate(all="ignore"):
            values = torch.from_numpy(np.arange(2**16, dtype=np.uint16).view(ML_DTYPES[name]).astype(np.float64))
    else:
        values = every_code(name, FORMATS[name].bits)
    values = values[values.abs() <= INTEGERS.get(name, math.inf)]  # symmetric: the lowest code is not used
    return torch.unique(values[values.isfinite()])


def every_16_bit(dtype: torch.dtype) -> torch.Tensor:
    """All 65,536 bit patterns of bfloat16 or float16."""
    return torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(dtype)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal with the sign of zeros, NaN equal to NaN, and of one shape and dtype."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return bool((((a == b) & (a.signbit() == b.signbit())) | (a.isnan() & b.isnan())).all())
