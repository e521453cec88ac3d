"""Fast rounding and packing to few bits are those of the references, on every tie and its neighbours."""

import numpy as np
import pytest
import torch
from torch import Tensor

from lpconv.formats import codes
from lpconv.formats.cast import cast
from lpconv.formats.codes import encode_narrow_, nearest_, num_zero_codes, pack, unpack
from lpconv.formats.spec import FORMATS, INTEGERS, Format


def pack_narrow(x: Tensor, element: Format) -> Tensor:
    """Codes of finite numbers (overwritten), packed as in files."""
    packed = torch.empty(x.shape, dtype=torch.uint8)
    encode_narrow_(x, element, packed)
    return pack(packed, element.storage_bits)


def edges(element: Format) -> Tensor:
    """Every number of the format and every middle of two, with the fp32 numbers beside it, and beyond the ends."""
    numbers = codes.code_values(element).unique().float()
    at = torch.cat([numbers, (numbers[1:] + numbers[:-1]) / 2, numbers * 3, torch.tensor([1e-40, -1e-40, 0.0, -0.0])])
    inf = torch.tensor(torch.inf)
    x = torch.cat([at, torch.nextafter(at, inf), torch.nextafter(at, -inf)])
    return x[: x.numel() // 8 * 8]


@pytest.mark.parametrize("name", ["e2m1", *INTEGERS])
def test_the_codes_are_those_of_the_reference(name: str) -> None:
    element = FORMATS[name]
    x = edges(element)
    assert torch.equal(nearest_(x.clone(), element), cast(x, element) + 0.0)
    if element.twos_complement:  # whose one number more below, the reference does not round to
        x = x.clamp_min(-element.max)
    unpacked = torch.empty(x.shape, dtype=torch.uint8)
    numbers = encode_narrow_(x.clone(), element, unpacked)
    assert torch.equal(numbers, cast(x, element) + 0.0)
    assert num_zero_codes(unpacked, element) == int((numbers == 0).sum())
    wanted = unpack(codes.encode(x, element).view(torch.uint8), element.bits)
    assert torch.equal(unpacked, wanted ^ (0 if name == "e2m1" else 1 << element.bits - 1))


@pytest.mark.parametrize("bits", range(2, 9))
def test_packed_codes_have_no_gaps(bits: int) -> None:
    numbers = torch.randint(0, 2**bits, (88,), generator=torch.Generator().manual_seed(bits), dtype=torch.uint8)
    single = numbers.numpy()[:, None] >> np.arange(bits, dtype=np.uint8) & 1
    assert pack(numbers, bits).tolist() == np.packbits(single, bitorder="little").tolist()
    assert torch.equal(unpack(pack(numbers, bits), bits), numbers)


@pytest.mark.parametrize(("name", "codes_of_least"), [("int4", [0x00, 0x01]), ("int8", [0, 0, 0, 1])])
def test_what_is_nearest_to_the_least_integer_becomes_that(name: str, codes_of_least: list[int]) -> None:
    least = -FORMATS[name].max - 1
    x = torch.tensor([least, least - 100, least + 0.4, least + 0.6])
    assert pack_narrow(x, FORMATS[name]).tolist() == ([0x00, 0x10] if name == "int4" else codes_of_least)
