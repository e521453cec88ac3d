"""Figures of the recorded run on a GPU, for docs/measured.md and this folder's README (see `benchmarks.tables`)."""

import math

from benchmarks.common import recorded
from benchmarks.speed import gpu, gpu_kernels
from benchmarks.speed.optimizer import TENSOR_SIZES
from lpconv.results import BenchResult, from_json

SUMMARY = """
{gpu} with torch {torch} (CUDA {cuda}), {checks} checks, all passed: every number cast and decoded, products with all
kinds of scales, compiled layers and models next to eager ones, and an optimizer step. `lpconv finetune` with nine
recipes, `convert`, `bench` and `doctor` ran there too. Times are of the device.

- **A layer trains {static} times as fast in fp8 with static scales as in bf16**, {tensor} times with one scale per
  tensor, {row} times with one per row. torchao's `tensorwise` takes {torchao} times as long as our scales per tensor,
  its `rowwise` {rowwise} times as long as ours per row.
- **A step of `collage-plus` takes {plus} of the time of AdamW with fp32 master weights**, `int8-moment`, with 8 bytes
  per parameter, {int8}.
- Our steps reached {steps} of the copy's rate. Their threads loaded one number at a time, because the compiler did not
  know that sizes are multiples of 16. Now it does, and a thread loads 16 bytes at once: `plus` has {now} machine
  instructions per number instead of 112. This has not been measured yet.
- With {many} small tensors a step waits for the host: {plus_many:.1f} ms, torch's fused AdamW {torch_many:.1f} ms.
- Casts with a scale per row take as long as those with a static scale, although they read rows twice: the second time
  from the cache. Scales of the whole tensor or of columns need two passes.
- Tensor cores keep about 14 bits of a sum of fp8 products: products of 130 terms in fp32 have a relative error of
  1e-4, on a CPU less than 1e-6. In bf16, rounding hides the difference.

Not measured: CUDA graphs, NCCL, TransformerEngine, and other GPUs.
"""
BENCHED = "`lpconv bench` of two layers of Llama-3-8B, with embeddings and head, which stay in bf16:"


def summary() -> str:
    """What the GPU run showed, with ratios of the recorded times."""
    run = recorded("gpu")
    rows = run["kernels"]["rows"]
    assert all(c["passed"] for c in run["checks"])
    times = {(r["group"], r["name"]): r["median_ms"] for r in rows}
    large, (many,) = "step, large tensors", {g for g, _ in times if "many" in g}
    (plus,) = [r for r in recorded("cross_compile")["rows"] if (r["target"], r["path"]) == ("sm_90", "step adamw plus")]
    shares = [r["share"] for r in rows if r["group"] == large and r["name"].startswith("collage")]
    return SUMMARY.format(
        gpu=run["device"],
        torch=run["versions"]["torch"],
        cuda=run["kernels"]["cuda"],
        checks=len(run["checks"]),
        static=_ratios(times, "torch bf16", "fp8, static"),
        tensor=_ratios(times, "torch bf16", "fp8, tensor"),
        torchao=_ratios(times, "torchao, tensorwise", "fp8, tensor"),
        row=_ratios(times, "torch bf16", "fp8, row"),
        rowwise=_ratios(times, "torchao, rowwise", "fp8, row"),
        plus=f"{times[large, 'collage-plus'] / times[large, 'torch-fp32-master']:.2f}",
        int8=f"{times[large, 'collage-int8-moment'] / times[large, 'torch-fp32-master']:.2f}",
        steps=f"{min(shares):.2f} to {max(shares):.2f}",
        now=f"{plus['instructions']:.0f}",
        many=f"{math.ceil(gpu_kernels.FULL.parameters // 10 / TENSOR_SIZES['many']):,}",
        plus_many=times[many, "collage-plus"],
        torch_many=times[many, "torch-fp32-fused"],
    ).lstrip()


def _ratios(times: dict[tuple[str, str], float], a: str, b: str) -> str:
    """Time of `a` over time of `b`, in each layer with both."""
    layers = {group for group, _ in times if group.startswith("layer")}
    return " to ".join(sorted({f"{times[g, a] / times[g, b]:.2f}" for g in layers if {(g, a), (g, b)} <= times.keys()}))


def tables() -> str:
    """All recorded times."""
    run = recorded("gpu")
    benches = [from_json(BenchResult, r) for r in run["runs"].values()]
    return f"{gpu_kernels.table(run['kernels'])}\n{BENCHED}\n\n{gpu.bench_table(r for b in benches for r in b.rows)}"
