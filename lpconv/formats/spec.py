"""Number formats as values: a few facts define each, everything else is derived.

This module is plain Python, so that the command line and header-only tools know the formats without importing torch.

A code with exponent field E > 0 and mantissa field M stands for (-1)^s · 2^(E - bias) · (1 + M / 2^m); with E = 0 it is
subnormal, (-1)^s · 2^(1 - bias) · M / 2^m. Sources: IEEE 754-2019; OCP OFP8 1.0 (e4m3fn, e5m2); OCP MX 1.0 (fp6, fp4,
e8m0); the fnuz pair as in the Graphcore/AMD proposal (arXiv 2206.02915), with the top exponent used for numbers and the
code of -0 as the only NaN.

Integers fit the same model: with one exponent bit, the step is the same above and below the smallest normal number, and
the bias makes that step 1. int2 to int8 are symmetric, such as ±7 and ±127, in two's complement; the lowest codes, such
as those of -8 and -128, decode to these values, but rounding never produces them.
"""

import functools
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from lpconv.errors import UsageError
from lpconv.lookup import find, known_name


@dataclass(frozen=True, kw_only=True)
class Format:
    """A number format: binary floating point of any split into sign, exponent and mantissa, or an integer.

    `max_mantissa` is the mantissa field of the largest finite number, at exponent field `max_exponent_field`.
    `safetensors` is the dtype name in a safetensors header and `torch` the attribute of the torch module; both are None
    if no such dtype exists (tf32, fp6 and integers), and codes are then stored in bytes.
    """

    name: str
    exponent_bits: int
    mantissa_bits: int
    bias: int
    max_exponent_field: int
    max_mantissa: int
    has_inf: bool
    has_nan: bool
    has_sign: bool = True
    has_negative_zero: bool = True
    has_zero: bool = True
    twos_complement: bool = False
    storage_bits: int
    safetensors: str | None = None
    torch: str | None = None

    @property
    def bits(self) -> int:
        """Number of information bits: sign, exponent and mantissa."""
        return int(self.has_sign) + self.exponent_bits + self.mantissa_bits

    @property
    def is_narrow(self) -> bool:
        """Whether files have at most 8 bits per number, as for integers: those of 16 bits are entropy-coded."""
        return self.storage_bits <= 8 or self.twos_complement

    @functools.cached_property
    def max(self) -> float:
        """The largest finite number."""
        mantissa = 1 + self.max_mantissa / 2**self.mantissa_bits
        return math.ldexp(mantissa, self.max_exponent_field - self.bias)

    @property
    def min_exponent(self) -> int:
        """Exponent of the smallest normal number: 1 - bias, or -bias if every code is normal (e8m0fnu)."""
        return 1 - self.bias if self.has_zero else -self.bias

    @property
    def max_exponent(self) -> int:
        """floor(log2(max))."""
        return self.max_exponent_field - self.bias

    @property
    def min_normal(self) -> float:
        """The smallest positive normal number."""
        return math.ldexp(1.0, self.min_exponent)

    @property
    def min_subnormal(self) -> float:
        """The smallest positive number."""
        return math.ldexp(1.0, self.min_exponent - self.mantissa_bits)

    @property
    def inf_code(self) -> int | None:
        """The code of +Inf, or None."""
        return ((1 << self.exponent_bits) - 1) << self.mantissa_bits if self.has_inf else None

    @property
    def nan_code(self) -> int | None:
        """The code used for NaN: all ones below the sign, as in torch, or the code of -0 (fnuz); None without NaN."""
        if not self.has_nan:
            return None
        magnitude_bits = self.exponent_bits + self.mantissa_bits
        return (1 << magnitude_bits) - int(self.has_negative_zero or not self.has_sign)

    @property
    def eps(self) -> float:
        """The gap between 1 and the next number above."""
        return math.ldexp(1.0, -self.mantissa_bits)


def _format(name: str, e: int, m: int, bias: int, top: tuple[int, int], **facts: object) -> Format:
    return Format(
        name=name,
        exponent_bits=e,
        mantissa_bits=m,
        bias=bias,
        max_exponent_field=top[0],
        max_mantissa=top[1],
        **facts,  # type: ignore[arg-type]  # the literals below are checked by the tests against every code
    )


_IEEE = {"has_inf": True, "has_nan": True}
_FN = {"has_inf": False, "has_nan": True}
_FNUZ = {"has_inf": False, "has_nan": True, "has_negative_zero": False}
_FINITE = {"has_inf": False, "has_nan": False}
_INTEGER = {**_FINITE, "has_negative_zero": False, "twos_complement": True}

FORMATS: dict[str, Format] = {
    f.name: f
    for f in (
        _format("fp32", 8, 23, 127, (254, 2**23 - 1), **_IEEE, storage_bits=32, safetensors="F32", torch="float32"),
        _format("tf32", 8, 10, 127, (254, 2**10 - 1), **_IEEE, storage_bits=32),
        _format("bf16", 8, 7, 127, (254, 127), **_IEEE, storage_bits=16, safetensors="BF16", torch="bfloat16"),
        _format("fp16", 5, 10, 15, (30, 1023), **_IEEE, storage_bits=16, safetensors="F16", torch="float16"),
        _format("e5m2", 5, 2, 15, (30, 3), **_IEEE, storage_bits=8, safetensors="F8_E5M2", torch="float8_e5m2"),
        _format("e4m3fn", 4, 3, 7, (15, 6), **_FN, storage_bits=8, safetensors="F8_E4M3", torch="float8_e4m3fn"),
        _format("e5m2fnuz", 5, 2, 16, (31, 3), **_FNUZ, storage_bits=8, safetensors="F8_E5M2FNUZ",
                torch="float8_e5m2fnuz"),
        _format("e4m3fnuz", 4, 3, 8, (15, 7), **_FNUZ, storage_bits=8, safetensors="F8_E4M3FNUZ",
                torch="float8_e4m3fnuz"),
        _format("e8m0fnu", 8, 0, 127, (254, 0), **_FN, has_sign=False, has_negative_zero=False, has_zero=False,
                storage_bits=8, safetensors="F8_E8M0", torch="float8_e8m0fnu"),
        _format("e3m2", 3, 2, 3, (7, 3), **_FINITE, storage_bits=6),
        _format("e2m3", 2, 3, 1, (3, 7), **_FINITE, storage_bits=6),
        _format("e2m1", 2, 1, 1, (3, 1), **_FINITE, storage_bits=4, torch="float4_e2m1fn_x2"),
        *(_format(f"int{bits}", 1, bits - 2, 3 - bits, (1, 2 ** (bits - 2) - 1), **_INTEGER, storage_bits=bits)
          for bits in (16, *range(8, 1, -1))),
    )
}  # fmt: skip
CODED = FORMATS["int16"]  # integers without a bound that matters, which are entropy-coded
INTEGERS = tuple(name for name, f in FORMATS.items() if f.twos_complement and f is not CODED)
# Formats by their dtype in safetensors files.
OF_DTYPE = {f.safetensors: f for f in FORMATS.values() if f.safetensors}


@dataclass(frozen=True, kw_only=True)
class BlockFormat:
    """A format with one scale per block along the last axis: value = scale · element.

    With `has_tensor_scale`, one more scale multiplies the whole tensor.
    """

    name: str
    element: Format
    scale: Format
    size: int
    has_tensor_scale: bool = False

    @property
    def bits(self) -> float:
        """Stored bits per element, including a share of the block's scale but not the tensor's scale."""
        return self.element.bits + self.scale.bits / self.size


def _mx(name: str, element: str) -> BlockFormat:
    return BlockFormat(name=name, element=FORMATS[element], scale=FORMATS["e8m0fnu"], size=32)


# OCP Microscaling Formats (MX) 1.0, table 1; NVFP4 as in NVIDIA's recipe for Blackwell.
BLOCK_FORMATS: dict[str, BlockFormat] = {
    f.name: f
    for f in (
        _mx("mxfp8_e4m3", "e4m3fn"),
        _mx("mxfp8_e5m2", "e5m2"),
        _mx("mxfp6_e3m2", "e3m2"),
        _mx("mxfp6_e2m3", "e2m3"),
        _mx("mxfp4", "e2m1"),
        BlockFormat(name="nvfp4", element=FORMATS["e2m1"], scale=FORMATS["e4m3fn"], size=16, has_tensor_scale=True),
    )
}

# Elements with one scale when operands of products are cast in blocks, by kind of operand scale.
OPERAND_BLOCKS = {"mx": 32, "nvfp4": 16, "nvfp4-static": 16, "four-six": 16, "ms-eden": 16}

# Formats by all their names: ours, torch's, and the usual ones. fp8 and fp4 are the formats that most weights use.
SPELLINGS = {
    **{name: name for name in FORMATS}, **{f.torch: f.name for f in FORMATS.values() if f.torch},
    "fp8": "e4m3fn", "e4m3": "e4m3fn", "fp8_e4m3": "e4m3fn", "fp8_e5m2": "e5m2", "fp4": "e2m1", "fp4_e2m1": "e2m1",
    "f32": "fp32", "f16": "fp16", "half": "fp16",
}  # fmt: skip
# Ambiguous names, or names of a format with its scales, and the names to use here.
_MEANT = {
    "fp6": "`e3m2` or `e2m3`", "mxfp8": "`e4m3fn` with --granularity mx", "mxfp4": "`e2m1` with --granularity mx",
    "nvfp4": "`e2m1` with --granularity nvfp4",
}  # fmt: skip


def per_group(bits: int, word: int = 8) -> tuple[int, int]:
    """The smallest number of codes that fills whole words of so many bits, and the number of words."""
    codes = word // math.gcd(bits, word)
    return codes, codes * bits // word


def spellings(names: Mapping[str, str]) -> dict[str, str]:
    """For things that formats name, such as recipes: `names` by format, under every spelling of the formats."""
    return {spelling: names[f] for spelling, f in SPELLINGS.items() if f in names}


def get_format(name: str | Format, usual: Collection[str] = FORMATS) -> Format:
    """Return the format called `name`, in any case or spelling, or `name` itself if it is a `Format`.

    Raises UsageError, with the nearest or all of the `usual` names, if it is unknown.
    """
    if isinstance(name, Format):
        return name
    meant, known = _MEANT.get(name.casefold()), known_name(name, FORMATS, SPELLINGS)
    if meant is not None:
        hint = f"did you mean {meant}?" if meant.split("`")[1] in usual else f"known: {', '.join(usual)}"
        raise UsageError(f"unknown format `{name}`", hint=hint)
    return find("format", known or name, FORMATS if known else {n: FORMATS[n] for n in usual})
