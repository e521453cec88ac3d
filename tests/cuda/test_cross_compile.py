"""The benchmark that compiles for GPUs: its interpreter of PTX, and, where Triton is installed, planted faults."""

import json
import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from benchmarks import common
from benchmarks.cross_compile import ptx
from tests.cuda import cuda_page

_HEAD = """.visible .entry k(.param .u64 k_param_0, .param .u64 k_param_1)
{
"""
_ADDRESSES = """
  mov.u32 %r1, %tid.x;
  ld.param.b64 %rd1, [k_param_0];
  ld.param.b64 %rd2, [k_param_1];
  mad.wide.s32 %rd3, %r1, 4, %rd1;
  mad.wide.s32 %rd4, %r1, 4, %rd2;
  ld.global.b32 { %r2 }, [ %rd3 + 0 ];
"""


def _run(body: str, x: torch.Tensor) -> torch.Tensor:
    out = torch.zeros_like(x)
    ptx.run(f"{_HEAD}{_ADDRESSES}{body}\n  st.global.b32 [ %rd4 + 0 ], {{ %r9 }};\n  ret;\n}}", [x, out],
            grid=(1, 1, 1), threads=x.numel())  # fmt: skip
    return out


def test_a_byte_is_moved_with_its_sign() -> None:
    x = torch.tensor([0x7F80, 0x80FF, 0], dtype=torch.int32).view(torch.float32)
    moved = _run("  prmt.b32 %r9, %r2, 0, 0x9991U;", x).view(torch.int32)  # byte 1, and three times its sign
    assert moved.tolist() == [0x7F, -128, 0]


def test_halves_are_added_each_by_itself() -> None:
    x = torch.tensor([0x7FFF8001, 0x0001FFFF], dtype=torch.int32).view(torch.float32)
    moved = _run("  add.s16x2 %r9, %r2, %r2;", x).view(torch.int32)
    assert moved.tolist() == [0xFFFE0002 - 2**32, 0x0002FFFE]


def test_a_fused_product_is_rounded_once() -> None:
    x = torch.rand(64, generator=torch.Generator().manual_seed(0)) + 1

    apart = _run("mul.f32 %r3, %r2, %r2;\n neg.f32 %r4, %r3;\n add.f32 %r9, %r3, %r4;", x)
    fused = _run("mul.f32 %r3, %r2, %r2;\n neg.f32 %r4, %r3;\n fma.rn.f32 %r9, %r2, %r2, %r4;", x)

    assert (apart == 0).all()
    square = x.double() * x.double()  # exact: 48 bits
    assert torch.equal(fused.double(), square - square.float().double())


def test_conversions_round_as_torch_does() -> None:
    x = torch.randn(256, generator=torch.Generator().manual_seed(0)) * 100

    through_bf16 = _run("cvt.rn.bf16.f32 %rs1, %r2;\n cvt.f32.bf16 %r9, %rs1;", x)
    pair = "cvt.rn.satfinite.e4m3x2.f32 %rs1, %r2, %r2;\n cvt.rn.f16x2.e4m3x2 %r5, %rs1;"
    through_fp8 = _run(f"{pair}\n mov.b32 {{_, %rs3}}, %r5;\n cvt.f32.f16 %r9, %rs3;", x)

    assert torch.equal(through_bf16, x.bfloat16().float())
    assert torch.equal(through_fp8, x.clamp(-448, 448).to(torch.float8_e4m3fn).float())


def test_an_unknown_instruction_is_refused_by_name() -> None:
    with pytest.raises(NotImplementedError, match=r"popc\.b32"):
        _run("popc.b32 %r9, %r2;", torch.ones(4))


_NEEDS_FAKE_GPU = pytest.mark.skipif(not cuda_page.CAN_FAKE_GPU, reason="fake GPUs need a build without CUDA, or a GPU")
_NEEDS_TRITON = pytest.mark.skipif(
    find_spec("triton") is None or shutil.which("g++") is None, reason="compiling for GPUs needs Triton and g++"
)
_PLANTED = """
import json, os, sys
os.environ.pop("LD_PRELOAD", None)
from benchmarks.cross_compile.check import compare, inputs_of
from benchmarks.cross_compile.inductor import TARGETS, pretend
target = TARGETS["sm_90"]
pretend(target)
from benchmarks.cross_compile import paths
found = {}
def unequal(options, **how):
    paths.EXACT_OPTIONS = options
    (graph,) = paths.Path(name="step", run=lambda: paths._step("adamw", "plus")).graphs()
    return compare(graph, inputs_of(graph), target, **how).unequal
exact = paths.EXACT_OPTIONS
print(json.dumps([unequal(exact), unequal({}, fuses_products=False), unequal(exact, fuses_products=True)]))
"""


@_NEEDS_FAKE_GPU
@_NEEDS_TRITON
def test_a_lost_rounding_and_a_fused_product_are_found(tmp_path: Path) -> None:
    root = cuda_page.ROOT
    library = cuda_page.build_guard(tmp_path / "guard.so")
    paths = [str(root), str(root / "tests" / "cuda"), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {"PYTHONPATH": os.pathsep.join(paths), "LD_PRELOAD": str(library)}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _PLANTED],
        capture_output=True, text=True, check=True, env={**os.environ, **environment, "LPCONV_COMPILE": "never"},
    )  # fmt: skip
    as_shipped, lost_rounding, fused_products = json.loads(done.stdout.splitlines()[-1])

    assert as_shipped == 0
    assert lost_rounding > 1000  # of 24,576 stored numbers: the low parts
    assert fused_products > 0


@_NEEDS_FAKE_GPU
@_NEEDS_TRITON
def test_kernels_are_those_recorded(tmp_path: Path) -> None:
    """A release of torch that breaks or finds a fusion fails here; `--only` and `--out` record what it does."""
    from benchmarks.cross_compile.__main__ import run_worker

    recorded = common.recorded("cross_compile")
    expected = {r["path"]: r for r in recorded["rows"] if r["target"] == "sm_90"}
    releases = f"torch {torch.__version__}; recorded with {recorded['versions']['torch']}"
    for row in run_worker("sm_90", "^(step adamw plus|linear static|linear row)$", tmp_path):
        for figure in ("kernels", "products", "bytes_moved", "unequal"):
            message = f"{figure} of `{row['path']}` with {releases}"
            assert row.get(figure) == expected[row["path"]].get(figure), message


def test_the_page_on_gpu_code_is_current() -> None:
    from tests.cuda import gpu_code_page

    text = (cuda_page.ROOT / "docs" / "gpu-code.md").read_text(encoding="utf-8")
    assert text == gpu_code_page.page(), "run the command on its top"
