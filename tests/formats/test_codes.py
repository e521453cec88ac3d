"""Codes: every one decodes to what ml_dtypes says and encodes back to itself, packed or not."""

import math

import pytest
import torch

from lpconv.errors import InputError, UsageError
from lpconv.formats.cast import Overflow, cast
from lpconv.formats.codes import code_dtype, code_shape, code_values, decode, encode
from lpconv.formats.spec import FORMATS
from tests.helpers.format_oracles import every_16_bit, every_code, same

SMALL = [n for n, f in FORMATS.items() if f.bits <= 8]
FP8 = [n for n in SMALL if FORMATS[n].storage_bits == 8 and FORMATS[n].has_sign and FORMATS[n].torch]


@pytest.mark.parametrize("name", SMALL)
def test_every_code_means_what_ml_dtypes_says(name: str) -> None:
    assert same(code_values(name), every_code(name, FORMATS[name].bits))


@pytest.mark.parametrize("name", SMALL)
def test_every_code_encodes_back_to_itself(name: str) -> None:
    values = code_values(name)
    spec = FORMATS[name]
    overflow: Overflow = "inf" if spec.has_inf else "saturate"
    used = ~values.isnan() & ((values >= -spec.max) | spec.has_inf)  # -8 and -128 are codes of no number
    numbers = values[used]
    numbers = numbers[: numbers.numel() // 8 * 8]  # whole bytes
    codes = encode(numbers, name, overflow=overflow)
    assert same(decode(codes, name, torch.float64), numbers)
    if spec.storage_bits == 8:
        expected = torch.arange(256).to(torch.uint8)[used][: numbers.numel()]
        assert torch.equal(codes.view(torch.uint8), expected)


@pytest.mark.parametrize("name", FP8)
def test_the_bytes_are_those_of_torch(name: str) -> None:
    x = every_16_bit(torch.bfloat16)
    x = x[x.abs() <= FORMATS[name].max]  # beyond, torch versions differ
    assert torch.equal(encode(x, name).view(torch.uint8), x.to(code_dtype(name)).view(torch.uint8))


def test_fp4_packs_the_first_code_low() -> None:
    packed = encode(torch.tensor([0.5, 6.0, -1.0, -0.0]), "e2m1")
    assert packed.dtype == torch.float4_e2m1fn_x2
    assert packed.view(torch.uint8).tolist() == [0x71, 0x8A]


def test_fp6_packs_four_codes_into_three_bytes_from_the_low_end() -> None:
    packed = encode(torch.tensor([0.0625, 28.0, -28.0, 0.0]), "e3m2")  # codes 01, 1f, 3f, 00
    assert packed.dtype == torch.uint8
    assert int.from_bytes(packed.numpy().tobytes(), "little") == 0x01 | 0x1F << 6 | 0x3F << 12


@pytest.mark.parametrize("name", FORMATS)
def test_shapes_and_strides(name: str) -> None:
    x = torch.rand(6, 5, 16) + 0.5
    for view in (x, x.transpose(0, 2).contiguous().transpose(0, 2), x[::2, 1:], x[:0]):
        codes = encode(view, name)
        assert codes.shape == code_shape(name, view.shape)
        assert codes.dtype == code_dtype(name)
        assert same(decode(codes, name), cast(view, name))


def test_nan_has_a_code_or_is_refused() -> None:
    x = torch.tensor([1.0, math.nan, 1.0, 1.0])
    assert [encode(x, n).view(torch.uint8)[1].item() for n in ("e4m3fn", "e5m2", "e4m3fnuz", "e8m0fnu")] == [
        0x7F, 0x7F, 0x80, 0xFF,
    ]  # fmt: skip
    for name in ("e2m1", "e2m3", "e3m2"):
        with pytest.raises(InputError, match="NaN"):
            encode(x, name)


@pytest.mark.parametrize(
    "call",
    [
        lambda: encode(torch.ones(3), "e2m1"),
        lambda: encode(torch.ones(4, 6), "e3m2"),
        lambda: encode(torch.ones(()), "e2m1"),
        lambda: decode(torch.ones(4), "e4m3fn"),
        lambda: decode(torch.ones(4, dtype=torch.uint8), "bf16"),
        lambda: decode(torch.ones(4, dtype=torch.uint8), "e3m2"),
        lambda: encode(torch.ones(4), "e4m3fn", overflow="inf"),
    ],
)
def test_bad_arguments_are_refused(call) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(UsageError):
        call()
