"""fp8 codes decode to exactly what torch's cast and ml_dtypes say, whatever the layout."""

import ml_dtypes
import numpy as np
import pytest
import torch

from lpconv.errors import UsageError
from lpconv.kernels.decode import decode
from tests.helpers.format_oracles import same

FP8 = {
    torch.float8_e4m3fn: ml_dtypes.float8_e4m3fn,
    torch.float8_e5m2: ml_dtypes.float8_e5m2,
    torch.float8_e4m3fnuz: ml_dtypes.float8_e4m3fnuz,
    torch.float8_e5m2fnuz: ml_dtypes.float8_e5m2fnuz,
}
TARGETS = [torch.bfloat16, torch.float16, torch.float32]
ALL_BYTES = torch.arange(256, dtype=torch.int32).to(torch.uint8)


@pytest.mark.parametrize("dtype", TARGETS)
@pytest.mark.parametrize("fp8", FP8)
@pytest.mark.parametrize("finite_only", [False, True], ids=["all", "finite"])
@pytest.mark.parametrize("repeats", [1, 20])  # small tensors are cast by torch
def test_every_code_decodes_exactly(fp8: torch.dtype, dtype: torch.dtype, finite_only: bool, repeats: int) -> None:
    oracle = torch.from_numpy(ALL_BYTES.numpy().view(FP8[fp8]).astype(np.float32))
    keep = oracle.isfinite() if finite_only else torch.ones(256, dtype=torch.bool)  # finite codes take the fast path
    values = decode(ALL_BYTES[keep].repeat(repeats).view(fp8), dtype)
    assert values.dtype == dtype
    assert same(values.float(), oracle[keep].repeat(repeats))


@pytest.mark.parametrize("dtype", TARGETS)
def test_layouts_and_sizes(dtype: torch.dtype) -> None:
    codes = torch.randint(0, 126, (300, 260), dtype=torch.uint8).view(torch.float8_e4m3fn)
    for view in (codes, codes.t(), codes[::2, 1::3], codes[:0], codes[0, 0]):
        assert same(decode(view, dtype), view.to(dtype))
    assert same(decode(codes.repeat(8, 1), dtype), codes.repeat(8, 1).to(dtype))  # more than one piece


def test_out_is_filled_and_returned() -> None:
    codes = ALL_BYTES.view(torch.float8_e5m2)
    out = torch.empty(2, 256, dtype=torch.bfloat16).t()[:, 0]
    assert decode(codes, out=out) is out
    assert same(out, codes.to(torch.bfloat16))


def test_subnormal_codes_survive_when_the_thread_flushes_subnormals() -> None:
    codes = torch.tensor([1, 2, 3, 64] * 2000, dtype=torch.uint8).view(torch.float8_e4m3fn)
    expected = codes.to(torch.bfloat16)
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush subnormals")
    try:
        assert same(decode(codes), expected)
    finally:
        torch.set_flush_denormal(False)


@pytest.mark.parametrize(
    ("codes", "arguments"),
    [
        (ALL_BYTES, {}),
        (ALL_BYTES.view(torch.float8_e4m3fn), {"dtype": torch.float64}),
        (ALL_BYTES.view(torch.float8_e4m3fn), {"out": torch.empty(255, dtype=torch.bfloat16)}),
        (ALL_BYTES.view(torch.float8_e4m3fn), {"out": torch.empty(256, dtype=torch.float16)}),
    ],
)
def test_wrong_dtypes_and_shapes_are_refused(codes: torch.Tensor, arguments: dict) -> None:  # type: ignore[type-arg]
    with pytest.raises(UsageError) as caught:
        decode(codes, **arguments)
    assert caught.value.hint
