"""Operands and products of `nvfp4` next to TransformerEngine's own reference in PyTorch.

    git clone --depth 1 https://github.com/NVIDIA/TransformerEngine te
    python -m benchmarks.reproduce.nvfp4_reference --te te/transformer_engine/pytorch/custom_recipes/reference_nvfp4.py
        [--out FILE.json] [--golden tests/kernels/nvfp4_reference.json]

TransformerEngine needs a GPU to import; its reference for four bits is one file of plain PyTorch, which is run alone,
with empty stand-ins for the classes that it extends. Compared are operands (blocks along rows, 16x16 blocks, rotated
columns) element by element, and the three products of a linear layer with gradients rounded to nearest. `--golden`
writes the small cases that a test compares with.
"""

import enum
import importlib.util
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from benchmarks import common
from lpconv.kernels.linear import FP4_RECIPES, linear
from lpconv.kernels.operands import Coded, encode_operand

ROWS, COLUMNS = 1024, 768
_NVFP4 = FP4_RECIPES["nvfp4"]
CASTS = {"rows": _NVFP4.input, "16x16": _NVFP4.weight, "rotated": _NVFP4.grad_weight_casts[0]}


def load_reference(file: Path) -> Any:
    """Load the module, with stand-ins for the imports from its package."""
    package = "transformer_engine.pytorch"
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    stand_ins: dict[str, dict[str, Any]] = {
        f"{package}.custom_recipes.reference_utils": {
            "Fp4Formats": enum.Enum("Fp4Formats", ["E2M1"]),
            "HIGH_PRECISION_FLOAT_DTYPES": dtypes,
        },
        f"{package}.custom_recipes.gemm": {
            "MMParams": object,
            "GEMMType": enum.Enum("GEMMType", ["FPROP", "DGRAD", "WGRAD"]),
        },
        f"{package}.quantized_tensor": {
            "QuantizedTensorStorage": object,
            "Quantizer": type("Quantizer", (), {"__init__": _keep_usage}),
        },
    }
    for name in ("transformer_engine", package, f"{package}.custom_recipes"):
        sys.modules[name] = ModuleType(name)
    for name, contents in stand_ins.items():
        module = sys.modules[name] = ModuleType(name)
        module.__dict__.update(contents)
        parent, _, child = name.rpartition(".")
        setattr(sys.modules[parent], child, module)
    spec = importlib.util.spec_from_file_location("reference_nvfp4", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _keep_usage(self: Any, *, rowwise: bool, columnwise: bool) -> None:
    self.rowwise_usage, self.columnwise_usage = rowwise, columnwise


def quantizer(te: Any, cast: str) -> Any:
    """TransformerEngine's quantizer for one of `CASTS`; a rotated operand is its transpose."""
    shape = (16, 16) if cast == "16x16" else (1, 16)
    return te.NVFP4QuantizerRef(
        dtype=te.reference_utils.Fp4Formats.E2M1, quant_tile_shape=shape, with_rht=cast != "16x16"
    )


def theirs(te: Any, x: Tensor, cast: str) -> tuple[Tensor, Tensor, float]:
    """Packed codes, block scales and largest magnitude of TransformerEngine's cast of `x`, or of its transpose if
    rotated.
    """
    q = quantizer(te, cast).quantize(x)
    if cast == "rotated":
        return q.data_t, q.scale_t, float(q.global_amax_col)
    return q.data, q.scale, float(q.global_amax_row)


def ours(x: Tensor, cast: str) -> Coded:
    return encode_operand(x.t() if cast == "rotated" else x, CASTS[cast], axis=-1)


def values(te: Any, codes: Tensor, scales: Tensor) -> Tensor:
    """Elements times their block scales, without the scale of the tensor."""
    elements: Tensor = te.cast_from_fp4x2(codes, torch.float32)
    return elements * scales.float().repeat_interleave(16, -1)


def inputs() -> Iterator[tuple[str, Tensor]]:
    """Tensors of several distributions, in fp32 and bf16."""
    generator = torch.Generator().manual_seed(0)
    normal = torch.randn(ROWS, COLUMNS, generator=generator)
    sizes = torch.rand(ROWS, 1, generator=generator) * 40 - 20
    outliers = normal.masked_fill(torch.rand(normal.shape, generator=generator) < 1e-3, 300.0)
    made = {"normal": normal, "heavy tails": normal**3, "rows of 2^-20 to 2^20": normal * sizes.exp2(),
            "outliers of 300": outliers, "gradients of 1e-6": normal * 1e-6}  # fmt: skip
    for name, x in made.items():
        for dtype in (torch.float32, torch.bfloat16):
            yield f"{name}, {dtype}".replace("torch.", ""), x.to(dtype)


def compare_operands(te: Any) -> list[dict[str, Any]]:
    """Number of differing elements, and the relative difference of the tensor's scale."""
    rows = []
    for name, x in inputs():
        for cast in CASTS:
            codes, scales, amax = theirs(te, x, cast)
            operand = ours(x, cast)
            differ = int((operand.codes.float() != values(te, codes, scales)).sum())
            scale = abs(float(operand.scale) * 448 * 6 / amax - 1)
            rows.append({"input": name, "cast": cast, "elements": x.numel(), "differ": differ, "scale_error": scale})
    return rows


def compare_products(te: Any) -> list[dict[str, Any]]:
    """Differences of the three products, in last bits of the largest element."""
    recipe = replace(_NVFP4, gradient=replace(_NVFP4.gradient, rounding="nearest"))
    generator = torch.Generator().manual_seed(1)
    x, w, g = (torch.randn(shape, generator=generator) for shape in ((256, 512), (384, 512), (256, 384)))
    a, b = x.clone().requires_grad_(), w.clone().requires_grad_()
    output = linear(a, b, recipe=recipe)
    output.backward(g)  # type: ignore[no-untyped-call]
    assert a.grad is not None
    assert b.grad is not None
    types, activation = te.gemm.GEMMType, quantizer(te, "rows")
    qx, qg, qw = activation.quantize(x), activation.quantize(g), quantizer(te, "16x16").quantize(w)
    products = {
        "output": (qx.data, qx.scale, qw.data, qw.scale, types.FPROP, qx, qw, output.detach()),
        "gradient of the input": (qg.data, qg.scale, qw.data_t, qw.scale_t, types.DGRAD, qg, qw, a.grad),
        "gradient of the weight": (qg.data_t, qg.scale_t, qx.data_t, qx.scale_t, types.WGRAD, qg, qx, b.grad),
    }
    rows = []
    for name, (left, left_scale, right, right_scale, kind, of_left, of_right, product) in products.items():
        expected = activation.qgemm(
            left, right, SimpleNamespace(), torch.float32, left_scale, right_scale,
            gemm_type=kind, qresult_x=of_left, qresult_w=of_right,
        )  # fmt: skip
        last_bit = float(expected.abs().max()) * torch.finfo(torch.float32).eps
        rows.append({"product": name, "last_bits": float((product - expected).abs().max()) / last_bit})
    return rows


def golden_input(rows: int = 32, columns: int = 48) -> Tensor:
    """Numbers of many sizes without a random generator: cubes of a multiplicative hash."""
    index = torch.arange(1, rows * columns + 1, dtype=torch.int64)
    return ((index * 2654435761 % 2**32).double() / 2**31 - 1).pow(3).float().view(rows, columns)


def golden(te: Any) -> dict[str, Any]:
    """TransformerEngine's packed codes and scales of the small input, in hexadecimal."""
    cases = {}
    for cast in CASTS:
        codes, scales, amax = theirs(te, golden_input(), cast)
        raw = scales.view(torch.uint8)
        cases[cast] = {"codes": _digits(codes), "scales": _digits(raw), "amax": amax}
    return cases


def _digits(x: Tensor) -> list[str]:
    return [bytes(row.tolist()).hex() for row in x]


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--te", type=Path, required=True, help="TransformerEngine's reference_nvfp4.py")
    parser.add_argument("--golden", type=Path, help="where to write the cases of the test")
    options = parser.parse_args()
    te = load_reference(options.te)
    if options.golden:
        common.save(golden(te), options.golden)
    operands, products = compare_operands(te), compare_products(te)
    common.save({"command": common.command(), "machine": common.machine(), "operands": operands, "products": products},
                options.out)  # fmt: skip
    differ, count = sum(r["differ"] for r in operands), sum(r["elements"] for r in operands)
    print(f"{differ} of {count} elements differ; scales of tensors by {max(r['scale_error'] for r in operands):.1g}")
    for row in products:
        print(f"{row['product']}: {row['last_bits']:.1f} last bits of the largest element")


if __name__ == "__main__":
    main()
