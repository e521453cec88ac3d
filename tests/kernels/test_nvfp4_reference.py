"""Operands of `nvfp4` have the bits of TransformerEngine's reference (benchmarks.reproduce.nvfp4_reference)."""

import json
from pathlib import Path

import pytest
import torch

from lpconv.formats.spec import get_format
from lpconv.kernels.linear import FP4_RECIPES
from lpconv.kernels.operands import encode_operand

REFERENCE = json.loads((Path(__file__).parent / "nvfp4_reference.json").read_text(encoding="utf-8"))
RECIPE = FP4_RECIPES["nvfp4"]
CASTS = {"rows": RECIPE.input, "16x16": RECIPE.weight, "rotated": RECIPE.grad_weight_casts[0]}
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def golden_input(rows: int = 32, columns: int = 48) -> torch.Tensor:
    """The input of the reference: cubes of a multiplicative hash."""
    index = torch.arange(1, rows * columns + 1, dtype=torch.int64)
    return ((index * 2654435761 % 2**32).double() / 2**31 - 1).pow(3).float().view(rows, columns)


def bytes_of(rows: list[str]) -> torch.Tensor:
    return torch.tensor([list(bytes.fromhex(row)) for row in rows], dtype=torch.uint8)


@pytest.mark.parametrize("cast", CASTS)
def test_operands_have_the_bits_of_the_reference(cast: str) -> None:
    x = golden_input()

    actual = encode_operand(x.t() if cast == "rotated" else x, CASTS[cast], axis=-1)

    packed = bytes_of(REFERENCE[cast]["codes"]).int()
    codes = torch.stack([packed & 15, packed >> 4], -1).flatten(1)  # the first of a pair in the lower half
    elements = torch.where(codes >= 8, -1, 1) * E2M1[codes & 7]
    scales = bytes_of(REFERENCE[cast]["scales"]).view(torch.float8_e4m3fn).float()
    assert torch.equal(actual.codes.float(), elements * scales.repeat_interleave(16, -1))
    assert float(actual.scale) == pytest.approx(REFERENCE[cast]["amax"] / 448 / get_format("e2m1").max)
