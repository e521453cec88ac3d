"""Block formats: worked examples from the MX rules, agreement with torchao, and what special values do."""

import math

import pytest
import torch
from format_oracles import same

from lpconv.errors import UsageError
from lpconv.formats.blocks import cast_blocks, decode_blocks, encode_blocks
from lpconv.formats.spec import BLOCK_FORMATS

MX = [n for n in BLOCK_FORMATS if n.startswith("mx")]


def block(*values: float, size: int = 32) -> torch.Tensor:
    return torch.tensor(values + (0.0,) * (size - len(values)))


@pytest.mark.parametrize(
    ("name", "x", "mode", "scale", "expected"),
    [
        # MX 1.0 §6.3: X = 2^(floor(log2 amax) - emax); emax of e2m1 is 2.
        ("mxfp4", (6.0, 1.0, 0.5, 0.25, -0.3), "floor", 1.0, (6.0, 1.0, 0.5, 0.0, -0.5)),
        ("mxfp4", (7.9, 1.0), "floor", 1.0, (6.0, 1.0)),  # the largest saturates
        ("mxfp4", (7.9, 1.0), "ceil", 2.0, (8.0, 1.0)),
        ("mxfp4", (0.75, 0.1), "floor", 0.125, (0.75, 0.125)),
        ("mxfp8_e4m3", (448.0, 1.0, 2.0**-9), "floor", 1.0, (448.0, 1.0, 2.0**-9)),
        ("mxfp8_e4m3", (500.0, 17.0), "floor", 1.0, (448.0, 16.0)),
        ("mxfp8_e4m3", (500.0, 17.0), "ceil", 2.0, (512.0, 17.0 - 1.0)),
        ("mxfp8_e5m2", (1.75, 2.0**-31), "floor", 2.0**-15, (1.75, 2.0**-31)),
        ("mxfp6_e3m2", (28.0, 0.0625, 0.03), "floor", 1.0, (28.0, 0.0625, 0.0)),
        ("mxfp6_e2m3", (7.5, 0.125, -0.0625), "floor", 1.0, (7.5, 0.125, -0.0)),
    ],
)
def test_worked_mx_blocks(
    name: str, x: tuple[float, ...], mode: str, scale: float, expected: tuple[float, ...]
) -> None:
    encoded = encode_blocks(block(*x), name, mx_scale_mode=mode)  # type: ignore[arg-type]
    assert encoded.scales.float().tolist() == [scale]
    assert same(decode_blocks(encoded), block(*expected))


def test_worked_nvfp4_blocks() -> None:
    x = torch.cat([block(2688.0, 1344.0, size=16), block(3.0, 6.0, -0.5, size=16), block(size=16)])
    encoded = encode_blocks(x, "nvfp4")
    assert encoded.tensor_scale.item() == 1  # amax / (6 · 448)
    assert encoded.scales.float().tolist() == [448.0, 1.0, 2.0**-9]
    assert same(decode_blocks(encoded), x)


def test_small_nvfp4_blocks_are_not_lost() -> None:
    x = torch.cat([block(2688.0, size=16), block(0.01, size=16)])  # amax_b / 6 = 0.0017 is the smallest e4m3fn number
    assert decode_blocks(encode_blocks(x, "nvfp4"))[16].item() == pytest.approx(0.01, rel=0.2)
    x[16] = 0.004  # its scale would round to zero
    assert decode_blocks(encode_blocks(x, "nvfp4"))[16].item() == pytest.approx(0.004, rel=0.3)


@pytest.mark.parametrize("name", BLOCK_FORMATS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_values_are_decoded_codes(name: str, dtype: torch.dtype) -> None:
    x = (torch.randn(3, 5, 64, generator=torch.Generator().manual_seed(1)) * 3).to(dtype)
    values = cast_blocks(x, name)
    encoded = encode_blocks(x, name)
    assert same(values, decode_blocks(encoded, dtype))
    assert encoded.scales.shape == (3, 5, 64 // BLOCK_FORMATS[name].size)
    assert same(cast_blocks(x.transpose(0, 1), name), values.transpose(0, 1))
    assert same(cast_blocks(values, name), values) or name == "nvfp4"  # nvfp4's scales follow the rounded amax
    half_step = {"mxfp8_e4m3": 2**-4, "mxfp6_e2m3": 2**-3, "mxfp8_e5m2": 2**-3, "mxfp6_e3m2": 2**-3}.get(name, 0.34)
    assert (values - x).abs().max() <= half_step * x.abs().max()


@pytest.mark.parametrize("name", BLOCK_FORMATS)
def test_special_blocks(name: str) -> None:
    size = BLOCK_FORMATS[name].size
    x = torch.stack([block(size=size), block(1.0, math.nan, size=size), block(-math.inf, size=size)])
    values = cast_blocks(x, name)
    assert same(values[0], torch.zeros(size))
    assert values[1:].isnan().all()
    assert same(decode_blocks(encode_blocks(x, name)), values)
    assert cast_blocks(torch.empty(0, size), name).shape == (0, size)
    assert decode_blocks(encode_blocks(torch.empty(4, 0), name)).shape == (4, 0)


@pytest.mark.parametrize("name", BLOCK_FORMATS)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_nan_and_inf_spoil_their_block_alone_wherever_they_stand(name: str, value: float) -> None:
    size = BLOCK_FORMATS[name].size
    x = torch.ones(size, 2 * size)
    x[:, :size].fill_diagonal_(value)
    values = cast_blocks(x, name)
    assert values[:, :size].isnan().all()
    assert values[:, size:].isfinite().all() or name == "nvfp4"  # whose second scale is one for the tensor
    assert same(decode_blocks(encode_blocks(x, name)), values)


@pytest.mark.parametrize("name", BLOCK_FORMATS)
@pytest.mark.parametrize("shape", [(31,), (4, 40), ()])
def test_blocks_that_do_not_divide_the_axis_are_refused(name: str, shape: tuple[int, ...]) -> None:
    with pytest.raises(UsageError, match="last axis") as caught:
        encode_blocks(torch.ones(shape), name)
    assert "pad" in (caught.value.hint or "")


def test_unknown_names_get_the_nearest() -> None:
    with pytest.raises(UsageError) as caught:
        cast_blocks(torch.ones(32), "nvpf4")
    assert caught.value.hint == "did you mean `nvfp4`?"


def test_gradient_and_seed() -> None:
    x = torch.randn(64, requires_grad=True)
    cast_blocks(x, "mxfp4").sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [1.0] * 64
    first, second = (
        cast_blocks(x, "nvfp4", rounding="stochastic", generator=torch.Generator().manual_seed(2)) for _ in range(2)
    )
    assert same(first, second)
    assert not same(first, cast_blocks(x, "nvfp4"))


@pytest.mark.parametrize("name", ["mxfp8_e4m3", "mxfp8_e5m2", "mxfp4"])
@pytest.mark.parametrize("mode", ["floor", "ceil"])
def test_mx_as_torchao(name: str, mode: str) -> None:
    mx_tensor = pytest.importorskip("torchao.prototype.mx_formats.mx_tensor")
    config = pytest.importorskip("torchao.prototype.mx_formats.config")
    modes = {"floor": config.ScaleCalculationMode.FLOOR, "ceil": config.ScaleCalculationMode.RCEIL}
    x = torch.randn(64, 128, generator=torch.Generator().manual_seed(9)) * torch.logspace(-12, 12, 64)[:, None]
    element = {"mxfp8_e4m3": torch.float8_e4m3fn, "mxfp8_e5m2": torch.float8_e5m2}.get(name, torch.float4_e2m1fn_x2)
    theirs = mx_tensor.MXTensor.to_mx(x, element, 32, modes[mode])
    assert same(cast_blocks(x, name, mx_scale_mode=mode), theirs.dequantize(torch.float32))  # type: ignore[arg-type]
